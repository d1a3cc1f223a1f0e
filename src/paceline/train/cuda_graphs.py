"""CUDA graphs: capture a function, and replay it.

A capture records the kernels that a function launches, without running them. A replay launches all of them at once, on
the same memory. A function that reads a value of the GPU in Python, or waits for it, can't be captured: errors name the
optimizer, or the operation and its module.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.errors import TrainError
from paceline.optim.fused import is_fused
from paceline.run.user_frame import find_user_frame

Result = TypeVar("Result")
_SIGNS = ("synchronizing CUDA operation", "captur")  # in torch's errors, and in CUDA's


def require_capturable(optimizer: torch.optim.Optimizer, *, waits: bool) -> None:
    """Raise TrainError if the optimizer runs on the host in every step; `waits`: the code around it does."""
    name = type(optimizer).__name__
    if any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
        why, fix = "the Trainer copies learning rates to the device itself", f"create {name} with a number as lr"
    elif is_fused(optimizer):
        return
    elif waits or not all(group.get("capturable") for group in optimizer.param_groups):
        why = "its step counts, reads or skips on the host, which a replayed graph does not"
        fix = f"create {name} with fused=True (Adam, AdamW, SGD), or remove graph"
    else:
        return
    raise TrainError("graph-and-optimizer", f"graph: true can't capture {name}.", why=why, fix=fix)


def raise_if_waiting(error: RuntimeError, model: nn.Module, again: Callable[[], Any]) -> None:
    """Raise TrainError if this error says that a step can't be captured. `again` repeats it, to find the operation."""
    message = str(error).partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError) or not any(sign in str(error) for sign in _SIGNS):
        return
    frame = find_user_frame(error)
    where = f"{_failing_operation(again) or 'an operation'} in {_module_of(error, model)}"
    raise TrainError(
        "graph-capture",
        f"The step can't be captured as a CUDA graph: {where}{f', {frame}' if frame else ''} ({message}).",
    ) from error


def _module_of(error: BaseException, model: nn.Module) -> str:
    """The innermost module that was running."""
    names = {id(module): name for name, module in model.named_modules()}
    running = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [owner for owner in running if id(owner) in names]
    if not found:
        return "the loss, the backward or the optimizer"
    return f"{names[id(found[-1])] or 'the model'} ({type(found[-1]).__name__})"


def _failing_operation(again: Callable[[], Any]) -> str | None:
    last = _LastOperation()
    try:
        with last:
            again()
    except Exception:
        return last.name
    return None


class _LastOperation(TorchDispatchMode):
    name: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.name = str(func)
        return func(*args, **(kwargs or {}))


class CudaGraphs:
    """Captures functions on one stream. Their graphs share memory, because they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise TrainError("graph-and-device", f"graph: true was requested on {device}.")
        self._stream = _stream_of_captures(device)
        self._pool: Any = None

    def release(self) -> None:
        """Call when no graph is used any longer: their memory can't be used for others."""
        torch.cuda.synchronize()
        self._pool = None

    @contextmanager
    def warm_up(self, *, strict: bool) -> Iterator[None]:
        """Run a function as it will be captured. `strict`: raise if it waits for the GPU."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream), _no_waiting() if strict else nullcontext():
                yield
        finally:
            current.wait_stream(self._stream)

    def capture(self, function: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Return a function that replays `function`, and the result that each replay overwrites."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        failed: list[BaseException] = []
        results: list[Result] = []
        try:
            # Other threads load and save data meanwhile, and may call anything.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    results.append(function())
                except BaseException as error:  # the end of the capture fails as well, with less to say
                    failed.append(error)
        except RuntimeError as error:
            torch.cuda.set_stream(current)
            failed.append(error)
        if failed:
            raise failed[0]
        self._pool = graph.pool()
        return graph.replay, results[0]


@cache
def _stream_of_captures(device: torch.device) -> torch.cuda.Stream:
    """The same one for every Trainer of a process: cuBLAS keeps a workspace (65 MiB on an H200) for each stream."""
    return torch.cuda.Stream(device)


@contextmanager
def _no_waiting() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # torch calls it a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
