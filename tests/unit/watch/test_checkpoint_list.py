"""Checkpoints by name and size."""

from __future__ import annotations

from pathlib import Path

from paceline.run.folder import RunFolder
from paceline.watch.checkpoint_list import SavedCheckpoint, saved_checkpoints


def test_checkpoints_newest_first(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for name, size in (("step-000002", 5), ("step-000010", 7), (".step-000011.partial-1f2e", 9), ("mine", 3)):
        (folder.checkpoints / name).mkdir(parents=True)
        (folder.checkpoints / name / "rank-0.safetensors").write_bytes(b"x" * size)
    (folder.checkpoints / "step-000020").symlink_to("/")
    folder.latest.write_text("step-000010\n")
    folder.best.write_text("step-000002\nstep-000010\n")
    assert saved_checkpoints(folder) == [
        SavedCheckpoint("step-000010", 10, 7, ["latest", "best"]),
        SavedCheckpoint("step-000002", 2, 5, ["best"]),
        SavedCheckpoint("mine", None, 3, []),
    ]


def test_no_checkpoints(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert saved_checkpoints(folder) == []
    folder.checkpoints.symlink_to("/")
    assert saved_checkpoints(folder) == []
