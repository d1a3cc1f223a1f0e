"""Data on several ranks: every sample counts once, or the run is refused before its first step."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

import paceline
from paceline.errors import DataError
from worlds import ranks


def code_of(source: Any, **settings: Any) -> str:
    """Train on this data, and return the code of the error that all ranks raise."""
    with pytest.raises(DataError) as caught:
        seen_in_training(source, **settings)
    return caught.value.code


class Seen(nn.Module):
    """Remembers the samples of all steps, which are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.numbers: list[int] = []

    def forward(self, numbers: Any) -> torch.Tensor:
        if self.training:
            self.numbers += [int(number) for number in numbers]
        return (self.scale * torch.stack([number.float().reshape(-1)[0] for number in numbers])).mean()


def seen_in_training(source: Any, epochs: int = 1, **settings: Any) -> list[list[int]]:
    """The samples that each rank trained on."""
    model = Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    settings = {"preflight": False, **settings}  # its forward would count
    trainer = paceline.Trainer(model, optimizer, run=False, quiet=True, device="cpu", **settings)
    trainer.train(source, epochs=epochs)
    return paceline.dist.all_gather_object(model.numbers)


@ranks(2)
def test_time_first_batches_are_not_sliced_along_time() -> None:
    batches = [(torch.zeros(6, 4, 1), torch.zeros(4, 1))]
    assert code_of(batches) == "data.batch-dim"


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        losses = [
            (self.scale * image.mean() - target["boxes"].sum()) ** 2
            for image, target in zip(images, targets, strict=True)
        ]
        return torch.stack(losses).mean()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lists_of_images_and_targets_are_sliced_by_sample(accumulate: int) -> None:
    draw = torch.Generator().manual_seed(0)
    images = [torch.randn(3, 4 + number, 5, generator=draw) for number in range(5)]
    targets = [{"boxes": torch.randn(number + 1, 4, generator=draw)} for number in range(5)]

    def losses() -> list[float]:
        model = Detector()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = paceline.Trainer(model, optimizer, accumulate=accumulate, run=False, quiet=True, device="cpu")
        return trainer.train([(images, targets)], epochs=3).losses

    alone = losses()

    @ranks(2)
    def together() -> None:
        assert losses() == pytest.approx(alone, rel=1e-6)

    together()


def test_a_stream_split_by_hugging_face_datasets_is_sharded() -> None:
    datasets = pytest.importorskip("datasets", reason="needs Hugging Face datasets")
    from datasets.distributed import split_dataset_by_node

    def numbers(shards: list[int]) -> Iterator[dict[str, Any]]:
        for shard in shards:
            yield from ({"numbers": [10 * shard + number]} for number in range(10))

    @ranks(2)
    def each() -> None:
        whole = datasets.IterableDataset.from_generator(numbers, gen_kwargs={"shards": [0, 1, 2]}).with_format("torch")
        rank = paceline.dist.rank()
        for data in (whole, split_dataset_by_node(whole, rank=rank, world_size=2)):
            seen = seen_in_training(data, batch=10, workers=2)
            assert {number for own in seen for number in own} == set(range(30))
        assert code_of(split_dataset_by_node(whole, rank=0, world_size=3), batch=10) == "data.wrong-shard"

    each()


def test_a_webdataset_that_is_split_by_node_is_sharded() -> None:
    webdataset = pytest.importorskip("webdataset", reason="needs webdataset")

    def pipeline() -> Any:
        return webdataset.DataPipeline(
            webdataset.SimpleShardList([str(number) for number in range(5)]),
            webdataset.split_by_node,
            webdataset.split_by_worker,
            lambda shards: (torch.tensor(10 * int(shard["url"]) + n) for shard in shards for n in range(10)),
        )

    @ranks(2)
    def each() -> None:
        in_loader = DataLoader(pipeline(), batch_size=5, num_workers=2)
        four = webdataset.batched(4, collation_fn=torch.stack)
        batched = DataLoader(pipeline().parallelize(four), batch_size=None, num_workers=2)
        for data, settings in ((pipeline(), {"batch": 10}), (in_loader, {}), (batched, {})):
            seen = seen_in_training(data, **settings)
            assert {number for own in seen for number in own} == set(range(50))

    each()


class Split(IterableDataset[torch.Tensor]):
    """Splits itself by rank and worker, unevenly: rank 0 has two of every three numbers."""

    def __init__(self, count: int = 30, **attributes: Any) -> None:
        self.count = count
        self.__dict__.update(attributes)

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank, info = paceline.dist.rank(), get_worker_info()
        own = [number for number in range(self.count) if paceline.dist.world() == 1 or (number % 3 == 2) == rank]
        yield from map(torch.tensor, own[info.id :: info.num_workers] if info else own)


