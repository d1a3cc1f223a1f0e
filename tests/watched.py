"""Run folders for readers, written without training."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ledgers import Line, written
from paceline.run.folder import RunFolder

# Terminal sequences, a title, text in reverse, line breaks, markup of rich and of HTML.
HOSTILE = "a\x1b[31mb\x1b]0;title\x07c\u202ed\r\n\x00e\x9b2J[bold]<script>alert(1)</script>"
START = 1_763_220_000.0
FINISHED: tuple[Line, ...] = (
    (START, "launched", {"nodes": 1, "ranks": 2, "generation": 0}),
    (START + 2, "first-step", {"step": 1, "steps": 1, "seconds": 0.5}),
    (START + 9, "finished", {"step": 10}),
    (START + 10, "ended", {"status": 0}),
)
FAILURE = {
    "exception": "ValueError", "message": "no such thing", "file": "train.py", "line": 17, "function": "main",
    "code": "look()", "what": "rank 1 raised ValueError in step 5", "text": "Traceback:\n  boom", "fix": "lower it",
}  # fmt: skip
FAILED: tuple[Line, ...] = (
    FINISHED[0],
    (START + 3, "hang", {"kind": "missing", "ranks": [1], "seconds": 40.0}),
    (START + 5, "failed", {"cause": "exception", "rank": 1, "step": 4, **FAILURE}),
    (START + 6, "ended", {"status": 1}),
)


def step(number: int, **values: Any) -> dict[str, Any]:
    return {"step": number, "epoch": 0, "loss": 2.0 / number, "lr": 0.1, **values}


def evaluation(number: int, **values: Any) -> dict[str, Any]:
    return {"evaluation": True, "step": number, "epoch": 0, **values}


STEPS = [step(n, **({} if n % 5 else {"time": START + n, "samples_per_second": 100.0 * n})) for n in range(1, 11)]


def run_folder(
    path: Path, records: Iterable[Any] = STEPS, events: Iterable[Line] = FINISHED, config: str = "batch: 8\n"
) -> RunFolder:
    folder = RunFolder(path)
    folder.logs.mkdir(parents=True)
    folder.config.write_text(config)
    derived = {"horizon": {"value": 10, "reason": "max_steps"}, "batch": {"value": 8, "reason": "requested"}}
    folder.derived.write_text(json.dumps(derived))
    folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    return written(path, *events)


def embedded_values(page: str) -> dict[str, Any]:
    """What a page that stands alone shows."""
    found = re.search(r'<script type="application/json" id="values">(.*?)</script>', page, re.S)
    assert found is not None
    return dict(json.loads(found[1]))


def charts_in(page: str) -> dict[str, dict[str, Any]]:
    """The charts of a page of measurements, by title."""
    return {part["title"]: part for part in embedded_values(page)["sheet"]["parts"] if part["kind"] == "chart"}
