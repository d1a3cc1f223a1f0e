"""Kills in saves of torch.distributed.checkpoint on two ranks, in the two ways in which people use it.

Over the folder that is there; or into a new folder, whose name a file `latest` then gets. The old state is all ones and
the new one all twos, so a mixture shows.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from faults import worlds

PHASES = {
    "before it begins": (0, 1),
    "before its file is opened": (0, 1),
    "file created": (0, 1),
    "in the middle of writing": (0, 1),
    "before fsync": (0, 1),
    "after fsync": (0, 1),
    "metadata before fsync": (0,),
    "before the metadata gets its name": (0,),
    "after that": (0,),
    "latest opened": (0,),
    "latest written": (0,),
}
WAYS = {"overwriting": False, "new folder and latest": True}


@dataclass(frozen=True)
class DcpKill:
    phase: str
    rank: int
    new_folders: bool


def all_kills(new_folders: bool) -> Iterator[DcpKill]:
    for phase, ranks in PHASES.items():
        for rank in ranks if new_folders or not phase.startswith("latest") else ():
            yield DcpKill(phase, rank, new_folders)


def outcome_of(kill: DcpKill, folder: Path) -> str:
    """`old`, `new`, `mixed`, or what keeps it from being loaded."""
    folder.mkdir()
    worlds.values(2, partial(_save, folder, 1, kill.new_folders))
    ended = worlds.run(2, partial(_save, folder, 2, kill.new_folders, kill))
    if ended[kill.rank].status != -signal.SIGKILL:
        raise RuntimeError(f"{kill}: not killed, but {ended[kill.rank]}")
    if ended[1 - kill.rank].status is None:
        return "the other rank hangs"
    loaded = worlds.run(2, partial(_load, folder, kill.new_folders))
    if any(each.status != 0 for each in loaded):
        return "can't be loaded"
    found = {value for each in loaded for value in each.value}
    return {frozenset({1.0}): "old", frozenset({2.0}): "new"}.get(frozenset(found), "mixed")


def _state(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    return {f"weight-{n}": distribute_tensor(torch.full((512, 256), value), mesh, [Shard(0)]) for n in range(4)}


def _save(folder: Path, step: int, new_folders: bool, kill: DcpKill | None = None) -> None:
    warnings.simplefilter("ignore")
    state = _state(float(step))
    if kill is not None and torch_dist.get_rank() == kill.rank:
        _arm(kill.phase)
    target = folder / (f"step-{step}" if new_folders else "checkpoint")
    dcp.save(state, checkpoint_id=target)
    if new_folders and torch_dist.get_rank() == 0:
        with (folder / "latest").open("w") as latest:
            if kill is not None and kill.phase == "latest opened":
                _die()
            latest.write(target.name)
    if kill is not None and kill.phase == "latest written" and torch_dist.get_rank() == 0:
        _die()
    torch_dist.barrier()


def _load(folder: Path, new_folders: bool) -> list[float]:
    """The values that this rank has then."""
    warnings.simplefilter("ignore")
    state = _state(77.0)
    name = (folder / "latest").read_text() if new_folders else "checkpoint"
    if not name:
        raise ValueError("latest is empty")
    dcp.load(state, checkpoint_id=folder / name)
    return sorted({value for each in state.values() for value in each.to_local().unique().tolist()})


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arm(phase: str) -> None:
    if phase == "before it begins":
        _die()
    if phase in ("before its file is opened", "file created", "in the middle of writing"):
        _arm_stream(phase)
    elif phase.endswith("fsync"):
        _around(os, "fsync", 2 if phase.startswith("metadata") else 1, before="before" in phase)
    elif phase in ("before the metadata gets its name", "after that"):
        _around(FileSystem, "rename", 1, before=phase.startswith("before"))


def _around(owner: Any, name: str, call: int, *, before: bool) -> None:
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def passed_by(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and before:
            _die()
        result = original(*args, **kwargs)
        if calls == call:
            _die()
        return result

    setattr(owner, name, passed_by)


def _arm_stream(phase: str) -> None:
    original = FileSystem.create_stream

    @contextmanager
    def passed_by(self: FileSystem, path: Any, mode: str) -> Iterator[Any]:
        if phase == "before its file is opened":
            _die()
        with original(self, path, mode) as stream:
            if phase == "file created":
                _die()
            yield _Half(stream)

    FileSystem.create_stream = passed_by  # type: ignore[method-assign, assignment]


class _Half:
    """A file that is written up to half of what is first given to it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        self._stream.write(data[: len(data) // 2])
        self._stream.flush()
        _die()
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
