"""File transfers to and from the first rank, for ranks without access to the run folder.

    written = send_file(group, lambda disk: write_file(disk, …))   # on a rank without access
    receive_file(group, rank, disk, path)                          # on the first rank, at the same time

    with fetch(folder, group, without_access) as local:            # on every rank
        read_tensors(open_checkpoint(local), targets)

Each block is preceded by its length; a length of 0 or -1 ends the file. The sender needs no disk and one block of
memory. Ranks are group ranks; the group must support CPU tensors (gloo).
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist

from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.filesystem import Filesystem, write_all
from paceline.checkpoint.planner import Group
from paceline.checkpoint.reader import open_checkpoint
from paceline.errors import CheckpointError
from paceline.run import regular_files
from paceline.runtime import objects
from paceline.runtime.consistency import Report, capture_error, raise_first_error

_BLOCK = 16 << 20
_END, _ABORTED = 0, -1  # in place of a length
_Result = TypeVar("_Result")


class _Outgoing(Filesystem):
    """A filesystem with a single file, which is sent to another rank."""

    def __init__(self, group: Group, target: int) -> None:
        self._group, self._target = group, target
        self._block = torch.empty(_BLOCK, dtype=torch.uint8)
        self._filled = 0

    def create(self, path: Path) -> int:
        return -1

    def write(self, descriptor: int, data: memoryview) -> int:
        count = min(len(data), _BLOCK - self._filled)
        self._block.numpy().data[self._filled : self._filled + count] = data[:count].cast("B")
        self._filled += count
        if self._filled == _BLOCK:
            self._send()
        return count

    def sync(self, descriptor: int) -> None:
        """The receiver syncs."""

    def close(self, descriptor: int) -> None:
        """There is no descriptor."""

    def end(self, mark: int) -> None:
        if mark == _END and self._filled:
            self._send()
        self._send_length(mark)

    def _send(self) -> None:
        self._send_length(self._filled)
        torch_dist.send(self._block[: self._filled], group=self._group, group_dst=self._target)
        self._filled = 0

    def _send_length(self, length: int) -> None:
        message = torch.tensor([length])
        torch_dist.send(message, group=self._group, group_dst=self._target)
        objects.keep(message)


def send_file(group: Group, write: Callable[[Filesystem], _Result], target: int = 0) -> _Result:
    """Call `write` with a filesystem that sends one file to `target`, which must call `receive_file`."""
    outgoing = _Outgoing(group, target)
    try:
        result = write(outgoing)
    except BaseException:
        outgoing.end(_ABORTED)
        raise
    outgoing.end(_END)
    return result


def receive_file(group: Group, source: int, disk: Filesystem, path: Path) -> None:
    """Write the file that `source` sends. It is synced to disk when this returns.

    The sender can't be interrupted: if writing fails, the rest is received and discarded before the error is raised.
    """
    blocks = _incoming(group, source)
    try:
        descriptor = disk.create(path)
        try:
            for block in blocks:
                write_all(disk, descriptor, block)
            disk.sync(descriptor)
        finally:
            disk.close(descriptor)
    finally:
        for _ in blocks:
            pass


def _incoming(group: Group, source: int) -> Iterator[memoryview]:
    memory = torch.empty(_BLOCK, dtype=torch.uint8)
    length = torch.empty(1, dtype=torch.int64)
    objects.keep(length)
    while True:
        torch_dist.recv(length, group=group, group_src=source)
        size = int(length.item())
        if size == _ABORTED:
            raise OSError(None, f"rank {source} of the group failed to send the file")
        if size == _END:
            return
        torch_dist.recv(memory[:size], group=group, group_src=source)
        yield memory.numpy().data[:size]


@contextmanager
def fetch(folder: Path, group: Group, without_access: Collection[int]) -> Iterator[Path]:
    """The path of the first rank's checkpoint on this rank: `folder`, or a temporary copy that is removed on exit.

    Collective: an error on any rank is raised on every rank. Hashes are not compared.
    """
    if group is None or not without_access:
        yield folder
        return
    rank = torch_dist.get_rank(group)
    not_fetched = functools.partial(_not_fetched, rank)
    begun = capture_error(
        lambda: _files(folder) if rank == 0 else _temporary_copy(folder) if rank in without_access else {}, not_fetched
    )
    local = Path(begun.get("copy", folder))
    try:
        names = _gather_or_raise(group, begun)[0]["names"]
        done: Report = {}
        if rank == 0:
            done = capture_error(lambda: _send_all(folder, names, group, without_access), not_fetched)
        elif rank in without_access:
            done = capture_error(lambda: _receive_all(local, names, group), not_fetched)
        _gather_or_raise(group, done)
        yield local
    finally:
        if "copy" in begun:
            shutil.rmtree(local.parent)


def _files(folder: Path) -> dict[str, Any]:
    return {"names": [manifests.NAME, manifests.DIGEST, *open_checkpoint(folder).manifest.files]}


def _temporary_copy(folder: Path) -> dict[str, Any]:
    """An empty folder with the same name, because errors mention it."""
    copy = Path(tempfile.mkdtemp(prefix="paceline-")) / folder.name
    copy.mkdir()
    return {"copy": str(copy)}


def _send_all(folder: Path, names: list[str], group: Group, without_access: Collection[int]) -> dict[str, Any]:
    """Send every file to every rank."""
    sources = ((target, functools.partial(_copy, folder / name)) for target in without_access for name in names)
    return _each(functools.partial(send_file, group, write, target) for target, write in sources)


def _receive_all(copy: Path, names: list[str], group: Group) -> dict[str, Any]:
    return _each(functools.partial(receive_file, group, 0, Filesystem(), copy / name) for name in names)


def _each(exchanges: Iterable[Callable[[], object]]) -> dict[str, Any]:
    """Make all of them, even after an error, because the other side waits for it."""
    problems = []
    for exchange in exchanges:
        try:
            exchange()
        except OSError as error:
            problems.append(error)
    if problems:
        raise problems[0]
    return {}


def _copy(path: Path, disk: Filesystem) -> None:
    with os.fdopen(regular_files.open_descriptor(path), "rb", buffering=0) as file:
        while data := os.read(file.fileno(), 1 << 20):
            write_all(disk, -1, memoryview(data))


def _gather_or_raise(group: Group, own: Report) -> list[Report]:
    """Every rank's report. Raises the first error, on every rank."""
    reports = objects.all_gather(own, group)
    raise_first_error(reports)
    return reports


def _not_fetched(rank: int, reason: str) -> CheckpointError:
    return CheckpointError(
        "not-fetched",
        f"Could not send the checkpoint to ranks without access to its folder: rank {rank}: {reason}.",
        why="these ranks load from a temporary copy on their node",
        fix="check the free space in TMPDIR on that node, or put the run folder on shared storage",
    )
