"""Out-of-memory errors that state the requested and free memory, the batch, and what to change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from paceline.config.components import PRECISIONS
from paceline.config.recipe import Config
from paceline.errors import TrainError
from paceline.parallel.shards import local_shard
from paceline.plan.batch import BatchPlan
from paceline.text import format_bytes
from paceline.train.engine import Engine

_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?\w+)")


def is_out_of_memory(error: BaseException) -> bool:
    """The CPU allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


@contextmanager
def explain_out_of_memory(engine: Engine, plan: BatchPlan | None) -> Iterator[None]:
    """Turn out-of-memory errors of this context into a TrainError with advice."""
    try:
        yield
    except BaseException as error:
        if is_out_of_memory(error):
            raise explain(error, engine, plan) from error
        raise


def explain(error: BaseException, engine: Engine, plan: BatchPlan | None) -> TrainError:
    """`plan` is None in a custom loop."""
    requested, device = _REQUESTED.search(str(error)), engine.world.device
    parameters = sum(_bytes(parameter) for parameter in engine.model.parameters())
    gradients = sum(_bytes(parameter) for parameter in engine.model.parameters() if parameter.requires_grad)
    states = sum(_bytes(value) for state in engine.optimizer.state.values() for value in state.values())
    samples = f"{plan.micro_batch.value} samples" if plan else "unknown size"
    return TrainError(
        "out-of-memory",
        f"Out of memory on rank {engine.world.rank_info.rank} ({device}): "
        f"tried to allocate {_size(requested.group(1) if requested else None)}; {_free(device)}.",
        why=f"parameters take {format_bytes(parameters)}, gradients {format_bytes(gradients)}, optimizer states "
        f"{format_bytes(states)}; the rest are activations of a micro-batch of {samples}",
        fix=_advice(engine.config, plan, engine.world.size, gradients + states),
    )


def _bytes(value: Any) -> int:
    return local_shard(value).numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _free(device: torch.device) -> str:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    else:
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free, total = (int(facts[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
    return f"{format_bytes(free)} of {format_bytes(total)} was free"


def _size(text: str | None) -> str:
    """torch reports `20.00 GiB` for GPUs and bytes for the CPU."""
    if text is None:
        return "memory"
    number = text.removesuffix("bytes").strip()
    return format_bytes(int(number)) if number.isdigit() else text


def _advice(config: Config, plan: BatchPlan | None, ranks: int, shardable: int) -> str:
    """What helps, most effective first, with computed values."""
    advice = []
    if plan is not None and int(plan.micro_batch.value) > 1:
        smaller = int(plan.micro_batch.value) // 2
        groups = -(-plan.size // (smaller * ranks))
        advice.append(f"micro_batch: {smaller} (accumulate {groups}; same result with half the activations)")
    facts = PRECISIONS.facts(config.precision)
    if facts.gather_bytes == facts.param_bytes:  # no half precision yet
        advice.append("precision: bf16 (half the memory for activations)")
    if ranks > 1:
        saved = format_bytes(shardable * (ranks - 1) // ranks)
        advice.append(
            f"strategy: fsdp (shards gradients and optimizer states across {ranks} ranks: {saved} less on each)"
        )
    if config.recompute == "off":
        advice.append("recompute: full (activation checkpointing of the model's blocks)")
    return "; ".join(advice)
