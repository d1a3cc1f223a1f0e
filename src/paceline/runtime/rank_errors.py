"""An error on one rank is raised on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as torch_dist

from paceline.errors import CheckpointError, PacelineError
from paceline.runtime import collectives, objects

T = TypeVar("T")
Report = dict[str, Any]  # plain values; after a failure, the error under "error"


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
