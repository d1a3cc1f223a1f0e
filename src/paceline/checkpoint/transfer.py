"""File transfers to and from the first rank, for ranks without access to the run folder.

    write_file(sending(group), name, …)                        # on a rank without access
    receive_file(group, rank, store.write(draft, name))        # on the first rank, at the same time

    with fetch(address, group, without_access) as local:       # on every rank
        read_tensors(open_checkpoint(local), targets)

Each block is preceded by its length; a length of 0 or -1 ends the file. The sender needs no disk and one block of
memory. Ranks are group ranks; the group must support CPU tensors (gloo).
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist

from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.checkpoint_store import Address, Draft, Write
from paceline.checkpoint.local_store import LocalStore
from paceline.checkpoint.planner import Group
from paceline.checkpoint.reader import open_checkpoint
from paceline.errors import CheckpointError
from paceline.runtime import objects
from paceline.runtime.consistency import Report, capture_error, raise_first_error

_BLOCK = 16 << 20
_END, _ABORTED = 0, -1  # in place of a length


class _Outgoing:
    """A file that is sent to another rank."""

    def __init__(self, group: Group, target: int) -> None:
        self._group, self._target = group, target
        self._block = torch.empty(_BLOCK, dtype=torch.uint8)
        self._filled = 0

    def write(self, data: memoryview) -> None:
        while data:
            count = min(len(data), _BLOCK - self._filled)
            self._block.numpy().data[self._filled : self._filled + count] = data[:count].cast("B")
            self._filled += count
            data = data[count:]
            if self._filled == _BLOCK:
                self._send()

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


@contextmanager
def sending(group: Group, target: int = 0) -> Iterator[Write]:
    """A file that is sent to `target`, which must call `receive_file`."""
    outgoing = _Outgoing(group, target)
    try:
        yield outgoing.write
    except BaseException:
        outgoing.end(_ABORTED)
        raise
    outgoing.end(_END)


def receive_file(group: Group, source: int, file: AbstractContextManager[Write]) -> None:
    """Write the file that `source` sends.

    The sender can't be interrupted: if writing fails, the rest is received and discarded before the error is raised.
    """
    blocks = _incoming(group, source)
    try:
        with file as write:
            for block in blocks:
                write(block)
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
def fetch(address: Address, group: Group, without_access: Collection[int]) -> Iterator[Address]:
    """The first rank's checkpoint on this rank: `address`, or a temporary copy that is removed on exit.

    Collective: an error on any rank is raised on every rank. Hashes are not compared.
    """
    if group is None or not without_access:
        yield address
        return
    rank = torch_dist.get_rank(group)
    not_fetched = functools.partial(_not_fetched, rank)
    begin = _names if rank == 0 else _temporary_copy if rank in without_access else lambda address: {}
    begun = capture_error(lambda: begin(address), not_fetched)
    local = Address(LocalStore(Path(begun["copy"])), address.name) if "copy" in begun else address
    try:
        names = _gather_or_raise(group, begun)[0]["names"]
        done: Report = {}
        if rank == 0:
            done = capture_error(lambda: _send_all(address, names, group, without_access), not_fetched)
        elif rank in without_access:
            done = capture_error(lambda: _receive_all(local, names, group), not_fetched)
        _gather_or_raise(group, done)
        yield local
    finally:
        if "copy" in begun:
            shutil.rmtree(begun["copy"])


def _names(address: Address) -> dict[str, Any]:
    return {"names": [manifests.NAME, manifests.DIGEST, *open_checkpoint(address).manifest.files]}


def _temporary_copy(address: Address) -> dict[str, Any]:
    """An empty folder with the same name, because errors mention it."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-"))
    (folder / address.name).mkdir()
    return {"copy": str(folder)}


def _send_all(address: Address, names: list[str], group: Group, without_access: Collection[int]) -> dict[str, Any]:
    """Send every file to every rank."""
    return _each(functools.partial(_send, address, name, group, target) for target in without_access for name in names)


def _send(address: Address, name: str, group: Group, target: int) -> None:
    block = memoryview(bytearray(1 << 20))
    with sending(group, target) as write, address.store.read(address.name, name) as file:
        while count := file.readinto(block):
            write(block[:count])


def _receive_all(copy: Address, names: list[str], group: Group) -> dict[str, Any]:
    draft = Draft(copy.name, copy.name)
    return _each(functools.partial(receive_file, group, 0, copy.store.write(draft, name)) for name in names)


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


def _gather_or_raise(group: Group, own: Report) -> list[Report]:
    """Every rank's report. Raises the first error, on every rank."""
    reports = objects.all_gather(own, group)
    raise_first_error(reports)
    return reports


def _not_fetched(rank: int, reason: str) -> CheckpointError:
    return CheckpointError(
        "not-fetched", f"Could not send the checkpoint to ranks without access to its folder: rank {rank}: {reason}."
    )
