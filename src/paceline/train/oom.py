"""Out-of-memory errors that state the requested and free memory, the batch, and what to change; and
`micro_batch: auto`, which finds the largest micro-batch that fits in GPU memory.

Each trial runs two training steps in a new process, because memory is fragmented after an out-of-memory error. Trials
are forked from a fork server that is itself forked before this process initializes CUDA, so the user's models and
functions need not be importable. All ranks try the same size at the same time; it fits if it fits on every rank.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.config.components import PRECISIONS
from paceline.config.recipe import Config
from paceline.data.batches import apply
from paceline.errors import TrainError
from paceline.models.loss_module import LossModule
from paceline.models.model_call import infer_call
from paceline.models.spec import find_blocks
from paceline.models.weights import as_channels_last, convert_state, convert_weights
from paceline.optim.ema import Ema
from paceline.optim.optimizers import build_optimizer
from paceline.parallel.meta_init import is_meta, materialize
from paceline.parallel.shards import local_shard
from paceline.plan.batch import BatchPlan
from paceline.plan.layout import AXIS_NAMES, Degrees
from paceline.precision import policies
from paceline.runtime import collectives, process_group, serialization
from paceline.runtime import device as devices
from paceline.runtime.processes import fork
from paceline.text import format_bytes
from paceline.train import standstill
from paceline.train.engine import Engine

_WORTHWHILE = 1 << 20  # bytes
_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?\w+)")
_FITS, _TOO_LARGE, _FAILED = 0, 3, 4

# The rest is left for NCCL's buffers, fragmentation, and slightly longer batches.
_MEMORY_FRACTION = 0.92


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
    parameters = sum(_bytes(parameter) for parameter in engine.parts.model.parameters())
    gradients = sum(_bytes(parameter) for parameter in engine.parts.model.parameters() if parameter.requires_grad)
    states = sum(_bytes(value) for state in engine.bound.optimizer.state.values() for value in state.values())
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
    return bool(find_blocks(engine.parts.model, engine.config.blocks))


class BatchSizeFinder:
    """Owns the fork server, from before CUDA is initialized until the size is known."""

    def __init__(self, config: Config, model: nn.Module, task: Any, device: Any) -> None:
        chosen = devices.choose_device(device, process_group.current_rank_info())
        if chosen.type != "cuda":
            raise TrainError("finder-on-cpu", f'micro_batch="auto" requires a GPU, got device {chosen}.')
        if torch.cuda.is_initialized():
            raise TrainError(
                "finder-after-cuda", 'micro_batch="auto" requires that CUDA is not initialized yet in this process.'
            )
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-finder-"))
        self._requests, self._results, self._server = _start_fork_server(
            self._folder, lambda batch: _train_two_steps(config, model, task, chosen, batch)
        )

    def find(self, sample: Any, max_size: int) -> int:
        """Return the largest size up to `max_size` that fits. `sample` is a batch of one sample."""
        serialization.save_result(apply(sample, lambda tensor: tensor.cpu()), self._folder)
        try:
            return search(self._fits_on_every_rank, max_size)
        finally:
            os.close(self._requests)
            os.close(self._results)
            os.waitpid(self._server, 0)

    def _fits_on_every_rank(self, size: int) -> bool:
        os.write(self._requests, size.to_bytes(8, "little"))
        results = collectives.all_gather_object(int.from_bytes(os.read(self._results, 1) or bytes([_FAILED]), "little"))
        if _FAILED in results:
            error = self._folder / "error.txt"
            raise TrainError(
                "finder-failed",
                f"A trial with {size} samples failed on rank {results.index(_FAILED)}, but not for lack of memory.",
                why=error.read_text() if error.exists() else "see the output of that rank",
            )
        return all(result == _FITS for result in results)


def search(fits: Callable[[int], bool], max_size: int) -> int:
    """Return the largest size that fits, within an eighth: double until one fails, then bisect."""
    if not fits(1):
        raise TrainError("finder-nothing-fits", "A micro-batch of one sample does not fit in GPU memory.")
    good, bad = 1, max_size + 1
    while good < max_size:
        size = min(good * 2, max_size)
        if not fits(size):
            bad = size
            break
        good = size
    while bad - good > max(1, good // 8):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def _start_fork_server(folder: Path, work: Callable[[Any], None]) -> tuple[int, int, int]:
    """Fork a process that forks one trial per request: (fd to write sizes, fd to read results, its pid)."""
    requests, write_requests = os.pipe()
    read_results, results = os.pipe()
    server = fork()
    if server:
        os.close(requests)
        os.close(results)
        return write_requests, read_results, server
    os.close(write_requests)
    os.close(read_results)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent closes the pipe
    while size := int.from_bytes(os.read(requests, 8), "little"):
        child = fork()
        if child == 0:
            _run_trial(folder, size, work)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os.write(results, (code if code in (_FITS, _TOO_LARGE) else _FAILED).to_bytes(1, "little"))
    os._exit(0)


def _run_trial(folder: Path, size: int, work: Callable[[Any], None]) -> None:
    code = _FITS
    try:
        torch.set_num_threads(1)  # a forked process must not use its parent's thread pool
        sample = serialization.load_result(folder)
        work(apply(sample, lambda tensor: tensor[:1].expand(size, *tensor.shape[1:]).contiguous()))
    except BaseException as error:
        code = _TOO_LARGE if is_out_of_memory(error) else _FAILED
        if code == _FAILED:
            (folder / "error.txt").write_text(traceback.format_exc())
    os._exit(code)


def _train_two_steps(config: Config, model: nn.Module, task: Any, device: torch.device, batch: Any) -> None:
    """Reach the peak memory of training: parameters, gradients, optimizer states, EMA, activations."""
    devices.activate(device)
    torch.cuda.set_per_process_memory_fraction(_MEMORY_FRACTION, device)
    if is_meta(model):
        materialize(model, model, device, config.seed)
    for part in (model, task.criterion):
        if isinstance(part, nn.Module):
            part.to(device)
    model.train()
    module = LossModule(model, policies.forward_context(config.precision, device))
    batch = apply(batch, lambda tensor: tensor.to(device))
    if config.channels_last:
        convert_weights(model)
        batch = apply(batch, as_channels_last)
    module.call = infer_call(model, batch, task.loss_fn, task.criterion)
    optimizer = task.optimizer or build_optimizer(model, config.optimizer, config.optimizer.lr)
    if config.channels_last:
        convert_state(optimizer)
    average = None if config.ema is None else Ema(dict(model.named_parameters()), config.ema.decay, config.ema.warmup)
    for step in (1, 2):
        module(batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            average.update(step)
    torch.cuda.synchronize(device)
