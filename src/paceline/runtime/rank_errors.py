"""Whether all ranks come to what needs them all. Those that do not are named, in seconds rather than never.

Ranks sign in at the store through which they met, not by a collective: torch's barrier that can name the missing has a
time limit on the first rank only.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as torch_dist

from paceline.errors import CheckpointError, PacelineError
from paceline.runtime import collectives
from paceline.text import numbered

T = TypeVar("T")
_LOOK_EVERY = 0.005


class StoreBarrier:
    """Roll calls of one training. Making it is a matter of all ranks."""

    def __init__(self) -> None:
        self._name = collectives.broadcast_object(secrets.token_hex(4))  # another training's calls are not ours
        self._calls = 0  # that everybody came to
        self._last = ""

    def require(self, seconds: float, call: str, why: str) -> None:
        """Raises where not all ranks come to the same call within that time. Who gave up is not there for those who
        come later."""
        if collectives.world() == 1:
            return
        # torch has no public way to it, and the user may have opened the group.
        store = torch_dist.distributed_c10d._get_default_store()
        rank, everybody = torch_dist.get_rank(), range(torch_dist.get_world_size())
        missing = _missing(store, [self._key(self._calls, call, each) for each in everybody], rank, seconds)
        if missing:
            raise CheckpointError(
                "ranks-missing",
                f"{numbered('Rank', missing)} did not come to {call} within {seconds:g} s; rank {rank} did.",
                why=why,
                fix="call it on every rank, not behind `if trainer.is_main_process:`",
            )
        if self._last:  # all have left the call before, so nobody looks for that any more
            store.delete_key(self._last)
        self._last = self._key(self._calls, call, rank)
        self._calls += 1

    def _key(self, number: int, call: str, rank: int) -> str:
        return f"paceline/{self._name}/{number}/{call}/{rank}"


def _missing(store: Any, keys: list[str], rank: int, seconds: float) -> list[int]:
    """Sign in, and wait; the ranks that have not signed in when the time is over."""
    until = time.monotonic() + seconds
    try:
        store.set(keys[rank], "here")
        while not store.check(keys):
            if time.monotonic() > until:
                missing = [each for each, key in enumerate(keys) if not store.check([key])]
                store.delete_key(keys[rank])
                return missing
            time.sleep(_LOOK_EVERY)
    except RuntimeError:  # the store went with the rank that had it, which is the first
        return [0]
    return []


def run_on_all_ranks(work: Callable[[], T], what: str) -> T:
    """Do it on every rank; if one of them fails all do, with the first one's error."""
    result: T | None = None
    problem: BaseException | None = None
    try:
        result = work()
    except Exception as error:
        problem = error
    told = collectives.all_gather_object(None if problem is None else _as_values(problem))
    if problem is not None:
        raise problem
    for rank, values in enumerate(told):
        if values is not None:
            name, reason, fix = values
            raise CheckpointError(name, f"{what} failed on rank {rank}: {reason}", fix=fix)
    return result  # type: ignore[return-value]


def _as_values(error: BaseException) -> list[str]:
    if not isinstance(error, PacelineError):
        error = CheckpointError("not-loaded", f"{type(error).__name__}: {error}", fix="see that rank's own error")
    elif not isinstance(error, CheckpointError):
        error = CheckpointError("not-loaded", error.what, fix=error.fix)
    return [error.code.partition(".")[2], error.what, error.fix]
