"""Sequences of collectives that run beside the backward, in the same order on every rank.

A compression sends several messages per bucket, and computes in between: what it sends next depends on what it
received. Such a sequence is written as a generator that yields its collectives:

    def mean(tensor, exchange):
        yield exchange.all_reduce(tensor, async_op=True)
        tensor /= exchange.ranks

    wait_for(mean(tensor, exchange))                             # here and now
    future = queue.submit(mean(tensor, exchange), tensor)        # beside what this thread does next

On the CPU, the rest of a sequence runs in gloo's threads. If sequences of two buckets ran at the same time, ranks would
issue collectives in different orders, as their threads happen to be scheduled, and gloo would match messages that do
not belong together. The queue therefore runs one sequence after the other, and its group must have no other users
during a backward. On a GPU, collectives do not block this thread: sequences are enqueued on a stream of their own.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.futures import Future

Result = TypeVar("Result")
Collectives = Generator[Any, None, Result]  # yields what a collective with async_op=True returns


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
