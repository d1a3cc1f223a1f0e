"""Loaders and datasets with behavior of the user's own: a training reads what a plain loop of PyTorch reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    default_collate,
    get_worker_info,
)

import paceline
from heard import heard
from paceline import dist
from paceline.errors import DataError
from samples import ALL
from worlds import ranks, run_on_ranks

ROWS, BATCH, EPOCHS = 26, 8, 3


class Rows(Dataset[Any]):
    def __init__(self) -> None:
        self.inputs = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.scale = 1.0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] * self.scale, self.inputs[index].sum().reshape(1)


class RowsByEpoch(Rows):
    def set_epoch(self, epoch: int) -> None:
        self.scale = 1.0 + epoch


class RowsInBatches(Rows):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(inputs * 2 + 1, target) for inputs, target in map(self.__getitem__, indices)]


class RowsCollated(Rows):
    def __getitems__(self, indices: list[int]) -> Any:
        return self.inputs[indices] - 1, self.inputs[indices].sum(1, keepdim=True)


class RowsNormalized(Rows):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        mean = self.inputs[indices].mean(0)
        return [(inputs - mean, target) for inputs, target in map(self.__getitem__, indices)]


class RowsInSequence(Rows):
    """The next row of its own generator, whatever the index."""

    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        row = torch.from_numpy(self.random.standard_normal(4))
        return row, row.sum().reshape(1)


class Shifting(DataLoader[Any]):
    """Also counts its epochs, as mixup with a schedule does."""

    epochs = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.epochs += 1
        for inputs, targets in super().__iter__():
            yield inputs * self.epochs + 1, targets


class Doubling(DataLoader[Any]):
    """Two views of every sample."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for inputs, targets in super().__iter__():
            yield torch.cat([inputs, inputs.flip(1)]), torch.cat([targets, targets])


class Forever:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class SeveralEpochs(DataLoader[Any]):
    """timm's, which keeps its workers: an endless batch sampler, of which an epoch reads as many as it has."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.__dict__["batch_sampler"], self.length = Forever(self.batch_sampler), len(self.batch_sampler)  # type: ignore[arg-type]
        self.iterator: Any = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.iterator is None:
            self.iterator = super().__iter__()
        for _ in range(self.length):
            yield next(self.iterator)


class EverySecond(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        yield from list(super().__iter__())[::2]

    def __len__(self) -> int:
        return -(-super().__len__() // 2)


def doubled(worker: int) -> None:
    get_worker_info().dataset.scale = 2.0  # type: ignore[union-attr]


def each_twice(samples: list[Any]) -> Any:
    return torch.stack([sample[0] for sample in samples]) * 2, torch.stack([sample[1] for sample in samples])


def unchanged_batch(batch: Any) -> Any:
    return batch


def loader_of(dataset: Any, kind: Any = DataLoader, **options: Any) -> Any:
    return kind(dataset, batch_size=BATCH, **options)


LOADERS: dict[str, Callable[[], Any]] = {
    "own __iter__": lambda: loader_of(Rows(), Shifting),
    "own __iter__ with workers": lambda: loader_of(Rows(), Shifting, num_workers=1),
    "more samples than a batch has": lambda: loader_of(Rows(), Doubling),
    "of timm": lambda: loader_of(Rows(), SeveralEpochs),
    "__getitems__": lambda: loader_of(RowsInBatches()),
    "__getitems__ in a worker": lambda: loader_of(RowsInBatches(), num_workers=1),
    "subset of __getitems__": lambda: loader_of(Subset(RowsInBatches(), range(3, 21))),
    "stack of __getitems__": lambda: loader_of(
        StackDataset(RowsInBatches(), Rows()), collate_fn=lambda pairs: default_collate([a for a, b in pairs])
    ),
    "concatenation, which torch reads one by one": lambda: loader_of(ConcatDataset([RowsInBatches(), Rows()])),
    "__getitems__ that collates": lambda: loader_of(RowsCollated(), collate_fn=unchanged_batch),
    "set_epoch": lambda: loader_of(RowsByEpoch()),
    "set_epoch in workers": lambda: loader_of(RowsByEpoch(), num_workers=2),
    "set_epoch in workers that persist": lambda: loader_of(RowsByEpoch(), num_workers=1, persistent_workers=True),
    "set_epoch of parts": lambda: loader_of(ConcatDataset([Subset(RowsByEpoch(), range(9)), RowsByEpoch()])),
    "own batch sampler": lambda: DataLoader(
        Rows(), batch_sampler=EverySecond(SequentialSampler(range(ROWS)), BATCH, drop_last=False)
    ),
    "a sampler of the first samples": lambda: loader_of(Rows(), sampler=SequentialSampler(range(10))),
    "worker_init_fn": lambda: loader_of(Rows(), num_workers=1, worker_init_fn=doubled),
    "drop_last and collate_fn": lambda: loader_of(Rows(), drop_last=True, collate_fn=each_twice),
}  # fmt: skip


def datasets_in(data: Any) -> Iterator[Any]:
    """In a plain loop, the user calls set_epoch."""
    inner = [getattr(data, "dataset", None), *getattr(data, "datasets", ())]
    yield data
    for each in inner:
        yield from () if each is None else datasets_in(each)


def trained_by_torch(loader: Any) -> Tensor:
    model, optimizer = double_linear()
    for epoch in range(EPOCHS):
        for dataset in datasets_in(loader.dataset):
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)
        if loader.persistent_workers:
            loader._iterator = None  # so that the workers have the dataset as it is now
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return model.weight.detach()


def double_linear() -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1, dtype=torch.float64)
    return model, torch.optim.SGD(model.parameters(), lr=0.02)


def trained_with(data: Any, **settings: Any) -> tuple[Tensor, list[str]]:
    """The weights, and the first lines of warnings."""
    model, optimizer = double_linear()
    with heard() as said:
        trainer = paceline.Trainer(
            model, optimizer, criterion=nn.MSELoss(), run=False, quiet=True, device="cpu", precision="fp64", **settings
        )
        trainer.train(data, epochs=EPOCHS)
    lines = [warning.splitlines()[0] for warning in said]
    # How long reading takes depends on the machine and its load.
    return model.weight.detach(), [line for line in lines if "slower" not in line and "training waits" not in line]


@functools.cache
def plain_results() -> dict[str, Tensor]:
    return {name: trained_by_torch(build()) for name, build in LOADERS.items()}


def require_plain_results(expected: dict[str, Tensor], **settings: Any) -> None:
    apart = {}
    for name, plain in expected.items():
        loader = LOADERS[name]()
        if "accumulate" in settings and loader.num_workers:  # dear
            continue
        weights, said = trained_with(loader, **settings)
        if said or not torch.allclose(weights, plain, rtol=1e-9):
            apart[name] = said or weights
    assert apart == {}


def test_one_rank_reads_what_a_plain_loop_reads() -> None:
    require_plain_results(plain_results())
    require_plain_results(plain_results(), accumulate=2)


def test_two_ranks_read_what_a_plain_loop_reads() -> None:
    # On one rank all of them; on two, in `make test`, one with workers that end and one with workers that persist.
    twice = () if ALL else ("own __iter__ with workers", "__getitems__ in a worker", "worker_init_fn")
    expected = {name: plain for name, plain in plain_results().items() if name not in twice}
    run_on_ranks(2, lambda: require_plain_results(expected))


class ScaleAfterEpoch:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def on_epoch(self, record: Any) -> None:
        self.dataset.scale += 1.0


@pytest.mark.parametrize("workers, own", [(0, True), (2, True), (0, False), (1, False)])
def test_workers_see_what_a_callback_changes_in_the_dataset(workers: int, own: bool) -> None:
    """`own`: the workers of the user's DataLoader, which are started in every epoch; else those of the Trainer."""
    rows = Rows()
    settings: Any = {} if own else {"workers": workers, "batch": BATCH, "shuffle": False}
    data = loader_of(rows, num_workers=workers) if own else rows
    weights, said = trained_with(data, callbacks=[ScaleAfterEpoch(rows)], **settings)
    assert said == [] and torch.allclose(weights, trained_by_torch(loader_of(RowsByEpoch())), rtol=1e-9)


