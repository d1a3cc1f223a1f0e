from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tiny
from paceline.errors import TrainError
from paceline.train import oom
from worlds import ranks


class Greedy(nn.Module):
    """Asks for far more memory than any machine has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        torch.empty(len(inputs), 2**50, dtype=torch.uint8)
        outputs: torch.Tensor = self.layer(inputs)
        return outputs


def test_out_of_memory_says_what_was_requested_what_was_free_and_what_to_change() -> None:
    trainer = tiny.classifier_trainer(Greedy(), batch=16, accumulate=2)
    with pytest.raises(TrainError) as caught:
        trainer.train(tiny.blobs(), epochs=1)
    text = str(caught.value)
    assert caught.value.code == "train.out-of-memory"
    assert f"tried to allocate {8 * 2**20:.1f} GiB" in text and "was free" in text and "rank 0 (cpu)" in text
    assert "micro-batch of 8 samples" in text
    assert "accumulate=4 (4 instead of 8 samples" in text and 'precision="bf16"' in text


class Deep(nn.Module):
    """Has blocks, some megabytes, and not enough memory in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 30_000), nn.Linear(30_000, 8)) for _ in range(2))
        self.last = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def advice(**settings: Any) -> str:
    with pytest.raises(TrainError) as caught:
        tiny.classifier_trainer(Deep(), **settings).train(tiny.blobs(), max_steps=1)
    return str(caught.value).partition("fix: ")[2]


BLOCKS = {"blocks": ["blocks.*"]}
PLAN = {"plan": {"blocks.*.0": "column", "blocks.*.1": "row"}}


@pytest.mark.parametrize(
    ("settings", "expected", "absent"),
    [
        ({"batch": 16}, ["accumulate=2 (8 instead of 16", 'recompute="full"', 'precision="bf16"'], ["strategy"]),
        ({"batch": 16, "micro_batch": 8}, ["micro_batch=4 (4 instead of 8"], []),
        ({"batch": None, "micro_batch": 6}, ["micro_batch=3 and accumulate=2"], []),
        ({"batch": 1, "precision": "bf16", "recompute": "full"}, ["smaller samples"], ["accumulate", "bf16", "recom"]),
    ],
)
def test_advice_on_one_rank(settings: dict[str, Any], expected: list[str], absent: list[str]) -> None:
    said = advice(**BLOCKS, **settings)
    assert all(part in said for part in expected) and not any(part in said for part in absent), said


@ranks(2)
def test_advice_counts_data_ranks_and_leaves_out_what_is_on() -> None:
    said = advice(batch=12, strategy="ddp", **BLOCKS)
    assert "accumulate=2 (3 instead of 6" in said
    assert 'strategy="fsdp" (shards parameters, gradients and optimizer states over 2 times' in said
    said = advice(batch=12, strategy="fsdp", precision="bf16", recompute="full", **BLOCKS)
    assert not any(part in said for part in ("strategy", "recompute", "precision"))
    said = advice(batch=12, strategy="fsdp", fsdp={"reshard": False}, recompute="every-2", **BLOCKS)
    assert 'fsdp={"reshard": True}' in said and 'recompute="full"' in said
    said = advice(batch=48, strategy="ddp", deterministic="everywhere", **BLOCKS)
    assert "slices=24 in all runs to compare (2 samples" in said and "accumulate" not in said and "fsdp" not in said
    said = advice(batch=12, strategy="tp", tensor=PLAN, **BLOCKS)
    assert "accumulate=2 (6 instead of 12" in said and "strategy" not in said and "layout" not in said


@ranks(4)
def test_advice_shards_the_replicas_of_a_layout() -> None:
    said = advice(batch=12, layout={"replicate": 2, "tensor": 2}, tensor=PLAN, **BLOCKS)
    assert "accumulate=2 (3 instead of 6" in said and "layout={'shard': 2, 'tensor': 2}" in said


def test_out_of_memory_is_explained_in_a_custom_loop_too() -> None:
    trainer = tiny.classifier_trainer(Greedy())
    for height in (trainer.training_step, trainer.forward):
        with pytest.raises(TrainError) as caught:
            height(tiny.blobs(16)[:])
        assert caught.value.code == "train.out-of-memory"


def test_other_errors_are_raised_unchanged() -> None:
    def fail(model: nn.Module, batch: Any) -> torch.Tensor:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        tiny.classifier_trainer(loss_fn=fail).train(tiny.blobs(), epochs=1)


@pytest.mark.parametrize(("limit", "most"), [(1, 64), (5, 64), (37, 64), (64, 64), (1000, 64), (3, 3), (1, 1)])
def test_the_search_finds_the_largest_size_to_an_eighth(limit: int, most: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    found = oom.search(fits, most)
    best = min(limit, most)
    assert found <= best <= found + max(1, found // 8)
    assert found in tried and len(tried) == len(set(tried))


def test_a_model_for_which_no_sample_fits_has_a_code() -> None:
    with pytest.raises(TrainError) as caught:
        oom.search(lambda size: False, 8)
    assert caught.value.code == "train.finder-nothing-fits"


def test_the_finder_is_refused_on_cpu_with_the_reason() -> None:
    with pytest.raises(TrainError) as caught:
        tiny.classifier_trainer(micro_batch="auto", device="cpu")
    assert caught.value.code == "train.finder-on-cpu" and "swap" in str(caught.value)
