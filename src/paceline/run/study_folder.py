"""The folder of a study, the trials of one search: `runs/NAME`, with a run folder for each trial.

folder = StudyFolder.of("mlp-sweep")
folder.trial(3)              # the RunFolder runs/mlp-sweep/trials/0003
values(folder.trial(3), "loss")   # [(20, 0.91), (40, 0.72)]: step and value of its evaluations
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.run import jsonl, ledger, regular_files
from paceline.run.folder import FolderFile, RunFolder, not_usable, path_of, short

_TRIALS = "trials"


@dataclass(frozen=True)
class StudyFolder:
    path: Path

    settings = FolderFile("sweep.json")  # what it searches; written last, so a folder that has it is a study
    database = FolderFile("study.db")
    journal = FolderFile("study.journal")
    best_recipe = FolderFile("best.yaml")
    report = FolderFile("report.html")

    @classmethod
    def of(cls, name: str) -> StudyFolder:
        """By its name, which is below runs/, or by its path."""
        return cls(path_of(name))

    @property
    def short(self) -> str:
        return short(self.path)

    @property
    def exists(self) -> bool:
        return self.settings.is_file()

    def create(self) -> None:
        try:
            (self.path / _TRIALS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise not_usable(self.path, error.strerror or str(error)) from None

    def trial(self, number: int) -> RunFolder:
        return RunFolder(self.path / _TRIALS / f"{number:04d}")

    def trial_output(self, number: int) -> Path:
        """What the launcher of a trial prints, and its first rank."""
        return self.path / _TRIALS / f"{number:04d}.log"

    def trial_lock(self, number: int) -> Path:
        """Locked while any process of a trial runs on this machine."""
        return self.path / _TRIALS / f".{number:04d}.lock"

    def write_settings(self, values: dict[str, Any]) -> None:
        regular_files.replace(self.settings, (json.dumps(values, indent=1) + "\n").encode())

    def read_settings(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(regular_files.read_text(self.settings))
        return found


def values(trial: RunFolder, metric: str, *, has_ended: bool = True) -> list[tuple[int, float]]:
    """The step and the value of each evaluation of a trial; of each step, if it has ended without an evaluation. Values
    may be NaN."""
    evaluated: dict[int, float] = {}
    stepped: dict[int, float] = {}
    with suppress(OSError):
        for record in jsonl.read(trial.metrics):
            step = record.get("step")
            if isinstance(step, int) and metric in record:
                value = record[metric]
                number = float(value) if isinstance(value, (int, float)) else math.nan  # JSON has null in its place
                (evaluated if record.get("evaluation") else stepped)[step] = number
    return sorted((evaluated or (stepped if has_ended else {})).items())


def steps_of(trial: RunFolder) -> int:
    """How many optimizer steps a trial has taken."""
    with suppress(OSError):
        steps = (record.get("step") for record in jsonl.read(trial.metrics))
        return max((step for step in steps if isinstance(step, int)), default=0)
    return 0


def completed_launches(trial: RunFolder) -> int:
    """How many launches of a trial have ended well."""
    return sum(event["event"] == "ended" and event.get("status") == 0 for event in ledger.events(trial))


def append_evaluation(trial: RunFolder, step: int, metric: str, value: float) -> None:
    """For trials that are functions: Trainers write these records themselves."""
    trial.path.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"evaluation": True, "step": step, metric: value}) + "\n"
    regular_files.append(trial.metrics, line.encode())
