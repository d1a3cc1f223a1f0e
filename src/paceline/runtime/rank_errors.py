"""Errors that concern every rank: an error of one rank is raised on all of them, and ranks that are missing are named.

`StoreBarrier` goes through the store of the process group, not through a collective: torch's barrier that can name the
missing ranks (monitored_barrier) has a time limit on the first rank only.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as torch_dist

from paceline.errors import CheckpointError, PacelineError
from paceline.runtime import collectives, objects
from paceline.text import numbered

T = TypeVar("T")
Report = dict[str, Any]  # plain values; where something failed, the error as plain values under "error"
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


def capture_error(work: Callable[[], Report], otherwise: Callable[[str], PacelineError]) -> Report:
    """What the work returns; or, under "error", what it raised. An exception without a code becomes the error that
    `otherwise` makes of its text."""
    try:
        return work()
    except PacelineError as error:
        return {"error": error.to_dict()}
    except Exception as error:
        return {"error": otherwise(_reason(error)).to_dict()}


def raise_first_error(reports: Sequence[Report]) -> None:
    """Raise the first error in the reports of all ranks, if there is one."""
    for report in reports:
        if "error" in report:
            raise PacelineError.from_dict(report["error"])


def run_on_first_rank(
    work: Callable[[], Report], otherwise: Callable[[str], PacelineError], group: objects.Group = None
) -> Report:
    """Run on the first rank of the group; its result is returned, or its error raised, on every rank.

    Collective: must be called on every rank of the group. Without a group, that is the world.
    """
    is_first = collectives.is_main() if group is None else torch_dist.get_rank(group) == 0
    own = capture_error(work, otherwise) if is_first else {}
    first = 0 if group is None else torch_dist.get_global_rank(group, 0)
    report: Report = collectives.broadcast_object(own) if group is None else objects.broadcast(own, first, group)
    raise_first_error([report])
    return report


def run_on_all_ranks(work: Callable[[], T], what: str) -> T:
    """Run on every rank. If it fails on one, every rank raises: that one its own error, the others the first one's.

    Collective: must be called on every rank.
    """
    result: T | None = None
    problem: Exception | None = None
    try:
        result = work()
    except Exception as error:
        problem = error
    reports = collectives.all_gather_object({} if problem is None else {"error": _coded(problem).to_dict()})
    if problem is not None:
        raise problem
    for rank, report in enumerate(reports):
        if "error" in report:
            repeated = f"{what} failed on rank {rank}: {report['error']['what']}"
            raise PacelineError.from_dict({**report["error"], "what": repeated, "why": ""})
    return result  # type: ignore[return-value]


def _coded(error: Exception) -> PacelineError:
    if isinstance(error, PacelineError):
        return error
    return CheckpointError("not-loaded", f"{type(error).__name__}: {error}", fix="see that rank's own error")


def _reason(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) else None
    return reason or f"{type(error).__name__}: {error}"
