"""Checks that something is the same on all ranks, and names those that differ. Raises the error of a rank on all."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as torch_dist

from paceline.errors import CheckpointError, PacelineError, WorldError
from paceline.run import regular_files
from paceline.run.folder import not_usable
from paceline.runtime import collectives, objects
from paceline.text import by_rank, flatten, plural

T = TypeVar("T")
Report = dict[str, Any]  # plain values; after a failure, the error under "error"


def require_same_recipe(recipes: Sequence[Mapping[str, Any]]) -> None:
    """`recipes`: the effective recipe of each rank."""
    if table := _differences([flatten(recipe) for recipe in recipes]):
        raise WorldError("different-recipes", f"Ranks have different recipes {table}")


def require_same_versions(versions: Sequence[Mapping[str, str]]) -> None:
    """`versions`: the versions that each rank runs, by package."""
    if table := _differences(versions):
        why, fix = "their results and messages may not be compatible", "install the same versions on every node"
        raise WorldError("different-versions", f"Ranks run different versions {table}", why=why, fix=fix)


def require_same_weights(checksums: Sequence[Mapping[str, int]]) -> None:
    """`checksums`: the checksum of every parameter on each rank."""
    if table := _differences([{name: f"checksum {value}" for name, value in rank.items()} for rank in checksums]):
        raise WorldError("different-weights", f"Replicas hold different weights {table}")


def _differences(ranks: Sequence[Mapping[str, Any]]) -> str:
    """A table of what differs between ranks; empty if nothing does."""
    keys = sorted({key for values in ranks for key in values})
    differing = [key for key in keys if any(values.get(key) != ranks[0].get(key) for values in ranks)]
    lines = [f"({plural(len(differing), 'difference')}):"]
    for key in differing[:8]:
        values_by_rank = [repr(values.get(key, "(not set)")) for values in ranks]
        lines += [f"    {key}:", by_rank(values_by_rank, indent="      ")]
    return "\n".join(lines) if differing else ""


def capture_error(work: Callable[[], Report], wrap: Callable[[str], PacelineError]) -> Report:
    """The result of `work`, or its error under "error". `wrap` makes one from the text of other exceptions."""
    try:
        return work()
    except PacelineError as error:
        return {"error": error.to_dict()}
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else None
        return {"error": wrap(reason or f"{type(error).__name__}: {error}").to_dict()}


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
    return CheckpointError("not-loaded", f"{type(error).__name__}: {error}")


_ATTEMPTS, _SECONDS_BETWEEN_ATTEMPTS = 3, 1.0  # a new file may be invisible for a while on a network filesystem


def ranks_without_access(folder: Path) -> list[int]:
    """The ranks that can't read and write the folder of rank 0. Collective: must be called on every rank.

    Rank 0 writes a file with a random token, to detect a folder of the same name on another disk.
    """
    probe = run_on_first_rank(lambda: _write(folder.absolute()), lambda reason: not_usable(folder.absolute(), reason))
    path = Path(probe["path"])
    has_access = collectives.all_gather_object(_has_access(path, probe["token"]))
    if collectives.is_main():
        path.unlink(missing_ok=True)
    return [rank for rank, accessible in enumerate(has_access) if not accessible]


def _write(folder: Path) -> dict[str, str]:
    token = secrets.token_hex(16)
    path = folder / f".probe-{token[:8]}"
    regular_files.replace(path, token.encode())
    return {"path": str(path), "token": token}


def _has_access(path: Path, token: str) -> bool:
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
        try:
            if regular_files.read_text(path) == token:
                return os.access(path.parent, os.W_OK)
        except OSError:
            continue
    return False
