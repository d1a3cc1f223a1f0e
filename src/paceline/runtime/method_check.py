"""Requires that all ranks make the same calls of the Trainer, and asks whether they leave a common order together.

`if trainer.is_main_process: trainer.evaluate(data)` makes one rank wait for the others, which have gone on, or takes
their messages for answers. So before methods that are collective and not part of a step communicate, ranks meet in the
store (diagnose/hang/barrier.py). What a rank that waits there reports as soon as it is certain:

    another method           a rank waits in one with the same number in the order of calls
    a later step             a rank is idle in a micro-batch that comes after this call
    nobody moves             every other rank is idle in a collective
    the end                  a rank has ended its script

`Departures` are for a rank that is about to leave the common sequence of collectives: the others may already wait for
it in a collective of that sequence, so it can't ask them with another one.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections import Counter
from collections.abc import Sequence

import torch.distributed as torch_dist

from paceline.diagnose.hang.barrier import METHODS, Arrival, Board, arrive
from paceline.diagnose.hang.stack_place import place_of
from paceline.errors import WorldError
from paceline.runtime import collectives
from paceline.runtime.collective_check import GroupBoard, current_board
from paceline.text import by_rank

_CALL = re.compile(r"^([^:\n]+\(\)) (?:at|as well)\b", re.MULTILINE)


def join_board() -> GroupBoard:
    """The board of the process group, the same one on all ranks. Collective."""
    names = collectives.all_gather_object(current_board().name)
    # Only some ranks may have needed one in an earlier group of this store.
    return current_board("+".join(names) if len(set(names)) > 1 else None)


class Departures:
    """Collective: must be created on every rank. `members`: the ranks that leave together, by default all."""

    def __init__(self, timeout: float, members: Sequence[int] | None = None) -> None:
        self._seconds = timeout / 2  # before a collective that waits for this rank times out
        self.members = range(collectives.world()) if members is None else members
        # Separates this training from others.
        self._sequence = f"depart/{collectives.broadcast_object(secrets.token_hex(4))}/{self.members[0]}"

    def joined_by(self, value: str) -> int:
        """Wait until each of the members has passed the same value. Returns how many have, in time."""
        place = place_of(sys._getframe(1)).text
        try:
            arrival = arrive(
                current_board(), self._sequence, value, self.members,
                place=place, wait=self._seconds, give_up=True, sees_idle=True,
            )  # fmt: skip
        except RuntimeError:  # the rank that hosts the store has exited
            return 0
        return arrival.here


def require_same_method(timeout: float | None = None) -> None:
    """Wait until every rank makes the same call of the Trainer as this one. Raise if a rank does not in time, by
    default that of collectives."""
    if not torch_dist.is_initialized() or torch_dist.get_world_size() == 1:
        return
    board = current_board()
    place = place_of(sys._getframe(1)).text
    call = place.partition(" at ")[0]
    try:
        seconds = board.timeout if timeout is None else timeout
        arrival = arrive(board, METHODS, call, range(board.world), place=place, wait=seconds, sees_idle=True)
    except RuntimeError:
        raise _error(call, board, {0: "has ended", board.rank: place}) from None  # and with it the store
    if arrival.outcome in ("different", "stuck", "late"):
        raise _error(call, board, {**_elsewhere(arrival, board, call), board.rank: place})


def _elsewhere(arrival: Arrival, board: Board, call: str) -> dict[int, str]:
    """Where the ranks are that have not come."""
    found = {}
    for rank in range(board.world):
        side, post = arrival.sides.get(rank), arrival.posts.get(rank) or board.read_post(rank)
        if side is not None and side.value != call:
            found[rank] = side.place
        elif side is None and (post is None or not post.has_made(arrival.call)):
            found[rank] = post.place if post else "has not called it"
    return found


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
