"""What is read is what was written; damage by kind is in tests/faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from faults import hostile, saves
from paceline.checkpoint import reader as checkpoint_reader
from paceline.checkpoint.local_store import locate
from paceline.checkpoint.planner import LocalShard
from paceline.checkpoint.writer import Description, Writer
from paceline.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saves.save(tmp_path, 4, saves.values(1))


def test_bits_dtypes_and_shapes_are_restored(folder: Path) -> None:
    read = saves.read_full(checkpoint_reader.open_checkpoint(locate(folder)), "")
    assert saves.bits(read) == saves.bits(saves.values(1))


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.bool, torch.uint16, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)
def test_every_dtype_is_restored(dtype: torch.dtype, tmp_path: Path) -> None:
    content = {"x": torch.arange(24).reshape(4, 6).to(dtype), "none": torch.zeros(0, 2).to(dtype)}
    folder = saves.save(tmp_path, 1, content)
    assert saves.bits(saves.read_full(checkpoint_reader.verify(locate(folder)), "")) == saves.bits(content)


def test_a_dtype_without_a_word_in_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"x is torch\.complex128") as caught:
        saves.save(tmp_path, 1, {"x": torch.zeros(2, dtype=torch.complex128)})
    assert caught.value.code == "checkpoint.dtype"


def test_a_prefix_chooses_and_goes(folder: Path) -> None:
    read = saves.read_full(checkpoint_reader.open_checkpoint(locate(folder)), "optimizer/weight/")
    assert list(read) == ["exp_avg"]


def test_another_name_of_a_tensor_reads_the_same(tmp_path: Path) -> None:
    writer = Writer()
    held = {"model/a": LocalShard(torch.arange(6.0).reshape(2, 3))}
    described = Description(1, 0, True, aliases={"model/b": "model/a"})
    at = writer.begin(locate(tmp_path / "one"), held, described).result().at
    writer.close()
    read = saves.read_full(checkpoint_reader.open_checkpoint(at), "model/")
    assert torch.equal(read["b"], held["model/a"].local) and torch.equal(read["a"], read["b"])


def test_rows_that_no_rank_wants_are_not_read(tmp_path: Path) -> None:
    """Damage in the last block does not stop one who needs the first: blocks are checked where they are read."""
    rows = torch.zeros(2 * (16 << 20) // 1024, 256)  # 32 MiB, two blocks
    folder = saves.save(tmp_path, 1, {"x": rows})
    checkpoint = checkpoint_reader.open_checkpoint(locate(folder))
    chunk = checkpoint.manifest.tensors["x"].chunks[0]
    assert len(chunk.hashes) == 2
    with (folder / chunk.file).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    with checkpoint_reader._Reader(checkpoint) as reader:
        first = reader.rows("x", checkpoint.manifest.tensors["x"], chunk, 0, 10)
    assert first.shape == (10, 256) and not first.any()
    with pytest.raises(CheckpointError, match="hash mismatch"):
        checkpoint_reader.verify(locate(folder))


def test_other_programs_can_read_the_file(folder: Path) -> None:
    assert saves.bits(load_file(folder / "rank-0.safetensors")) == saves.bits(saves.values(1))


@pytest.mark.parametrize("is_loop", [False, True])
def test_no_checkpoint_is_named(tmp_path: Path, is_loop: bool) -> None:
    if is_loop:
        (tmp_path / "a").symlink_to("a")
    with pytest.raises(CheckpointError) as caught:
        checkpoint_reader.open_checkpoint(locate(tmp_path / "a" if is_loop else tmp_path))
    assert caught.value.code == "checkpoint.missing"


@pytest.mark.parametrize("name", ["step-000004-2", "step-2", "anything"])
def test_any_name_is_fine(name: str, folder: Path) -> None:
    assert checkpoint_reader.verify(locate(folder.rename(folder.with_name(name)))).manifest.step == 4


def test_a_file_that_is_short_is_seen_without_reading_it(folder: Path) -> None:
    with (folder / "rank-0.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors has \d+ bytes, expected \d+"):
        checkpoint_reader.open_checkpoint(locate(folder))


def test_a_manifest_that_gives_bytes_another_dtype_is_refused_by_the_header(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["tensors"]["model/half"]["dtype"] = "F16"  # as wide as before, so nothing else changes
    hostile.put(folder, json.dumps(manifest).encode())
    with pytest.raises(CheckpointError, match="does not list the tensors"):
        checkpoint_reader.verify(locate(folder))
