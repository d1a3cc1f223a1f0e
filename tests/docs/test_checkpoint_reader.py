"""The reader in docs/reference/checkpoint.md, as another program would use it."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from paceline.checkpoint import manifest
from paceline.checkpoint.local_store import LocalStore, locate
from paceline.checkpoint.manifest import BLOCK, CODES, DTYPES, FORMAT, Entry, Manifest
from paceline.checkpoint.planner import WriteItem, narrow
from paceline.checkpoint.reader import verify
from paceline.checkpoint.shard_file import bytes_of, lay_out, write_file
from small_checkpoints import flip_a_bit, write

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "checkpoint.md").read_text()


@pytest.fixture(scope="module")
def reader() -> dict[str, Any]:
    found: dict[str, Any] = {}
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    exec(compile(block, "docs/reference/checkpoint.md", "exec"), found)
    return found


def bits(values: Any) -> list[int]:
    return list(bytes_of(values) if isinstance(values, torch.Tensor) else values.tobytes())


def test_every_dtype_shape_and_alias_is_read_bit_for_bit(reader: dict[str, Any], tmp_path: Path) -> None:
    assert set(reader["DTYPES"]) == set(DTYPES)
    tensors = {f"model/{code}": torch.arange(6).reshape(2, 3).to(dtype) for code, dtype in DTYPES.items()}
    tensors |= {"model/scalar": torch.tensor(2.5), "model/empty": torch.zeros(0, 3)}
    folder = write(tmp_path / "step-000012", tensors, aliases={"model/tied": "model/F32"}, metadata={"note": "mine"})
    described, found = reader["read"](folder)
    assert described["step"] == 12 and described["metadata"] == {"note": "mine"}
    assert found.pop("model/tied") is found["model/F32"]
    assert {name: bits(values) for name, values in found.items()} == {name: bits(t) for name, t in tensors.items()}
    assert {name: values.shape for name, values in found.items()} == {name: t.shape for name, t in tensors.items()}


def test_a_tensor_of_many_blocks_sharded_over_two_ranks_is_reassembled(reader: dict[str, Any], tmp_path: Path) -> None:
    whole = torch.arange(3000 * 3000, dtype=torch.float64).reshape(3000, 3000)
    assert BLOCK < whole.nbytes // 4 < 2 * BLOCK
    folder = tmp_path / "step-000012"
    store = LocalStore(tmp_path)
    draft = store.create(folder.name, 0)
    quarters = list(product((0, 1500), (0, 1500)))
    files, chunks = {}, []
    for rank, own in enumerate((quarters[:2], quarters[2:])):
        layout = lay_out([WriteItem("model/w", whole.dtype, (3000, 3000), offsets, (1500, 1500)) for offsets in own])
        parts = [narrow(whole, item.offsets, item.sizes).contiguous() for item in layout.items]
        name = f"rank-{rank}.safetensors"
        written = write_file(store.write(draft, name), name, layout, lambda n, p=parts: bytes_of(p[n]))
        files[written.name] = written.file
        chunks += [chunk for _, chunk in written.chunks]
    entry = Entry(dtype=CODES[whole.dtype], shape=[3000, 3000], chunks=chunks)
    made = Manifest(
        format=FORMAT, step=12, epoch=0, optimizer=False, created="", parent=None, versions={}, layout={}, recipe={},
        data={}, state={}, metadata={}, block=BLOCK, files=files, tensors={"model/w": entry}, aliases={},
    )  # fmt: skip
    body, digest = manifest.encode(made)
    store.commit(draft, {manifest.DIGEST: digest, manifest.NAME: body})
    verify(locate(folder))
    assert numpy.array_equal(reader["read"](folder)[1]["model/w"], whole.numpy())


def test_damage_is_found_by_it_too(reader: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path / "step-000012", {"model/a": torch.zeros(100)})
    flip_a_bit(folder)
    with pytest.raises(ValueError, match=r"model/a in rank-0\.safetensors is corrupted"):
        reader["read"](folder)
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match=r"manifest\.json is corrupted"):
        reader["read"](folder)


def test_the_page_names_every_key_of_a_manifest() -> None:
    models = (manifest.Manifest, manifest.Entry, manifest.Chunk, manifest.File)
    assert [key for model in models for key in model.model_fields if f"`{key}`" not in PAGE] == []
    assert [code for code in DTYPES if f"`{code}`" not in PAGE] == []
    assert f"| `format` | {FORMAT}." in PAGE
