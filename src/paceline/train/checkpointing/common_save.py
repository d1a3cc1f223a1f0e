"""Trainers that train at the same time, as those of a GAN, resume from the newest point that all of them have saved.

Each saves on its own, and its checkpoints tell the steps of the others at that moment (`RunHandle.together`). The last
one to step in a round of the script ends the round: where it has saved, and the others have checkpoints of the steps
that it tells, all of them can continue.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from paceline.checkpoint.local_store import LocalStore
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.reader import candidates
from paceline.errors import CheckpointError
from paceline.run.folder import RunFolder, short
from paceline.train.checkpointing.run_handle import TOGETHER

_ALONE = {"last": True, "steps": {}}


def common_names(run: RunFolder, reached: Mapping[Path, int]) -> list[str] | None:
    """The checkpoints of a run that others have as well, newest first: empty if the others have not saved yet, None if
    there are no others. `reached`: the steps of those that have resumed already."""
    found: dict[Path, dict[str, Manifest]] = {}
    missing = {run.path}
    while missing:
        found |= {path: _manifests(path) for path in missing}
        missing = {path for of in found for each in found[of].values() for path in _steps(of, each)} - found.keys()
    if len(found) == 1:
        return None
    points = []
    for of, manifest in ((path, each) for path in found for each in found[path].values()):
        steps = _steps(of, manifest)
        is_saved = all(not step or _at(found[path], step) for path, step in steps.items())
        is_reached = all(reached.get(path, step) == step for path, step in steps.items())
        if run.path in steps and manifest.data.get(TOGETHER, _ALONE)["last"] and is_saved and is_reached:
            points.append((manifest.created, _at(found[run.path], steps[run.path])))
    if not points and len(found[run.path]) > 1:
        have = [f"{short(path)} has {[each.step for each in found[path].values()]}" for path in found]
        raise CheckpointError(
            "no-common-step",
            f"The Trainers of this run have no checkpoints that belong together. Steps: {', '.join(have)}.",
        )
    return [name for _, name in sorted(points, reverse=True) if name]


def _manifests(run: Path) -> dict[str, Manifest]:
    """By the names of the checkpoints, newest first."""
    found = candidates(LocalStore(RunFolder(run).checkpoints))
    return {each.at.name: each.manifest for each in found if each.manifest is not None}


def _steps(of: Path, manifest: Manifest) -> dict[Path, int]:
    """The steps of all Trainers when a checkpoint was saved, by their folders."""
    others = manifest.data.get(TOGETHER, _ALONE)["steps"]
    return {of: manifest.step} | {Path(os.path.normpath(of / path)): step for path, step in others.items()}


def _at(found: Mapping[str, Manifest], step: int) -> str:
    """The newest checkpoint of a step."""
    return next((name for name, manifest in found.items() if manifest.step == step), "")
