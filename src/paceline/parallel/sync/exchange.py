"""Collectives between replicas, with a count of the bytes that this rank sends.

    exchange = Exchange(group)
    work = exchange.all_reduce(tensor, async_op=True)

Bytes are worked out from sizes, as described in `plan/network_model.py`.
"""

from __future__ import annotations

from collections.abc import Generator
from math import prod
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.futures import Future

from paceline.plan.network_model import Traffic
from paceline.runtime.collective_calls import Group, all_gather_single

_LARGE = 1 << 16  # bytes
Result = TypeVar("Result")
Collectives = Generator[Any, None, Result]  # yields what a collective with async_op=True returns


class Exchange:
    """`group`: the replicas that this rank reduces with; None: all ranks. `traffic`: where bytes are counted, together
    with those that other parts send."""

    def __init__(self, group: Group = None, traffic: Traffic | None = None) -> None:
        self.group, self.traffic = group, traffic or Traffic()
        self.ranks, self.rank = torch_dist.get_world_size(group), torch_dist.get_rank(group)

    def all_reduce(self, tensor: Tensor, *, async_op: bool = False) -> Any:
        """Sum in place."""
        self.traffic.all_reduce(tensor.nbytes, self.ranks)
        return torch_dist.all_reduce(tensor, group=self.group, async_op=async_op)

    def all_to_all(self, received: Tensor, sent: Tensor) -> Any:
        """Send an equal part of `sent` to every rank; parts of `received` are in the order of ranks. Asynchronous."""
        self.traffic.all_to_all(sent.nbytes, self.ranks)
        messages = self._messages(received, sent.chunk(self.ranks))
        return messages or torch_dist.all_to_all_single(received, sent, group=self.group, async_op=True)

    def all_gather(self, received: Tensor, sent: Tensor) -> Any:
        """Asynchronous."""
        self.traffic.all_gather(sent.nbytes, self.ranks)
        messages = self._messages(received, (sent,) * self.ranks)
        return messages or all_gather_single(received, sent, group=self.group, async_op=True)

    def _messages(self, received: Tensor, sent: tuple[Tensor, ...]) -> Any:
        """The same as messages, if they are large and the backend is gloo. A rank that enters a collective of gloo late
        sends its data before the word that it can receive: one direction of a link then waits for the other."""
        if received.nbytes < _LARGE or received.is_cuda or torch_dist.get_backend(self.group) != "gloo":
            return None
        parts, others = received.chunk(self.ranks), [rank for rank in range(self.ranks) if rank != self.rank]
        parts[self.rank].copy_(sent[self.rank])
        works = [torch_dist.irecv(parts[rank], group=self.group, group_src=rank) for rank in others]
        return _Messages(works + [torch_dist.isend(sent[rank], group=self.group, group_dst=rank) for rank in others])


class _Messages(list[Any]):
    def wait(self) -> None:
        for work in self:
            work.wait()

    def get_future(self) -> Future[None]:
        """Those of gloo's messages have none."""
        future = Future[None]()

        def complete() -> None:
            try:
                self.wait()
                future.set_result(None)
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]

        Thread(target=complete, daemon=True).start()
        return future


class Scratch:
    """Memory for messages. Large tensors that are allocated anew in every step cost more time on the CPU than what is
    done with them, because the operating system hands out their pages one by one. Buckets are exchanged one after the
    other, so that all can use the same memory."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def empty(self, use: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor, valid until the next call for the same use."""
        needed = prod(size) * dtype.itemsize
        memory = self._memory.get(use)
        if memory is None or memory.numel() < needed or memory.device != device:
            memory = self._memory[use] = torch.empty(needed, dtype=torch.uint8, device=device)
        return memory[:needed].view(dtype).view(size)


def wait_for(sequence: Collectives[Result]) -> Result:
    """Run a sequence to its end."""
    try:
        while True:
            next(sequence).wait()
    except StopIteration as end:
        result: Result = end.value
        return result


class CollectiveQueue:
    def __init__(self) -> None:
        self._last: Future[None] | None = None
        self._stream: torch.cuda.Stream | None = None

    def submit(self, sequence: Collectives[None], output: Tensor) -> Future[Tensor]:
        """A future of `output`, complete when the sequence has ended. Call from one thread only."""
        if output.is_cuda:
            return self._enqueue(sequence, output)
        before, done = self._last, Future[None]()
        self._last = done

        def advance(finished: Future[Any] | None) -> None:
            try:
                if finished is not None:
                    finished.value()  # raises the error of a failed collective
                collective = next(sequence)
            except StopIteration:
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)  # type: ignore[arg-type]
            else:
                collective.get_future().add_done_callback(advance)

        if before is None:
            advance(None)
        else:
            before.add_done_callback(advance)
        return done.then(lambda finished: (finished.value(), output)[1])

    def _enqueue(self, sequence: Collectives[None], output: Tensor) -> Future[Tensor]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(output.device)
        self._stream.wait_stream(torch.cuda.current_stream(output.device))
        future = Future[Tensor](devices=[output.device])
        with torch.cuda.stream(self._stream):
            wait_for(sequence)
            future.set_result(output)  # records the stream, for which whoever waits then waits
        return future
