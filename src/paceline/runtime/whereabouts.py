"""Where ranks stand: a board in the store of the process group, on which each rank posts it for the others.

They may wait in a collective, and can't be asked with another. A thread (train/standstill.py) posts for them.
"""

from __future__ import annotations

import json
import secrets
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as torch_dist

from paceline.runtime import collectives, process_group


class Progress:  # counters of this process: while they change, it does not stand still
    micros = 0  # micro-batches of training whose forward has begun
    read = 0  # batches of evaluations and of `trainer.loader`
    ended = "has ended"  # how, if the launcher knows


progress = Progress()


class Post(NamedTuple):
    """What a rank has posted. `calls` and `micros` order it among the calls that all ranks make."""

    place: str
    calls: int
    micros: int
    waits: bool  # idle in a collective or in an agreement: it continues only if another rank does something
    ended: bool
    stands: bool = False
    number: int = 0  # among the posts of its rank


class Board:
    """Collective: must be created on every rank."""

    def __init__(self) -> None:
        self._name = collectives.broadcast_object(secrets.token_hex(4))  # separates this group from earlier ones
        self.group = weakref.ref(torch_dist.group.WORLD)
        self.rank, self.world = torch_dist.get_rank(), torch_dist.get_world_size()
        self.timeout = process_group.FIRST_STEP_SECONDS  # of collectives
        self.calls = 0  # that all ranks have made together
        self.micros = progress.micros  # at the last of them
        self._posts = 0

    @property
    def store(self) -> Any:
        try:
            return torch_dist.distributed_c10d._get_default_store()  # private; the user may have initialized the group
        except ValueError as error:
            raise RuntimeError("the process group was destroyed") from error

    def key(self, *parts: object) -> str:
        return "/".join(map(str, ("paceline", self._name, *parts)))

    def post(self, place: str, *, waits: bool = False, ended: bool = False, stands: bool = False) -> None:
        self._posts += 1
        own = (place, self.calls, progress.micros - self.micros, waits, ended, stands, self._posts)
        self.store.set(self.key("at", self.rank), json.dumps(own))

    def post_stack(self, stack: Sequence[tuple[str, str, int]]) -> None:
        """Functions, files and lines of the main thread, innermost first."""
        self.store.set(self.key("stack", self.rank), json.dumps(stack))

    def read_stack(self, rank: int) -> list[tuple[str, str, int]]:
        text = self.read_text("stack", rank)
        return [] if text is None else [tuple(frame) for frame in json.loads(text)]

    def read(self, rank: int) -> Post | None:
        text = self.read_text("at", rank)
        return None if text is None else Post(*json.loads(text))

    def read_text(self, *parts: object) -> str | None:
        key = self.key(*parts)
        return self.store.get(key).decode() if self.store.check([key]) else None


_board: Board | None = None


def board() -> Board:
    """The board of the process group. Collective on first use."""
    global _board
    if _board is None or _board.group() is not torch_dist.group.WORLD:
        _board = Board()
    return _board
