"""`paceline ls`: the runs and studies of a folder, one line each; and the run that a person means."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, did_you_mean
from paceline.run.folder import ROOT, RunFolder
from paceline.run.study_folder import StudyFolder
from paceline.text import columns, format_age, format_rate, plural
from paceline.tools.watch.metric_series import finite
from paceline.tools.watch.plain_text import clean, number_text
from paceline.tools.watch.run_facts import RunFacts, read_facts

_TITLES = ("run", "state", "step", "loss", "speed", "age")


@dataclass(frozen=True)
class RunLine:
    name: str  # relative to the folder that is listed
    facts: RunFacts

    @property
    def updated(self) -> float:
        return self.facts.updated

    def row(self) -> tuple[str, ...]:
        step, loss = step_text(self.facts.step, self.facts.total_steps), number_text(self.facts.metrics["loss"].last)
        return clean(self.name, 60), str(self.facts.state), step, loss, speed_text(self.facts.metrics.speed)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "kind": "run", **run_values(self.facts)}


@dataclass(frozen=True)
class StudyLine:
    name: str
    folder: StudyFolder
    updated: float
    trials: Counter[str]  # by state

    def row(self) -> tuple[str, ...]:
        states = ", ".join(f"{count} {state}" for state, count in self.trials.items())
        text = f"study of {plural(self.trials.total(), 'trial')}" + (f": {states}" if states else "")
        return clean(self.name, 60), text, "", "", ""

    def to_json(self) -> dict[str, Any]:
        about = {"path": str(self.folder.path), "trials": dict(self.trials), "updated": self.updated}
        return {"name": self.name, "kind": "study", **about}


Line = RunLine | StudyLine


def list_runs(root: Path, *, trials: bool = False) -> list[Line]:
    """The runs and studies in a folder, newest first; with `trials`, also the trials of studies."""
    if is_study(root):
        runs, studies = trial_paths(root), []
    else:
        studies = study_paths(root)
        runs = [path for path in run_paths(root) if path not in studies]
        runs += [trial for study in studies if trials for trial in trial_paths(study)]
    lines: list[Line] = [RunLine(_name(path, root), _quick_facts(path)) for path in runs]
    lines += [_study_line(path, root) for path in studies]
    return sorted(lines, key=lambda line: (-line.updated, line.name))


def table(lines: Sequence[Line]) -> str:
    now = time.time()
    return columns([_TITLES, *((*line.row(), format_age(now - line.updated)) for line in lines)])


def step_text(step: int | None, total: int | None) -> str:
    """`12 of 500`"""
    return "–" if step is None else f"{step} of {total}" if total else str(step)


def speed_text(speed: tuple[float, str] | None) -> str:
    """`6.1k samples/s`"""
    return "–" if speed is None or not math.isfinite(speed[0]) else f"{format_rate(speed[0])} {speed[1]}"


def run_values(facts: RunFacts) -> dict[str, Any]:
    """For JSON, which can't represent nan: a loss that is not finite is null."""
    speed, unit = facts.metrics.speed or (None, None)
    return {
        "path": str(facts.folder),
        "state": facts.state.name,
        "reason": facts.state.reason,
        "step": facts.step,
        "total_steps": facts.total_steps,
        "loss": finite(facts.metrics["loss"].last),
        "speed": finite(speed),
        "speed_unit": unit,
        "updated": facts.updated,
    }


def _quick_facts(path: Path) -> RunFacts:
    return read_facts(RunFolder(path.absolute()), quick=True)


def _study_line(path: Path, root: Path) -> StudyLine:
    study = StudyFolder(path.absolute())
    trials = [_quick_facts(trial) for trial in trial_paths(path)]
    updated = max((trial.updated for trial in trials), default=study.settings.stat().st_mtime)
    return StudyLine(_name(path, root), study, updated, Counter(trial.state.name for trial in trials))


def _name(path: Path, root: Path) -> str:
    return path.name if path == root else str(path.relative_to(root))


def is_run(path: Path) -> bool:
    """Whether a run has started in this folder, or ranks were launched for it."""
    folder = RunFolder(path)
    try:
        return folder.has_run or folder.ledger.is_file() or folder.metrics.is_file()
    except OSError:  # no permission
        return False


def is_study(path: Path) -> bool:
    try:
        return StudyFolder(path).exists
    except OSError:
        return False


def find_run(name: str) -> RunFolder:
    """The run at a path, which may be that of its checkpoints, or below runs/."""
    places = [place.absolute() for place in (Path(name), ROOT / name)]
    places += [place.parent for place in places if place == RunFolder(place.parent).checkpoints]
    for found in filter(is_run, places):
        return RunFolder(found)
    for study in filter(is_study, places):
        raise CheckpointError(
            "no-run",
            f"{clean(name)} is a study, not a run.",
            fix=f"pass one of its trials, e.g. {clean(StudyFolder(study).trial(0).short)}; or use paceline sweep show",
        )
    known = [clean(path.name) for path in run_paths(ROOT)]
    raise CheckpointError(
        "no-run",
        f"No run found at {clean(name)}.",
        fix=did_you_mean(name, known) if known else "pass the folder of a run; paceline ls FOLDER lists runs",
    )


def run_paths(root: Path) -> list[Path]:
    """The runs in a folder, or the folder itself if it is a run."""
    if is_run(root):
        return [root]
    return [path for path in _entries(root) if is_run(path)]


def study_paths(root: Path) -> list[Path]:
    return [path for path in _entries(root) if is_study(path)]


def trial_paths(study: Path) -> list[Path]:
    """The run folders of the trials of a study."""
    return [path for path in _entries(StudyFolder(study).trial(0).path.parent) if is_run(path)]


def _entries(folder: Path) -> list[Path]:
    try:
        known = {path.resolve() for path in folder.iterdir() if not path.is_symlink()}
        return sorted(path for path in folder.iterdir() if not path.is_symlink() or path.resolve() not in known)
    except OSError:  # it is not a folder, or can't be read
        return []
