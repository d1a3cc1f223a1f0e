"""`micro_batch: auto`: find the largest micro-batch that fits in GPU memory.

Each trial runs two training steps in a new process, because memory is fragmented after an out-of-memory error. Trials
are forked from a fork server that is itself forked before this process initializes CUDA, so the user's models and
functions need not be importable. All ranks try the same size at the same time; it fits if it fits on every rank.
"""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.config.recipe import Config
from paceline.data.batches import apply
from paceline.errors import TrainError
from paceline.models.loss_module import LossModule
from paceline.models.model_call import infer_call
from paceline.models.weights import as_channels_last, convert_state, convert_weights
from paceline.optim.ema import Ema
from paceline.optim.optimizers import build_optimizer
from paceline.parallel.meta_init import is_meta, materialize
from paceline.precision import policies
from paceline.runtime import collectives, process_group, serialization
from paceline.runtime import device as devices
from paceline.runtime.processes import fork
from paceline.train.oom import is_out_of_memory

_FITS, _TOO_LARGE, _FAILED = 0, 3, 4

# The rest is left for NCCL's buffers, fragmentation, and slightly longer batches.
_MEMORY_FRACTION = 0.92


class BatchSizeFinder:
    """Owns the fork server, from before CUDA is initialized until the size is known."""

    def __init__(self, config: Config, model: nn.Module, task: Any, device: Any) -> None:
        chosen = devices.choose_device(device, process_group.current_rank_info())
        if chosen.type != "cuda":
            raise TrainError(
                "finder-on-cpu",
                f'micro_batch="auto" requires a GPU, got device {chosen}.',
                why="running out of CPU memory raises no error: the machine swaps, or the kernel kills a process",
                fix="set micro_batch to a number",
            )
        if torch.cuda.is_initialized():
            raise TrainError(
                "finder-after-cuda",
                'micro_batch="auto" requires that CUDA is not initialized yet in this process.',
                why="trials run in forked processes, and CUDA can't be used after a fork",
                fix="build the model on the CPU, and create the Trainer before anything uses the GPU",
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
                fix="train with a fixed micro_batch first",
            )
        return all(result == _FITS for result in results)


def search(fits: Callable[[int], bool], max_size: int) -> int:
    """Return the largest size that fits, within an eighth: double until one fails, then bisect."""
    if not fits(1):
        raise TrainError(
            "finder-nothing-fits",
            "A micro-batch of one sample does not fit in GPU memory.",
            fix='use a smaller model or shorter samples, precision="bf16", or recompute="full"',
        )
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
