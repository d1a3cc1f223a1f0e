"""A store of checkpoints in the memory of one process, for tests: what a store has to do, and nothing of files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from itertools import count
from typing import Any

from paceline.checkpoint.checkpoint_store import Draft, Write
from paceline.checkpoint.manifest import NAME
from paceline.errors import CheckpointError


class MemoryFile(BytesIO):
    def readinto(self, into: Any) -> int:
        return super().readinto(memoryview(into)[:1000])  # a store may return less than was asked for


class MemoryStore:
    """Like one of objects: names with a `/`, and no renames. The manifest is what makes a checkpoint of a draft."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, bytes]] = {}  # also drafts
        self._pointers: dict[str, list[str]] = {}
        self._times: dict[str, float] = {}
        self._numbers = count()

    def where(self, name: str = "") -> str:
        return f"memory://{name}"

    def names(self) -> Mapping[str, float]:
        return {name: self._times[name] for name, files in self.objects.items() if NAME in files}

    def files(self, name: str) -> Mapping[str, int]:
        files = self.objects.get(name, {})
        return {file: len(content) for file, content in files.items()} if NAME in files else {}

    def read(self, name: str, file: str) -> Any:
        if file not in self.objects.get(name, {}):
            raise FileNotFoundError(2, "No such object", file)
        return MemoryFile(self.objects[name][file])

    def create(self, name: str, size: int, *, overwrite: bool = False, unique_name: bool = False) -> Draft:
        if unique_name:
            names = (name if number == 1 else f"{name}-{number}" for number in count(1))
            name = next(each for each in names if each not in self.objects)
        if name in self.objects and not overwrite:
            raise CheckpointError("exists", f"{self.where(name)} already exists.")
        draft = Draft(name, f"{name}/draft-{next(self._numbers)}")
        self.objects[draft.place] = {}
        return draft

    @contextmanager
    def write(self, draft: Draft, file: str) -> Iterator[Write]:
        parts: list[bytes] = []
        yield lambda data: parts.append(bytes(data))
        self.objects[draft.place][file] = b"".join(parts)

    def commit(self, draft: Draft, last: Mapping[str, bytes], *, overwrite: bool = False) -> None:
        assert list(last)[-1] == NAME
        self.objects[draft.name] = self.objects.pop(draft.place) | last
        self._times[draft.name] = float(next(self._numbers))

    def discard(self, draft: Draft) -> None:
        self.objects.pop(draft.place, None)

    def delete(self, name: str) -> None:
        del self.objects[name]

    def pointer(self, pointer: str) -> list[str]:
        return self._pointers.get(pointer, [])

    def point(self, pointer: str, names: Collection[str]) -> None:
        self._pointers[pointer] = list(names)

    def remove_leftovers(self) -> None:
        self.objects = {name: files for name, files in self.objects.items() if NAME in files}
