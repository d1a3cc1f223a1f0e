"""`micro_batch: auto`: the largest micro-batch that fits the GPU, tried out.

Each try runs two training steps in a fresh process, since a process that ran out of memory once is in no state to go
on, and a fresh one sees the whole device. The processes are forked from a nursery that is itself forked before this
process touches CUDA, so models and functions of the user's need not be importable. All ranks try the same size at the
same time, and a size fits when it fits on all of them.
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
from paceline.optim.ema import Ema
from paceline.optim.optimizers import build_optimizer
from paceline.parallel.meta_init import is_meta, materialize
from paceline.precision import policies
from paceline.runtime import collectives, process_group, serialization
from paceline.runtime import device as devices
from paceline.train.model_call import infer_call
from paceline.train.oom import is_out_of_memory
from paceline.train.step import LossModule

_FITS, _TOO_LARGE, _BROKEN = 0, 3, 4

# What a try may use: the rest is for NCCL's buffers, fragments, and a batch that is a little longer.
_SHARE_OF_MEMORY = 0.92


class BatchSizeFinder:
    """Holds the nursery from before CUDA was touched until the size is known."""

    def __init__(self, config: Config, model: nn.Module, task: Any, device: Any) -> None:
        chosen = devices.choose_device(device, process_group.current_rank_info())
        if chosen.type != "cuda":
            raise TrainError(
                "finder-on-cpu",
                f"micro_batch: auto was asked for on {chosen}.",
                why="a CPU does not say when memory is full: the machine begins to swap, or its kernel kills something",
                fix="set micro_batch to a number",
            )
        if torch.cuda.is_initialized():
            raise TrainError(
                "finder-after-cuda",
                "micro_batch: auto was asked for after this process used the GPU.",
                why="tries run in forked processes, and CUDA does not survive a fork",
                fix="build the model on the CPU, and the Trainer before anything touches the GPU",
            )
        self._folder = Path(tempfile.mkdtemp(prefix="paceline-finder-"))
        self._requests, self._answers, self._nursery = _fork_nursery(
            self._folder, lambda batch: _train_two_steps(config, model, task, chosen, batch)
        )

    def find(self, sample: Any, most: int) -> int:
        """The largest size up to `most`, for a batch that holds one sample."""
        serialization.save_result(apply(sample, lambda tensor: tensor.cpu()), self._folder)
        try:
            return search(self._fits_on_all, most)
        finally:
            os.close(self._requests)
            os.close(self._answers)
            os.waitpid(self._nursery, 0)

    def _fits_on_all(self, size: int) -> bool:
        os.write(self._requests, size.to_bytes(8, "little"))
        answer = int.from_bytes(os.read(self._answers, 1), "little")
        answers = collectives.all_gather_object(answer)
        if _BROKEN in answers:
            rank = answers.index(_BROKEN)
            error = self._folder / "error.txt"
            raise TrainError(
                "finder-failed",
                f"A try with {size} samples failed on rank {rank}, and not for want of memory.",
                why=error.read_text() if error.exists() else "see that rank's own message",
                fix="run with a number for micro_batch first",
            )
        return all(answer == _FITS for answer in answers)


def search(fits: Callable[[int], bool], most: int) -> int:
    """The largest size that fits, to an eighth: doubling up, then halving the gap."""
    if not fits(1):
        raise TrainError(
            "finder-nothing-fits",
            "Not even one sample fits the GPU.",
            fix="use a smaller model or shorter samples, precision: bf16, or recompute activations",
        )
    good, bad = 1, most + 1
    while good < most:
        size = min(good * 2, most)
        if not fits(size):
            bad = size
            break
        good = size
    while bad - good > max(1, good // 8):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def _fork_nursery(folder: Path, work: Callable[[Any], None]) -> tuple[int, int, int]:
    """A process that forks one child a request: (where to write sizes, where to read answers, its id)."""
    requests, write_requests = os.pipe()
    read_answers, answers = os.pipe()
    nursery = os.fork()
    if nursery:
        os.close(requests)
        os.close(answers)
        return write_requests, read_answers, nursery
    os.close(write_requests)
    os.close(read_answers)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's Ctrl-C closes the pipe
    while size := int.from_bytes(os.read(requests, 8), "little"):
        child = os.fork()
        if child == 0:
            _be_a_try(folder, size, work)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os.write(answers, (code if code in (_FITS, _TOO_LARGE) else _BROKEN).to_bytes(1, "little"))
    os._exit(0)


def _be_a_try(folder: Path, size: int, work: Callable[[Any], None]) -> None:
    code = _FITS
    try:
        torch.set_num_threads(1)  # a forked process must not touch its parent's pool of threads
        sample = serialization.load_result(folder)
        work(apply(sample, lambda tensor: tensor[:1].expand(size, *tensor.shape[1:]).contiguous()))
    except BaseException as error:
        code = _TOO_LARGE if is_out_of_memory(error) else _BROKEN
        if code == _BROKEN:
            (folder / "error.txt").write_text(traceback.format_exc())
    os._exit(code)


def _train_two_steps(config: Config, model: nn.Module, task: Any, device: torch.device, batch: Any) -> None:
    """What a step of training holds at its height: weights, gradients, optimizer, average, activations."""
    devices.activate(device)
    torch.cuda.set_per_process_memory_fraction(_SHARE_OF_MEMORY, device)
    if is_meta(model):
        materialize(model, model, device, config.seed)
    for part in (model, task.criterion):
        if isinstance(part, nn.Module):
            part.to(device)
    model.train()
    module = LossModule(model, policies.forward_context(config.precision, device))
    batch = apply(batch, lambda tensor: tensor.to(device))
    module.call = infer_call(model, batch, task.loss_fn, task.criterion)
    optimizer = task.optimizer or build_optimizer(model, config.optimizer, config.optimizer.lr)
    average = None if config.ema is None else Ema(dict(model.named_parameters()), config.ema.decay, config.ema.warmup)
    for step in (1, 2):
        module(batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            average.update(step)
    torch.cuda.synchronize(device)
