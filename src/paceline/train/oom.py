"""Out-of-memory errors that state the requested and free memory, the batch, and what to change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.config.components import PRECISIONS
from paceline.config.recipe import Config
from paceline.errors import TrainError
from paceline.models.spec import find_blocks
from paceline.parallel.shards import local_shard
from paceline.plan.batch import BatchPlan
from paceline.plan.layout import AXIS_NAMES, Degrees
from paceline.text import format_bytes
from paceline.train import standstill
from paceline.train.engine import Engine

_WORTHWHILE = 1 << 20  # bytes
_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?\w+)")


def is_out_of_memory(error: BaseException) -> bool:
    """The CPU allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


@contextmanager
def explain_out_of_memory(engine: Engine, plan: BatchPlan | None) -> Iterator[None]:
    """Turn out-of-memory errors of this context into a TrainError with advice. A timeout notes where ranks stand."""
    try:
        yield
    except BaseException as error:
        if is_out_of_memory(error):
            raise explain(error, engine, plan) from error
        standstill.note_places(error)
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
        fix="; ".join(_advice(engine, plan, parameters + gradients + states)),
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


def _advice(engine: Engine, plan: BatchPlan | None, shardable: int) -> Iterator[str]:
    """What helps and is not on yet, most effective first, with computed values."""
    config, degrees = engine.config, engine.layout.degrees
    if plan is None:
        yield "pass smaller batches, and take the optimizer step after several of them"
    elif int(plan.micro_batch.value) > 1:
        yield _smaller_micro_batch(config, plan, degrees.data_ranks)
    facts = PRECISIONS.facts(config.precision)
    if facts.gather_bytes == facts.param_bytes:  # no half precision yet
        yield 'precision="bf16" (half the memory for activations)'
    more = degrees.replicate  # that many replicas can share what each of them holds
    if (saved := shardable * (more - 1) // more) >= _WORTHWHILE and not config.fixed_order:
        what = f"parameters, gradients and optimizer states over {more} times as many ranks"
        yield f"{_sharded(degrees)} (shards {what}: {format_bytes(saved)} less on each)"
    if degrees.shard > 1 and degrees.pipeline == 1 and not config.fsdp.reshard:
        yield 'fsdp={"reshard": True} (frees the gathered parameters of a block after its forward)'
    if config.recompute != "full" and _can_recompute(engine):
        yield 'recompute="full" (activation checkpointing of the model\'s blocks)'
    if engine.world.device.type == "cuda" and degrees.shard > 1 and not config.fsdp.offload:
        yield 'fsdp={"offload": True} (keeps parameters and optimizer states in CPU memory; slow)'
    yield "smaller samples (image size, sequence length), a smaller model, or more ranks"


def _smaller_micro_batch(config: Config, plan: BatchPlan, data_ranks: int) -> str:
    """At most half of it, in as few accumulation steps as it takes: a recipe with this setting is consistent."""
    if plan.slices is not None:
        more = min(2 * plan.slices, plan.size)
        return f"slices={more} in all runs to compare ({-(-plan.size // more)} samples at a time)"
    groups = -(-plan.size // (int(plan.micro_batch.value) // 2 * data_ranks))
    micro = -(-plan.size // (groups * data_ranks))
    effect = f"{micro} instead of {plan.micro_batch.value} samples at a time, with the same result"
    if isinstance(config.micro_batch, int):
        derives_batch = config.batch is None and config.batch_per_rank is None
        accumulate = f" and accumulate={groups}" if config.accumulate is not None or derives_batch else ""
        return f"micro_batch={micro}{accumulate} ({effect})"
    return f"accumulate={groups} ({effect})"


def _sharded(degrees: Degrees) -> str:
    """The setting that shards what is replicated now."""
    if degrees.pipeline == degrees.tensor == 1:
        return 'strategy="fsdp"'
    changed = replace(degrees, replicate=1, shard=degrees.replicate * degrees.shard)
    return f"layout={ ({name: changed.of(name) for name in AXIS_NAMES if changed.of(name) > 1}) }"


def _can_recompute(engine: Engine) -> bool:
    if engine.layout.degrees.pipeline > 1:
        return engine.config.pipeline.schedule != "zero-bubble"
    return bool(find_blocks(engine.model, engine.config.blocks))