def test_set_epoch_is_left_to_a_custom_loop() -> None:
    model, optimizer = double_linear()
    rows = RowsByEpoch()
    trainer = paceline.Trainer(model, optimizer, criterion=nn.MSELoss(), run=False, quiet=True, device="cpu")
    for epoch in (5, 6):
        rows.set_epoch(epoch)
        for batch in trainer.loader(loader_of(rows)):
            trainer.training_step(batch)
        assert rows.scale == 1.0 + epoch


def test_a_dataset_whose_length_changes_is_refused() -> None:
    class Growing(RowsByEpoch):
        def __len__(self) -> int:
            return 10 + int(self.scale)

    with pytest.raises(DataError) as caught:
        trained_with(loader_of(Growing()))
    assert caught.value.code == "data.length-changed"


@ranks(2)
def test_samples_that_depend_on_what_was_read_before_are_named() -> None:
    for dataset, code in ((RowsInSequence(), "unrepeatable"), (RowsNormalized(), "coupled-samples")):
        said = trained_with(loader_of(dataset))[1]
        assert [line.split()[0] for line in said] == [f"[data.{code}]"] * (dist.rank() == 0)


def test_samples_that_are_coupled_are_named_on_one_rank_if_it_reads_them_in_parts() -> None:
    assert trained_with(loader_of(RowsNormalized()))[1] == []
    assert "[data.coupled-samples]" in trained_with(loader_of(RowsNormalized()), accumulate=2)[1][0]


@ranks(2)
def test_own_iteration_with_a_distributed_sampler_has_the_batches_of_each_rank() -> None:
    def loader() -> Any:
        return loader_of(Rows(), Shifting, sampler=DistributedSampler(Rows(), shuffle=False))

    read = [inputs for inputs, _ in loader()]
    seen: list[Tensor] = []

    class Keeping(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            seen.append(inputs.detach().clone())
            return super().forward(inputs)

    model = Keeping(4, 1, dtype=torch.float64)
    options: Any = {"run": False, "quiet": True, "device": "cpu", "preflight": False, "precision": "fp64"}
    trainer = paceline.Trainer(model, criterion=nn.MSELoss(), **options)
    trainer.evaluate(loader())
    assert all(torch.equal(a, b) for a, b in zip(seen, read, strict=True))
