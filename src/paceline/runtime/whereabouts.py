"""The board on which the ranks of the process group post and meet, and the counters of this one."""

from __future__ import annotations

import atexit
import weakref
from contextlib import suppress
from typing import Any

import torch.distributed as torch_dist

from paceline.diagnose.hang.barrier import Board
from paceline.runtime import process_group


class Progress:  # counters of this process: while they change, it does not stand still
    micros = 0  # micro-batches of training whose forward has begun
    read = 0  # batches of evaluations and of `trainer.loader`
    ended = "has ended"  # how, if the launcher knows


progress = Progress()


class GroupBoard(Board):
    """The board of a process group, on a connection of its own: another thread may be waiting in that of the group."""

    def __init__(self, name: str | None = None) -> None:
        # Private, because the user may have initialized the group.
        store: Any = torch_dist.distributed_c10d._get_default_store()
        with suppress(RuntimeError, NotImplementedError):
            store = store.clone()
        super().__init__(store, torch_dist.get_rank(), torch_dist.get_world_size(), lambda: progress.micros, name=name)
        self.checked: dict[str, list[int]] = {}  # members by the sequence of collectives; without, it is not checked
        self.timeout = process_group.FIRST_STEP_SECONDS  # of collectives
        self._group = weakref.ref(torch_dist.group.WORLD)
        atexit.register(self._post_end)

    @property
    def is_current(self) -> bool:
        """Whether its group is the default one."""
        return torch_dist.is_initialized() and self._group() is torch_dist.group.WORLD

    def _post_end(self) -> None:
        with suppress(Exception):  # the store may have ended before
            self.post(ended=progress.ended)


_board: GroupBoard | None = None


def board(name: str | None = None) -> GroupBoard:
    """The board of the process group; a new one of this name, if there is a name."""
    global _board
    if name is not None or _board is None or not _board.is_current:
        _board = GroupBoard(name)
    return _board