@pytest.mark.parametrize("accumulate", [1, 2])
@ranks(2)
def test_a_sharded_stream_is_seen_once_and_its_ranks_end_together(accumulate: int) -> None:
    seen = seen_in_training(Split(), batch=8, data={"sharded": True}, workers=2, accumulate=accumulate, epochs=2)
    assert sorted({*seen[0]}) == [number for number in range(30) if number % 3 < 2]
    numbers = collections.Counter(number for own in seen for number in own)
    # A rank or group that has none left runs a sample with weight zero.
    assert set(numbers) == set(range(30)) and min(numbers.values()) == 2
    assert accumulate > 1 or all(numbers[number] == 2 for number in range(6, 30))


@ranks(2)
def test_weights_of_a_sharded_stream_are_exact() -> None:
    model = Seen()
    trainer = paceline.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.0), batch=8, run=False, quiet=True, device="cpu"
    )
    data = Split(sharded=True)
    history = trainer.train(data, data, epochs=1)
    assert history.evaluations[0]["loss"] == pytest.approx(14.5)  # the mean of 0 to 29
    # Rank 0 reads 0, 1, 3, 4, …; rank 1 reads 2, 5, 8, …
    assert len(history.losses) == 5
    assert history.losses[0] == pytest.approx((0 + 1 + 3 + 4 + 2 + 5 + 8 + 11) / 8)
    assert history.losses[-1] == pytest.approx((24 + 25 + 27 + 28) / 4)
    with pytest.raises(DataError) as caught:
        trainer.predict(data)
    assert caught.value.code == "data.no-order"


@ranks(2)
def test_ready_batches_of_a_sharded_stream_are_those_of_each_rank() -> None:
    own = [torch.arange(4) + 10 * paceline.dist.rank(), torch.arange(2) + 10 * paceline.dist.rank() + 4]
    seen = seen_in_training(own[: 1 + paceline.dist.rank()], data={"sharded": True})
    assert seen == [[0, 1, 2, 3, 0], [10, 11, 12, 13, 14, 15]]


@ranks(2)
def test_a_stream_said_to_be_sharded_must_be_split() -> None:
    class Same(Split):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.arange(20))

    class Empty(Split):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.arange(20 * paceline.dist.rank()))

    assert code_of(Same(), batch=8, data={"sharded": True}) == "data.same-samples"
    assert code_of(Empty(), batch=8, data={"sharded": True}) == "data.empty-shard"
    assert code_of(Split(), batch=1, data={"sharded": True}) == "data.smaller-than-batch"


@ranks(2)
def test_a_stream_that_splits_itself_is_refused_until_it_is_said() -> None:
    assert code_of(Split(), batch=8) == "data.different-data"
    batches = [torch.arange(4) + 10 * paceline.dist.rank()]
    assert code_of(DataLoader(batches, batch_size=None)) == "data.different-data"
    assert code_of(iter(batches)) == "data.different-data"
    # The same number of batches on every rank, so that they meet.
    assert seen_in_training(batches, data={"sharded": False}) == [[0, 1], [12, 13]]


@ranks(2)
def test_a_stream_whose_ranks_part_later_is_refused() -> None:
    class Later(Split):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.arange(800) + (torch.arange(800) > 100) * paceline.dist.rank())

    assert code_of(Later(), batch=8) == "data.different-data"


class Listed(Dataset[torch.Tensor]):
    """Files in another order on every rank."""

    def __init__(self, seed: int) -> None:
        self.files = random.Random(seed).sample(range(60), 60)

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.files[index])


class Unseeded(Listed):
    """Augments with a generator of its own, which paceline does not seed."""

    random = np.random.default_rng()

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.tensor(self.random.random())


class Permuted(Sampler[int]):
    def __init__(self, seed: int | None) -> None:
        self.random = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.permutation(60).tolist())

    def __len__(self) -> int:
        return 60


@ranks(2)
def test_a_dataset_in_another_order_on_each_rank_is_refused() -> None:
    rank = paceline.dist.rank()
    for workers in (0, 1):
        assert code_of(Listed(rank), batch=10, workers=workers, preflight=True) == "data.different-data"
    for data in (Listed(0), Unseeded(0)):
        seen_in_training(data, batch=10, preflight=True)


@ranks(2)
def test_a_sampler_in_another_order_on_each_rank_is_refused() -> None:
    rank = paceline.dist.rank()
    loader = DataLoader(Listed(0), batch_size=10, sampler=Permuted(rank))
    assert code_of(loader) == "data.different-order"
    generator = torch.Generator().manual_seed(rank)
    assert code_of(DataLoader(Listed(0), batch_size=10, shuffle=True, generator=generator)) == "data.different-order"
    seen = seen_in_training(DataLoader(Listed(0), batch_size=10, sampler=Permuted(3)))
    assert sorted(seen[0] + seen[1]) == list(range(60))
