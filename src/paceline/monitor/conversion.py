"""Convert the metrics of a run for other tools, after it has ended: the loggers, fed from metrics.jsonl."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Literal

from paceline.errors import CheckpointError
from paceline.monitor.loggers import open_logger
from paceline.run import jsonl
from paceline.run.folder import RunFolder

_RECORDS = 10_000  # at a time


def convert(run: RunFolder, to: Literal["tensorboard", "csv"], output: Path | None) -> Path:
    """Write the metrics of a run to a folder, by default that of the run. Returns what was written."""
    if not run.metrics.is_file():
        raise CheckpointError(
            "no-metrics", f"The run {run} has no {run.metrics.name}.", fix="check the name of the run"
        )
    target = run if output is None else RunFolder(output)
    written = target.csv if to == "csv" else target.tensorboard
    if written.exists():
        raise CheckpointError(
            "exists",
            f"{written} exists already.",
            why="the run may have written it, with `loggers`",
            fix="remove it, or pass another folder with -o",
        )
    target.path.mkdir(parents=True, exist_ok=True)
    logger = open_logger(to, target, {})
    records = jsonl.read(run.metrics)
    while some := list(islice(records, _RECORDS)):
        logger.write([record for record in some if isinstance(record.get("step"), int)])
    logger.close()
    return written
