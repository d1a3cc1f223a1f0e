"""Collate functions that draw random numbers or mix the samples of a batch: named where a slice is collated, and equal
on any layout with `whole_batches`. Others are not named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

import paceline
from heard import heard
from worlds import run_on_ranks

Collate = Callable[[list[Any]], Any]

_own = np.random.default_rng(0)


def mixed(samples: list[Any]) -> Any:
    inputs, targets = default_collate(samples)
    share, order = float(np.random.beta(0.4, 0.4)), torch.randperm(len(inputs))
    return share * inputs + (1 - share) * inputs[order], share * targets + (1 - share) * targets[order]


def masked(samples: list[Any]) -> Any:
    inputs, targets = default_collate(samples)
    return torch.where(torch.rand(inputs.shape) < 0.3, 0.0, inputs), targets


def noisy(samples: list[Any]) -> Any:
    """With a generator that paceline does not know."""
    inputs, targets = default_collate(samples)
    return inputs + torch.from_numpy(_own.normal(size=inputs.shape)), targets


def normalized(samples: list[Any]) -> Any:
    inputs, targets = default_collate(samples)
    return (inputs - inputs.mean(0)) / inputs.std(0), targets


def averaged(samples: list[Any]) -> Any:
    """Changes the samples in place, as some do."""
    mean = sum(inputs.mean() for inputs, _ in samples) / len(samples)
    return default_collate([(inputs.sub_(mean), target) for inputs, target in samples])


def stacked(samples: list[Any]) -> Any:
    return [torch.stack(part) for part in zip(*samples, strict=True)]


def projected(samples: list[Any]) -> Any:
    """Products of other sizes are rounded in another way."""
    inputs, targets = default_collate(samples)
    return inputs @ torch.linspace(-1, 1, 16, dtype=inputs.dtype).view(4, 4), targets


def sorted_by_size(samples: list[Any]) -> Any:
    return default_collate(sorted(samples, key=lambda sample: float(sample[0].sum())))


def padded(samples: list[Any]) -> Any:
    rows = [inputs[: 1 + int(abs(inputs[0]) * 10) % 4] for inputs, _ in samples]
    full = nn.functional.pad(pad_sequence(rows, batch_first=True), (0, 4))[:, :4]
    return full, torch.stack([target for _, target in samples])


def unpadded(samples: list[Any]) -> Any:
    rows = [inputs[: 2 + int(abs(inputs[0]) * 10) % 3] for inputs, _ in samples]
    return pad_sequence(rows, batch_first=True), torch.stack([target for _, target in samples])


def with_facts(samples: list[Any]) -> Any:
    """The number of values in the batch is not one of a sample."""
    inputs, targets = default_collate(samples)
    return {"inputs": inputs, "targets": targets, "total": torch.tensor(inputs.numel())}


def data() -> TensorDataset:
    inputs = torch.randn(26, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(data())


def error_of(model: Any, batch: Any) -> Tensor:
    inputs, targets = (batch["inputs"], batch["targets"]) if isinstance(batch, dict) else batch
    return (model[: inputs.shape[1]] @ inputs.T - targets[:, 0]).square().mean()


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.weight


def trained(
    dataset: Dataset[Any], collate: Collate, *, workers: int = 0, **settings: Any
) -> tuple[Tensor, list[float], list[str]]:
    """Weights, losses and warnings."""
    torch.manual_seed(0)
    model = Vector()
    trainer = paceline.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        loss_fn=lambda model, batch: error_of(model(), batch),
        run=False,
        quiet=True,
        device="cpu",
        log_every=1,
        **settings,
    )
    with heard() as said:
        losses = trainer.train(DataLoader(dataset, 8, collate_fn=collate, num_workers=workers), epochs=2).losses
    return model.weight.detach(), losses, said


@pytest.mark.parametrize("world", [1, 2])
def test_that_of_the_trainer_is_used_wherever_a_dataset_is_read(world: int) -> None:
    """As that of a DataLoader, which may leave its batch size to the Trainer."""

    def sizes(self: Any, index: int) -> Any:
        inputs, target = data()[index]
        return {"inputs": inputs[: 1 + index % 4], "target": target}

    def together(samples: list[Any]) -> Any:
        assert all(sample.keys() == {"inputs", "target"} for sample in samples)
        rows = pad_sequence([sample["inputs"] for sample in samples], batch_first=True)
        return nn.functional.pad(rows, (0, 4))[:, :4], torch.stack([sample["target"] for sample in samples])

    uneven = type("Uneven", (Dataset,), {"__len__": lambda self: 26, "__getitem__": sizes})()

    def body() -> None:
        def trainer(**settings: Any) -> paceline.Trainer:
            torch.manual_seed(0)
            model = nn.Linear(4, 1).double()
            fixed: dict[str, Any] = {"criterion": nn.MSELoss(), "run": False, "quiet": True, "log_every": 1}
            return paceline.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), **fixed, **settings)

        own = trainer(batch=8, collate_fn=together)
        losses = own.train(uneven, uneven, epochs=2).losses
        loader = DataLoader(uneven, 8, shuffle=True, collate_fn=together)
        assert losses == trainer().train(loader, epochs=2).losses
        loader = DataLoader(uneven, shuffle=True, collate_fn=together)
        assert losses == trainer(batch=8).train(loader, epochs=2).losses
        assert own.evaluate(uneven) == pytest.approx(own.evaluate(loader))
        assert torch.allclose(own.predict(uneven), own.predict(loader))
        assert sum(len(inputs) for inputs, _ in own.loader(uneven)) == len(uneven) / paceline.dist.world()

    run_on_ranks(world, body)


def test_a_batch_size_that_a_loader_has_must_be_that_of_the_trainer() -> None:
    loader = DataLoader(data(), 4)
    with pytest.raises(paceline.errors.ConfigError) as caught:
        paceline.Trainer(nn.Linear(4, 1), batch=8, run=False, quiet=True).train(loader, epochs=1)
    assert caught.value.code == "config.contradiction"


COUPLED = {
    mixed: "draws random numbers",
    masked: "draws random numbers",
    noisy: "each time",
    normalized: "than for its halves",
    averaged: "than for its halves",
}


@pytest.mark.parametrize("collate", COUPLED)
def test_it_is_named_where_slices_are_collated(collate: Collate) -> None:
    assert trained(data(), collate)[2] == []  # whole batches
    for settings in ({"accumulate": 2}, {"accumulate": 2, "workers": 1}):
        [said] = trained(data(), collate, **settings)[2]
        assert said.startswith("[data.collated-slices]") and COUPLED[collate] in said
        assert collate.__name__ in said and "test_own_collate.py" in said


@pytest.mark.parametrize("collate", [stacked, projected, sorted_by_size, padded, unpadded, with_facts])
def test_others_are_not(collate: Collate) -> None:
    assert trained(data(), collate, accumulate=2)[2] == []


def test_trying_it_leaves_random_numbers_and_samples_alone() -> None:
    """Of a dataset that keeps its samples, with a collate function that changes them."""
    rows = list(data())
    first = trained(rows, averaged, accumulate=2, preflight=False)[1]  # type: ignore[arg-type]
    assert first == trained(list(data()), averaged, accumulate=2)[1]  # type: ignore[arg-type]


def test_it_is_told_once_for_a_dataset() -> None:
    rows = data()
    assert len(trained(rows, masked, accumulate=2)[2]) == 1 and trained(rows, masked, accumulate=2)[2] == []


@pytest.mark.parametrize(
    "collate",
    [mixed, pytest.param(masked, marks=pytest.mark.nightly), pytest.param(normalized, marks=pytest.mark.nightly)],
)
def test_whole_batches_are_the_same_on_any_layout(collate: Collate) -> None:
    weights, losses, _ = trained(data(), collate)
    whole: dict[str, Any] = {"data": {"whole_batches": True}}

    def compare() -> None:
        for settings in ({}, {"accumulate": 2}, {"workers": 2}):
            found = trained(data(), collate, **whole, **settings)
            assert found[2] == [] and found[1] == pytest.approx(losses, rel=1e-9)
            assert torch.allclose(found[0], weights, rtol=1e-9)

    compare()
    for number in (2, 3):
        run_on_ranks(number, compare)


@pytest.mark.parametrize("collate", [masked, pytest.param(normalized, marks=pytest.mark.nightly)])
def test_a_stream_is_collated_in_whole_batches(collate: Collate) -> None:
    """Every rank reads all of it anyway."""
    weights, losses, _ = trained(Streamed(), collate)

    def compare() -> None:
        for settings in ({}, {"accumulate": 2}, {"workers": 1}):
            found = trained(Streamed(), collate, **settings)
            assert found[2] == [] and found[1] == pytest.approx(losses, rel=1e-9)
            assert torch.allclose(found[0], weights, rtol=1e-9)

    run_on_ranks(1, compare)
    run_on_ranks(2, compare)
