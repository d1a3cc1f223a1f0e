"""Where checkpoints are kept. Saves, loads, verification, exports and retention go through this protocol: another kind
of store is one more module beside `local_store.py`.

    draft = store.create("step-000100", size)                     # on one rank
    with store.write(draft, "rank-3.safetensors") as write:       # on each rank
        write(memoryview(b"..."))
    store.commit(draft, {"manifest.sha256": ..., "manifest.json": ...})

A checkpoint is a name with files. It exists when it is committed, and is complete then: the manifest is written last.
Until its commit a draft is invisible, and so is one whose writer was killed. What goes wrong in a store is an OSError.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from io import RawIOBase
from typing import NamedTuple, Protocol

from paceline.run.folder import BEST, LATEST

POINTERS = (LATEST, BEST)
Write = Callable[[memoryview], object]  # all of some bytes, behind those before


class Draft(NamedTuple):
    """A checkpoint before its commit. Ranks send it to each other as JSON."""

    name: str
    place: str  # of its files, known to the store


class CheckpointStore(Protocol):
    """The checkpoints of a run, by name, and pointers to some of them."""

    def where(self, name: str = "") -> str:
        """The address of a checkpoint, or of the store, for messages."""

    def names(self) -> Mapping[str, float]:
        """The names of what looks like a checkpoint, with the times at which they were last changed."""

    def files(self, name: str) -> Mapping[str, int]:
        """The files of a checkpoint with their sizes; none if there is no such checkpoint."""

    def read(self, name: str, file: str) -> RawIOBase:
        """Open a file, of which any part is read by `seek` and `readinto`, which may return less than was asked for."""

    def create(self, name: str, size: int, *, overwrite: bool = False, unique_name: bool = False) -> Draft:
        """Begin a checkpoint of `size` bytes. `unique_name`: append a number to a name that is taken."""

    def write(self, draft: Draft, file: str) -> AbstractContextManager[Write]:
        """A new file. It is durable when the context ends without an error."""

    def commit(self, draft: Draft, last: Mapping[str, bytes], *, overwrite: bool = False) -> None:
        """Write these files in their order, and make the checkpoint visible: durable when this returns. After an error
        the draft is gone, and what had its name is still there."""

    def discard(self, draft: Draft) -> None:
        """Remove the files of a draft. Raises no errors: leftovers do not look like checkpoints."""

    def delete(self, name: str) -> None:
        """Remove a checkpoint, which is invisible before any of its files is gone."""

    def pointer(self, pointer: str) -> list[str]:
        """The names in a pointer, best first; none if it was not set."""

    def point(self, pointer: str, names: Collection[str]) -> None:
        """Replace the names in a pointer, atomically."""

    def remove_leftovers(self) -> None:
        """Remove what killed saves have left behind. No other process may be writing."""


class Address(NamedTuple):
    """Of a checkpoint."""

    store: CheckpointStore
    name: str

    def __str__(self) -> str:
        return self.store.where(self.name)


def step_name(step: int) -> str:
    return f"step-{step:06d}"
