"""A thread that hashes what another one reads or writes, close behind it: what was just touched is still in a cache,
where hashing is several times as fast as from memory."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

import xxhash

PIECE = 1 << 20  # bytes that are handed over at once
_INLINE = 64 << 10  # bytes below which handing over costs more than hashing


def pieces(block: memoryview) -> Iterator[memoryview]:
    return (block[at : at + PIECE] for at in range(0, len(block), PIECE))


class Hashing:
    """A context; `busy` is how long the thread has worked."""

    def __init__(self) -> None:
        self.busy = 0.0

    def __enter__(self) -> Hashing:
        self._pool = ThreadPoolExecutor(1, "paceline-hash")
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def of(self, size: int) -> BlockHash:
        """The hash of a block of so many bytes, which are to be added in order."""
        return BlockHash(self, self._pool if size >= _INLINE else None)


class BlockHash:
    def __init__(self, hashing: Hashing, pool: ThreadPoolExecutor | None) -> None:
        self._hashing, self._pool, self._state = hashing, pool, xxhash.xxh3_128()
        self._last: Future[None] | None = None

    def add(self, piece: memoryview) -> None:
        if self._pool is None:
            self._add(piece)
        else:
            self._last = self._pool.submit(self._add, piece)

    def _add(self, piece: memoryview) -> None:
        began = perf_counter()
        self._state.update(piece)
        self._hashing.busy += perf_counter() - began

    def result(self) -> str:
        if self._last is not None:
            self._last.result()
        return self._state.hexdigest()
