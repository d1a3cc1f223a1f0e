"""Where ranks stand: a board in the store of the process group, on which each rank posts it for the others.

A rank that waits has to say where the others are. It can't ask them with a collective, in which they may be already. A
thread of each rank (train/standstill.py) posts where its main thread stands if that has stopped making progress.
"""

from __future__ import annotations

import json
import secrets
import weakref
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as torch_dist

from paceline.runtime import collectives, process_group


class Progress:
    """Counters of this process: whether they change tells progress from a stand-still."""

    micros = 0  # micro-batches of training whose forward has begun
    read = 0  # batches of evaluations and of `trainer.loader`


progress = Progress()


@dataclass(frozen=True)
class Post:
    """What a rank has posted. `calls` and `micros` order it among the calls that all ranks make."""

    place: str
    calls: int = 0
    micros: int = 0
    waits: bool = False  # idle in a collective or in an agreement: it continues only if another rank does something
    ended: bool = False


class Board:
    """Collective: must be created on every rank."""

    def __init__(self) -> None:
        self._name = collectives.broadcast_object(secrets.token_hex(4))  # separates this group from earlier ones
        self.group = weakref.ref(torch_dist.group.WORLD)
        self.rank, self.world = torch_dist.get_rank(), torch_dist.get_world_size()
        self.timeout = process_group.FIRST_STEP_SECONDS  # of collectives
        self.calls = 0  # that all ranks have made together
        self.micros = progress.micros  # at the last of them

    @property
    def store(self) -> Any:
        # There is no public way to it, and the user may have initialized the group.
        return torch_dist.distributed_c10d._get_default_store()

    def key(self, *parts: object) -> str:
        return "/".join(map(str, ("paceline", self._name, *parts)))

    def post(self, place: str, *, waits: bool = False, ended: bool = False) -> None:
        own = Post(place, self.calls, progress.micros - self.micros, waits, ended)
        self.store.set(self.key("at", self.rank), json.dumps(asdict(own)))

    def read(self, rank: int) -> Post | None:
        text = self.read_text("at", rank)
        return None if text is None else Post(**json.loads(text))

    def read_text(self, *parts: object) -> str | None:
        key = self.key(*parts)
        return self.store.get(key).decode() if self.store.check([key]) else None

    def all_others_wait(self) -> bool:
        """Whether every other rank waits: if this one does as well, nobody will ever continue."""
        posts = (self.read(rank) for rank in range(self.world) if rank != self.rank)
        return all(post is not None and (post.waits or post.ended) for post in posts)


_board: Board | None = None


def board() -> Board:
    """The board of the process group. Collective on first use."""
    global _board
    if _board is None or _board.group() is not torch_dist.group.WORLD:
        _board = Board()
    return _board
