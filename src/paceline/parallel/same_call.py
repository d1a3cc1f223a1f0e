"""Requires that all ranks make the same calls of the Trainer.

`if trainer.is_main_process: trainer.evaluate(data)` makes one rank wait for the others, which have gone on, or takes
their messages for answers. So before methods that are collective and not part of a step communicate, ranks meet in the
store. A rank that waits there looks where the others are (runtime/whereabouts.py), and reports it as soon as it is
certain that they will not come:

    another method           a rank waits in one with the same number in the order of calls
    a later step             a rank is idle in a micro-batch that comes after this call
    nobody moves             every other rank is idle in a collective
    the end                  a rank has ended its script

`Agreement` is for a rank that is about to leave the common sequence of collectives: the others may already wait for it
in a collective of that sequence, so it can't ask them with another one.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import sys
import time
from collections import Counter

import torch.distributed as torch_dist

from paceline.diagnose.hang.stack_place import place_of
from paceline.errors import WorldError
from paceline.runtime import collectives, whereabouts
from paceline.runtime.whereabouts import Board, Post, progress
from paceline.text import by_rank

_POLLS_AT_FIRST, _SHORT, _LONG = 50, 0.0002, 0.005
_LOOK_EVERY, _LOOK_AT = 0.5, 200  # seconds, polls
_CALL = re.compile(r"^([^:\n]+\(\)) (?:at|as well)\b", re.MULTILINE)
_LOOKS = 4  # in a row with the same result: a post may be older than the call


class Agreement:
    """Collective: must be created on every rank. `part`: the ranks that agree, and a name for them; default: all."""

    def __init__(self, timeout: float, part: tuple[int, str] | None = None) -> None:
        self._seconds = timeout / 2  # before a collective that waits for this rank times out
        self.ranks, name = part or (collectives.world(), "")
        # Separates this training from others.
        self._name = f"{collectives.broadcast_object(secrets.token_hex(4))}{name}"
        self._number = 0

    def reached_by(self, value: str) -> int:
        """Wait until each of the ranks has passed the same value. Returns the number of ranks that did in time."""
        # There is no public way to it, and the user may have initialized the group.
        store = torch_dist.distributed_c10d._get_default_store()
        key = f"paceline/{self._name}/{self._number}/{hashlib.sha256(value.encode()).hexdigest()[:16]}"
        self._number += 1
        deadline, polls, looks = time.monotonic() + self._seconds, 0, 0
        try:
            if store.add(key, 1) == self.ranks:
                store.set(f"{key}/all", "")
                return self.ranks
            # A blocking wait would hold the lock of the store's client, which background threads use as well.
            while not store.check([f"{key}/all"]):
                polls += 1
                if polls % _LOOK_AT == 0:
                    looks = looks + 1 if _all_others_wait() else 0
                if looks == _LOOKS or time.monotonic() > deadline:
                    return int(store.add(key, -1)) + 1  # for ranks that come later, this one has left
                time.sleep(_SHORT if polls < _POLLS_AT_FIRST else _LONG)
        except RuntimeError:  # the rank that hosts the store has exited
            return 0
        return self.ranks


def _all_others_wait() -> bool:
    """Whether every other rank waits: as this one does as well, nobody will ever continue."""
    board = whereabouts.board()
    others = (board.read(rank) for rank in range(board.world) if rank != board.rank)
    return all(post and (post.waits or post.ended) for post in others)


def meet(timeout: float | None = None) -> None:
    """Wait until every rank makes the same call of the Trainer as this one. Raise if a rank does not in time, by
    default that of collectives."""
    if not torch_dist.is_initialized() or torch_dist.get_world_size() == 1:
        return
    board = whereabouts.board()
    own = place_of(sys._getframe(1)).text
    call = own.partition(" at ")[0]
    number = board.calls + 1
    reached = board.key("call", number, call)
    try:
        board.store.set(board.key("call", number, board.rank), own)
        if board.store.add(reached, 1) == board.world:
            board.store.set(f"{reached}/all", "")
        elsewhere = _wait(board, number, f"{reached}/all", call, board.timeout if timeout is None else timeout)
        if elsewhere:
            board.store.add(reached, -1)
        else:  # all ranks have left the previous meeting, so none reads its keys
            board.store.delete_key(board.key("call", number - 1, board.rank))
    except RuntimeError:
        elsewhere = {0: "has ended"}  # and with it the store
    if elsewhere:
        raise _error(call, board, {**elsewhere, board.rank: own})
    board.calls, board.micros = number, progress.micros


def _wait(board: Board, number: int, reached: str, own_call: str, timeout: float) -> dict[int, str]:
    """Where the other ranks are, if they will not come; empty if all have come."""
    began, polls, looks = time.monotonic(), 0, 0
    recognize = began + min(_LOOK_EVERY, timeout / 20)
    # A blocking wait would hold the lock of the store's client, which other threads use as well.
    while not board.store.check([reached]):
        now = time.monotonic()
        if now > recognize:
            recognize = now + min(_LOOK_EVERY, timeout / 20)
            certain, elsewhere = _look(board, number, own_call)
            looks = looks + 1 if certain else 0
            if looks == _LOOKS or now > began + timeout:
                return elsewhere or {board.rank: ""}
        polls += 1
        time.sleep(_SHORT if polls < _POLLS_AT_FIRST else _LONG)
    return {}


def _look(board: Board, number: int, own_call: str) -> tuple[bool, dict[int, str]]:
    """Whether it is certain that a rank will not come; and where the ranks are that have not come."""
    elsewhere: dict[int, str] = {}
    certain, mine = False, progress.micros - board.micros
    posts: list[Post | None] = []
    for rank in (rank for rank in range(board.world) if rank != board.rank):
        call, post = board.read_text("call", number, rank), board.read(rank)
        if call is not None and call.startswith(own_call):
            continue
        posts.append(post)
        elsewhere[rank] = call or ("has not called it" if post is None else post.place)
        passed = post is not None and post.waits and (post.calls, post.micros) > (number - 1, mine)
        certain |= call is not None or passed or (post is not None and post.ended)
    return certain or all(post is not None and post.waits for post in posts), elsewhere


def _error(call: str, board: Board, places: dict[int, str]) -> WorldError:
    lines = [places.get(rank, f"{call} as well") for rank in range(board.world)]
    ranks = Counter(_CALL.findall("\n".join(lines)))
    # Which of two calls should be conditional cannot be known: a minority of ranks is an indication.
    fewest = [each for each, count in ranks.items() if count == min(ranks.values())]
    alone = f"Rank {board.rank} called {call}, but other ranks did not"
    return WorldError(
        "different-calls",
        f"{'Ranks made different calls' if len(ranks) > 1 else alone}:\n{by_rank(lines)}",
        why="each of these calls waits until every rank has made it"
        if len(ranks) > 1
        else f"{call} is collective: it waits until every rank has called it",
        fix=f"call {' and '.join(fewest)} on every rank: not inside `if trainer.is_main_process:` or another condition "
        "on the rank, nor after a return, break or exit on some ranks; take the same number of steps on every rank",
    )
