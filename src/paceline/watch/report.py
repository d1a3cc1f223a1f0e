"""`paceline report`: a page about runs that needs no server, in one file. The values are those of the live page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline import log
from paceline.errors import LaunchError
from paceline.run import ledger, regular_files
from paceline.run.folder import RunFolder, short
from paceline.watch import page_builder, page_values
from paceline.watch.live_run import LiveRun
from paceline.watch.log_search import log_lines
from paceline.watch.run_comparison import By
from paceline.watch.run_facts import recipe_value

_BUCKETS = 3000  # of all runs together: 150 kB per curve
_LOG_BYTES, _MIN_LOG_LINES, _MAX_LOG_LINES = 1 << 20, 5, 300  # of all ranks


def write_report(folders: Sequence[RunFolder], path: Path, by: By = "step") -> None:
    """Write a page that shows one run, or several of them over each other, aligned by step, time or samples."""
    runs = [_values(number, folder, _BUCKETS // len(folders)) for number, folder in enumerate(folders)]
    values = {"written": time.time(), "by": by, "chosen": [run["id"] for run in runs], "runs": runs}
    try:
        regular_files.replace(path, page_builder.standalone_page(values))
    except OSError as error:
        raise LaunchError(
            "report-not-written", f"Can't write {path}: {error.strerror}.", fix="pass a writable path with -o"
        ) from None


def write_requested(launch: RunFolder) -> None:
    """When a launch ends: write the reports of its runs whose recipes ask for them, to their folders."""
    opened: list[RunFolder] = []
    for event in ledger.events(launch):
        if event["event"] == "launched" and not event.get("generation"):  # earlier events belong to another launch
            opened = []
        elif event["event"] == "opened":
            opened.append(RunFolder(Path(str(event.get("run")))))
    for path in dict.fromkeys(folder.path for folder in (launch, *opened)):
        folder = RunFolder(path)
        if recipe_value(folder, "report") is True:
            write_in_folder(folder)


def write_in_folder(folder: RunFolder) -> None:
    """A report that can't be written must not change how a run ends."""
    try:
        write_report([folder], folder.report)
        log.info(f"report: {short(folder.report)}")
    except Exception as error:  # whatever is in the folder
        log.warning(f"the report was not written: {error}")


def _values(number: int, folder: RunFolder, buckets: int) -> dict[str, Any]:
    run = LiveRun(folder)
    run.read_everything()
    about, ranks = page_values.about(run), page_values.ranks(run)
    return {
        "id": str(number),
        "head": page_values.head(run),
        "curves": page_values.curves(run, buckets=buckets),
        "cursor": "end",
        "about": about,
        "about_id": "only",
        "ranks": ranks,
        "log": _logs(folder, about["logs"]),
    }


def _logs(folder: RunFolder, ranks: Sequence[int]) -> dict[str, Any]:
    """The last lines of the log of each rank, fewer of them with more ranks."""
    found, left = {}, _LOG_BYTES
    most = max(_MIN_LOG_LINES, min(_MAX_LOG_LINES, 8000 // max(1, len(ranks))))
    for rank in ranks:
        log = log_lines(folder, rank, most=most)
        left -= sum(len(text) for _, text in log["lines"])
        if left < 0:
            break
        found[str(rank)] = log
    return found
