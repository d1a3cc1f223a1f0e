"""Communication hooks of the user: `Trainer(comm_hook=fn, comm_state=state)`, or one on a DDP wrapper."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import tiny
from heard import heard
from paceline import Loss, dist
from paceline.errors import LayoutError, TrainError, WorldError
from worlds import ranks


def logged(work: Callable[[], object]) -> str:
    """What `work` logs."""
    with heard(logging.NOTSET) as lines:
        work()
    return "\n".join(lines)


class Alternating:
    """Trains one layer in odd steps, and the other in even ones."""

    def __init__(self, model: nn.Sequential) -> None:
        self.model = model

    def on_step(self, record: Any) -> None:
        self.model[0].requires_grad_(record.step % 2 == 0)
        self.model[2].requires_grad_(record.step % 2 == 1)


class Calls:
    """Counts buckets, and can be saved."""

    def __init__(self, first: int = 0) -> None:
        self.buckets, self.numbers = first, torch.full((3,), float(dist.rank()))

    def state_dict(self) -> dict[str, Any]:
        return {"buckets": self.buckets, "numbers": self.numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buckets, self.numbers = state["buckets"], state["numbers"]


def counted_mean(state: Calls, bucket: torch_dist.GradBucket) -> torch.futures.Future[Tensor]:
    """With annotations that are strings, which torch refuses."""
    state.buckets += 1
    return allreduce_hook(None, bucket)


def counts_targets(model: nn.Module, batch: Any) -> Loss:
    """The weight depends on the data."""
    counted = batch[1] > 0
    losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return Loss(sum=(losses * counted).sum(), weight=counted.sum())


def end(steps: int = 6, model: nn.Module | None = None, **settings: Any) -> Tensor:
    """The weights after training."""
    trainer = tiny.classifier_trainer(model, strategy="ddp", **settings)
    trainer.train(tiny.blobs(), max_steps=steps)
    return tiny.weights(trainer)


@ranks(2)
def test_a_hook_that_averages_gives_the_same_bits_as_no_hook() -> None:
    cases: list[dict[str, Any]] = [
        {"accumulate": 2, "clip_norm": 0.1},
        {"loss_fn": counts_targets, "accumulate": 2, "ema": 0.9},
        {"unused_parameters": "allow", "precision": "bf16", "ddp": {"bucket_mb": 0.0001}},
        {"precision": "fp16", "clip_value": 0.01},
    ]
    for settings in cases:
        state = Calls()
        assert torch.equal(end(**settings, comm_hook=counted_mean, comm_state=state), end(**settings)), settings
        assert state.buckets == 6 * (3 if "ddp" in settings else 1), settings


@ranks(2)
def test_a_hook_stays_on_wrappers_that_are_rebuilt_and_kept_and_sees_training_steps_only() -> None:
    def run(**settings: Any) -> Tensor:
        model = tiny.classifier()
        return end(10, model, callbacks=[Alternating(model)], **settings)

    state = Calls()
    assert torch.equal(run(comm_hook=counted_mean, comm_state=state), run())
    assert state.buckets == 10


@ranks(2)
def test_a_custom_loop_reduces_with_the_hook_outside_no_sync_only() -> None:
    state, data, first = Calls(), tiny.blobs(), 8 * dist.rank()
    trainer = tiny.classifier_trainer(comm_hook=counted_mean, comm_state=state)
    for _ in range(2):
        with trainer.no_sync():
            trainer.backward(trainer.forward(data[first : first + 8]))
        trainer.backward(trainer.forward(data[first : first + 8]))
        trainer.step()
    assert state.buckets == 2
    own = functional.cross_entropy(trainer.model(data[:8][0]), data[:8][1])
    with pytest.raises(
        TrainError, match=r"(?s)train\.comm-hook\].*counted_mean reduces the gradients.*trainer\.forward"
    ):
        trainer.backward(own, weight=8)


@ranks(2)
def test_a_hook_on_a_ddp_wrapper_is_taken_along_with_its_state() -> None:
    state, wrapped = Calls(), DistributedDataParallel(tiny.classifier())
    wrapped._register_builtin_comm_hook(torch_dist.BuiltinCommHookType.FP16_COMPRESS)
    built_in, in_python = end(model=wrapped), end(comm_hook=fp16_compress_hook)
    assert torch.equal(built_in, in_python) and not torch.equal(in_python, end())
    wrapped = DistributedDataParallel(tiny.classifier())
    wrapped.register_comm_hook(state, lambda state, bucket: counted_mean(state, bucket))
    end(model=wrapped)
    assert state.buckets == 6
    with pytest.raises(TrainError, match=r"comm_hook=fp16_compress_hook, and the model is wrapped .* with the hook"):
        end(model=wrapped, comm_hook=fp16_compress_hook)


@ranks(2)
def test_a_hook_without_ddp_and_a_hook_on_some_ranks_are_errors() -> None:
    with pytest.raises(LayoutError, match=r"(?s)layout\.comm-hook-and-layout.*fp16_compress_hook.*reduce_dtype"):
        tiny.classifier_trainer(strategy="fsdp", comm_hook=fp16_compress_hook)
    with pytest.raises(WorldError, match=r"(?s)different-recipes.*comm_hook"):
        tiny.classifier_trainer(comm_hook=allreduce_hook if dist.rank() else None)
    with pytest.raises(TrainError, match=r"(?s)train\.comm-hook-result.*<lambda> returned Tensor"):
        end(comm_hook=lambda state, bucket: bucket.buffer())


@ranks(2)
def test_the_log_names_the_hook_and_warns_of_a_state_that_is_not_saved() -> None:
    def lines(**settings: Any) -> str:
        return logged(lambda: tiny.classifier_trainer(quiet=False, strategy="ddp", **settings))

    compressed = lines(sync="int8")
    if dist.rank():
        lines(comm_hook=allreduce_hook, comm_state=torch_dist.group.WORLD)
        lines(comm_hook=counted_mean, comm_state=Calls())
        lines(comm_hook=allreduce_hook, comm_state=object())
        return
    assert "sync: int8: gradients take 181 B instead of 712 B (3.9 × less); 4 of 4" in compressed
    said = lines(comm_hook=allreduce_hook, comm_state=torch_dist.group.WORLD)
    assert "comm_hook: allreduce_hook reduces the gradients" in said and "saved" not in said
    assert "counted_mean reduces the gradients; its state is saved" in lines(comm_hook=counted_mean, comm_state=Calls())
    assert "(object) is not saved in checkpoints" in lines(comm_hook=allreduce_hook, comm_state=object())


@ranks(2)
def test_the_state_of_a_hook_is_saved_by_every_rank_and_loaded_on_as_many(tmp_path: Path) -> None:
    state = Calls()
    settings = {"run": str(tmp_path / "run"), "save_every": 4}
    trainer = tiny.classifier_trainer(comm_hook=counted_mean, comm_state=state, **settings)
    trainer.train(tiny.blobs(), max_steps=12)
    loaded = Calls(first=100)
    loaded.numbers += 10
    trainer = tiny.classifier_trainer(comm_hook=counted_mean, comm_state=loaded)
    trainer.load_checkpoint(tmp_path / "run")
    assert loaded.buckets == 12 and loaded.numbers.tolist() == [dist.rank()] * 3
    tiny.classifier_trainer().load_checkpoint(tmp_path / "run")  # without the hook
