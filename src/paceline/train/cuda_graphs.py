"""CUDA graphs: capture a function, and replay it.

A capture records the kernels that a function launches, without running them. A replay launches all of them at once, on
the same memory. A function that reads a value of the GPU in Python, or waits for it, can't be captured.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch

from paceline.errors import TrainError

Result = TypeVar("Result")


class CudaGraphs:
    """Captures functions on one stream. Their graphs share memory, because they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise TrainError(
                "graph-and-device",
                f"graph: true was requested on {device}.",
                why="only CUDA captures kernels in a graph",
                fix="remove graph, or train on a GPU",
            )
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
