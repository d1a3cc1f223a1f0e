"""Checks that all members of a process group make the same call, before a collective starts.

Ranks compare their calls through the store (diagnose/hang/barrier.py), because a collective could hang itself. A rank
raises as soon as it is certain that others will not come. One that has died is not waited for: the collective fails
then, and its error is known to the launcher.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as torch_dist

from paceline.diagnose.hang.barrier import Arrival, Board, Call, Post, arrive
from paceline.errors import WorldError
from paceline.run.heartbeat import counters
from paceline.run.user_frame import running_line
from paceline.runtime import process_group
from paceline.text import by_rank

Group = torch_dist.ProcessGroup | None
_DEFAULT_GROUP = "0"
_SEQUENCE = "collectives"
_SIMULATED = ("fake", "threaded")  # backends without other processes


class GroupBoard(Board):
    """The board of a process group, on a connection of its own: another thread may be waiting in that of the group."""

    def __init__(self, name: str | None = None) -> None:
        # Private, because the user may have initialized the group.
        store: Any = torch_dist.distributed_c10d._get_default_store()
        with suppress(RuntimeError, NotImplementedError):
            store = store.clone()
        super().__init__(store, torch_dist.get_rank(), torch_dist.get_world_size(), counters, name=name)
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
            self.post(ended=counters.ended or "has ended")


def require_group() -> None:
    """For other threads: a reference to the group, even a weak one, could be the last one to be dropped."""
    if not torch_dist.is_initialized():
        raise RuntimeError("the process group was destroyed")


_board: GroupBoard | None = None


def current_board(name: str | None = None) -> GroupBoard:
    """The board of the process group; a new one of this name, if there is a name."""
    global _board
    if name is not None or _board is None or not _board.is_current:
        _board = GroupBoard(name)
    return _board


def require_same_call(call: str, group: Group, patience: float | None = None) -> None:
    """Raise unless all members of the group make the same call with this number in the group. With patience, stop
    checking this group if they are later than that; otherwise wait as long as the collective would."""
    group = torch_dist.group.WORLD if group is None else group
    assert group is not None
    board = current_board()
    sequence = f"{_SEQUENCE}/{'all' if patience is None else 'first'}/{group.group_name}"
    if sequence not in board.checked:
        simulated = torch_dist.get_backend(group) in _SIMULATED
        board.checked[sequence] = [] if simulated else torch_dist.get_process_group_ranks(group)
    members = board.checked[sequence]
    if not members:
        return
    line = running_line()
    place = f"{call} at {line}" if line else call
    seconds = _timeout_of(group) if patience is None else patience
    try:
        arrival = arrive(board, sequence, call, members, place=place, wait=seconds)
    except torch_dist.DistNetworkError:  # the process with the store has ended, and with it the run
        board.checked[sequence] = []
        if patience is None:
            raise _error(f"Rank {board.rank} called {place}, but the rank with the store has ended.") from None
        return
    if arrival.outcome == "different":
        raise _different(arrival, group.group_name)
    if arrival.outcome == "stuck":
        raise _stuck(arrival.posts)
    if arrival.outcome == "late" and patience is None:
        raise _timed_out(arrival, seconds)
    if arrival.outcome == "late":
        board.checked[sequence] = []


def describe(operation: str, tensors: list[torch.Tensor], *details: str) -> str:
    """all_reduce((2,), float32, sum)"""
    shapes = [str(tuple(tensor.shape)) for tensor in tensors]
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    return f"{operation}({', '.join(filter(None, [*shapes, *dtypes, *details]))})"


def _timeout_of(group: torch_dist.ProcessGroup) -> float:
    timeout = process_group.timeout_of(group)
    return process_group.FIRST_STEP_SECONDS if timeout is None else timeout.total_seconds()


def _error(what: str) -> WorldError:
    return WorldError(
        "different-collectives",
        what,
        why="a collective needs the same operation, shape, dtype and root on every member of its group, in the same "
        "order; otherwise it hangs or corrupts data",
        fix="compare these lines; look for a branch that depends on the rank, or data of different sizes, before them",
    )


def _different(arrival: Arrival, group: str) -> WorldError:
    members = arrival.call.members
    texts = [arrival.sides[rank].place if rank in arrival.sides else "not there yet" for rank in members]
    where = f" (call {arrival.call.number} of group {group})" if group != _DEFAULT_GROUP else ""
    return _error(f"Ranks called different collectives{where}:\n{by_rank(texts, ranks=members)}")


def _stuck(posts: Mapping[int, Post]) -> WorldError:
    """The error of ranks that wait for each other in different calls, or for a rank that has ended."""
    texts = []
    for post in posts.values():
        has_ended = post.ended and not post.failed
        texts.append(f"{'has ended; its last call was ' if has_ended else ''}{post.call.place}{_in_group(post.call)}")
    has_ended = any(post.ended and not post.failed for post in posts.values())
    what = "Ranks wait in a collective for a rank that has ended" if has_ended else "Ranks called different collectives"
    return _error(f"{what}:\n{by_rank(texts, ranks=list(posts))}")


def _in_group(call: Call) -> str:
    kind, _, rest = call.sequence.partition("/")
    group = rest.partition("/")[2].rpartition(".")[0] if kind == _SEQUENCE else ""
    return "" if group in ("", _DEFAULT_GROUP) else f", in group {group} of ranks {', '.join(map(str, call.members))}"


def _timed_out(arrival: Arrival, seconds: float) -> RuntimeError:
    """In the words of gloo, by which a launcher recognizes timeouts."""
    call, posts = arrival.call, arrival.posts
    late = [rank for rank in call.members if rank not in posts or not posts[rank].has_made(call)]
    seen = by_rank([posts[rank].call.place if rank in posts else "no call" for rank in late], ranks=late)
    return RuntimeError(f"Timed out waiting {seconds * 1000:.0f}ms in {call.place}; last calls:\n{seen}")
