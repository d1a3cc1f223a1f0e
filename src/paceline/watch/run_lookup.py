"""Find runs and studies by name, by path and in a folder."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import CheckpointError, did_you_mean
from paceline.run.folder import ROOT, RunFolder
from paceline.run.study_folder import StudyFolder
from paceline.watch.plain_text import clean


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
        return sorted(folder.iterdir())
    except OSError:  # it is not a folder, or can't be read
        return []
