"""A thread that hashes blocks while another one reads or writes: hashing and both of those leave Python's lock free."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

from paceline.checkpoint.manifest import digest

_INLINE = 64 << 10  # bytes below which handing over costs more than hashing


class Hashing:
    """A context; `busy` is how long the thread has worked."""

    def __init__(self) -> None:
        self.busy = 0.0

    def __enter__(self) -> Hashing:
        self._pool = ThreadPoolExecutor(1, "paceline-hash")
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def of(self, block: memoryview) -> Future[str]:
        if len(block) >= _INLINE:
            return self._pool.submit(self._digest, block)
        done: Future[str] = Future()
        done.set_result(self._digest(block))
        return done

    def _digest(self, block: memoryview) -> str:
        began = perf_counter()
        text = digest(block)
        self.busy += perf_counter() - began
        return text
