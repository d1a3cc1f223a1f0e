"""An error on one rank is raised on all of them, and a barrier names the ranks that did not reach it."""

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
Report = dict[str, Any]  # plain values; after a failure, the error under "error"
_POLL_SECONDS = 0.005


class StoreBarrier:
    """Barriers over the store of the process group. Collective: must be created on every rank.

    torch's monitored_barrier names missing ranks too, but has a timeout on rank 0 only.
    """

    def __init__(self) -> None:
        self._name = collectives.broadcast_object(secrets.token_hex(4))  # separates this training from others
        self._passed = 0  # barriers that all ranks reached
        self._last_key = ""

    def require(self, seconds: float, call: str, why: str) -> None:
        """Raise unless all ranks make the same call within `seconds`."""
        if collectives.world() == 1:
            return
        # There is no public way to it, and the user may have initialized the group.
        store = torch_dist.distributed_c10d._get_default_store()
        rank = torch_dist.get_rank()
        keys = [f"paceline/{self._name}/{self._passed}/{call}/{each}" for each in range(torch_dist.get_world_size())]
        missing = _missing(store, keys, rank, seconds)
        if missing:
            raise CheckpointError(
                "ranks-missing",
                f"{numbered('Rank', missing)} did not call {call} within {seconds:g} s of rank {rank}.",
                why=why,
                fix="call it on every rank, not inside `if trainer.is_main_process:`",
            )
        if self._last_key:  # all ranks have left the previous barrier, so none reads its keys
            store.delete_key(self._last_key)
        self._last_key = keys[rank]
        self._passed += 1


def _missing(store: Any, keys: list[str], rank: int, seconds: float) -> list[int]:
    """Set this rank's key and wait for the others; the ranks whose key is missing after `seconds`. Then this rank's
    key is deleted: for later ranks it is missing."""
    deadline = time.monotonic() + seconds
    try:
        store.set(keys[rank], "reached")
        while not store.check(keys):
            if time.monotonic() > deadline:
                missing = [each for each, key in enumerate(keys) if not store.check([key])]
                store.delete_key(keys[rank])
                return missing
            time.sleep(_POLL_SECONDS)
    except RuntimeError:  # rank 0, which hosts the store, has exited
        return [0]
    return []


def capture_error(work: Callable[[], Report], wrap: Callable[[str], PacelineError]) -> Report:
    """The result of `work`, or its error under "error". `wrap` makes one from the text of other exceptions."""
    try:
        return work()
    except PacelineError as error:
        return {"error": error.to_dict()}
    except Exception as error:
        return {"error": wrap(_reason(error)).to_dict()}


def raise_first_error(reports: Sequence[Report]) -> None:
    """Raise the first error in the reports of all ranks, if any."""
    for report in reports:
        if "error" in report:
            raise PacelineError.from_dict(report["error"])


def run_on_first_rank(
    work: Callable[[], Report], wrap: Callable[[str], PacelineError], group: objects.Group = None
) -> Report:
    """Run on the first rank of the group (default: the world); return its result, or raise its error, on every rank.

    Collective: must be called on every rank of the group.
    """
    first = 0 if group is None else torch_dist.get_global_rank(group, 0)
    report: Report = capture_error(work, wrap) if collectives.rank() == first else {}
    report = collectives.broadcast_object(report) if group is None else objects.broadcast(report, first, group)
    raise_first_error([report])
    return report


def run_on_all_ranks(work: Callable[[], T], what: str) -> T:
    """Run on every rank. If a rank fails it raises its own error, and the others raise the first rank's.

    Collective: must be called on every rank.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    reports = collectives.all_gather_object({} if failure is None else {"error": _coded(failure).to_dict()})
    if failure is not None:
        raise failure
    for rank, report in enumerate(reports):
        if "error" in report:
            repeated = f"{what} failed on rank {rank}: {report['error']['what']}"
            raise PacelineError.from_dict({**report["error"], "what": repeated, "why": ""})
    return result  # type: ignore[return-value]


def _coded(error: Exception) -> PacelineError:
    if isinstance(error, PacelineError):
        return error
    return CheckpointError("not-loaded", f"{type(error).__name__}: {error}", fix="see the error of that rank")


def _reason(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) else None
    return reason or f"{type(error).__name__}: {error}"
