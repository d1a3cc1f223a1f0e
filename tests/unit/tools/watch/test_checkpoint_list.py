"""Checkpoints by name and size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import xxhash

from paceline.run.folder import RunFolder
from paceline.tools.watch.checkpoint_list import SavedCheckpoint, checked_checkpoints, saved_checkpoints


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


def test_the_size_is_that_of_the_shards(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    checkpoint(folder, "step-000006")
    assert [each.size for each in saved_checkpoints(folder)] == [7], "as paceline checkpoint ls says"


def test_no_checkpoints(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert saved_checkpoints(folder) == []
    folder.checkpoints.symlink_to("/")
    assert saved_checkpoints(folder) == []


def checkpoint(folder: RunFolder, name: str, size: int = 7) -> Path:
    path = folder.checkpoints / name
    path.mkdir(parents=True)
    (path / "rank-0.safetensors").write_bytes(b"x" * 7)
    body = json.dumps({"files": {"rank-0.safetensors": {"bytes": size}}}).encode()
    (path / "manifest.json").write_bytes(body)
    (path / "manifest.xxh128").write_text(f"{xxhash.xxh3_128_hexdigest(body)}  manifest.json\n")
    return path


def test_what_is_wrong_with_a_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    checkpoint(folder, "step-000006")
    checkpoint(folder, "step-000005", size=8)
    (checkpoint(folder, "step-000004") / "manifest.xxh128").write_text("0\n")
    (checkpoint(folder, "step-000003") / "manifest.json").unlink()
    (checkpoint(folder, "step-000002") / "rank-0.safetensors").unlink()
    odd = checkpoint(folder, "step-000001")
    for body in (b"[]", b"{", b'{"files": {"../../x": {"bytes": 1}}}'):
        (odd / "manifest.json").write_bytes(body)
        (odd / "manifest.xxh128").write_text(xxhash.xxh3_128_hexdigest(body))
        assert checked_checkpoints(folder)[-1]["check"] == "incomplete"
    assert [each["check"] for each in checked_checkpoints(folder)] == [
        "complete", "incomplete", "manifest corrupted", "no manifest", "incomplete", "incomplete",
    ]  # fmt: skip


def test_a_checkpoint_of_the_software_is_complete(tmp_path: Path) -> None:
    fixture = Path(__file__).parents[3] / "contract" / "fixture" / "step-000006"
    shutil.copytree(fixture, RunFolder(tmp_path).checkpoints / fixture.name)
    assert [each["check"] for each in checked_checkpoints(RunFolder(tmp_path))] == ["complete"]
