"""Seeded damage to a checkpoint's files, and what loading it comes to.

A case is a number: the same one does the same thing to the same checkpoint. `kinds()` are those that any folder of
files can suffer, so torch.distributed.checkpoint gets them too; the others know paceline's manifest.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as torch_dist
import torch.distributed.checkpoint as dcp

from faults import saves
from paceline.checkpoint import manifest as manifests
from paceline.checkpoint import reader
from paceline.checkpoint.local_store import locate
from paceline.checkpoint.writer import Description, Writer
from paceline.errors import CheckpointError
from paceline.testing import run_on_ranks

ROWS = 96
Damage = Callable[["Copy", random.Random], None]


@dataclass(frozen=True)
class Copy:
    """A checkpoint to be damaged, beside one of an older step, and one of the same step with other values."""

    folder: Path
    older: Path
    twin: Path

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.is_file() and path.stat().st_size)

    def shards(self) -> list[Path]:
        return sorted(path for path in self.folder.iterdir() if path.suffix in (".safetensors", ".distcp"))


def flip_a_bit(copy: Copy, chance: random.Random) -> None:
    _flip(chance.choice(copy.files()), chance)


def flip_a_bit_of_a_shard(copy: Copy, chance: random.Random) -> None:
    _flip(chance.choice(copy.shards()), chance)


def _flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def zero_a_block(copy: Copy, chance: random.Random) -> None:
    path = chance.choice(copy.files())
    data = bytearray(path.read_bytes())
    size = chance.choice((512, 4096))
    at = chance.randrange(-(-len(data) // size)) * size
    end = min(at + size, len(data))
    data[at:end] = bytes(end - at)
    path.write_bytes(data)


def truncate(copy: Copy, chance: random.Random) -> None:
    path = chance.choice(copy.files())
    os.truncate(path, chance.randrange(path.stat().st_size))


def extend(copy: Copy, chance: random.Random) -> None:
    path = chance.choice(copy.files())
    with path.open("ab") as file:
        file.write(chance.randbytes(chance.choice((1, 8, 512))))


def swap_two_shards(copy: Copy, chance: random.Random) -> None:
    one, other = chance.sample(copy.shards(), 2)
    spare = copy.folder / "spare"
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


def put_an_older_shard(copy: Copy, chance: random.Random) -> None:
    path = chance.choice(copy.shards())
    shutil.copy(chance.choice((copy.older, copy.twin)) / path.name, path)


def delete_a_file(copy: Copy, chance: random.Random) -> None:
    chance.choice(copy.files()).unlink()


def empty_a_file(copy: Copy, chance: random.Random) -> None:
    os.truncate(chance.choice(copy.files()), 0)


def put_a_folder_for_a_file(copy: Copy, chance: random.Random) -> None:
    path = chance.choice(copy.files())
    path.unlink()
    path.mkdir()


def put_another_manifest(copy: Copy, chance: random.Random) -> None:
    """Of another step, or of the same step in another run; with its digest, without it, or the digest alone."""
    names = chance.choice(((manifests.NAME,), (manifests.DIGEST,), (manifests.NAME, manifests.DIGEST)))
    source = chance.choice((copy.older, copy.twin))
    for name in names:
        shutil.copy(source / name, copy.folder / name)


def edit_the_manifest(copy: Copy, chance: random.Random) -> None:
    _edit(copy, chance, "", digest_too=False)


def edit_the_structure(copy: Copy, chance: random.Random) -> None:
    """Sizes, offsets, hashes, dtypes, names, files, with a digest made anew. (Of a new step nobody can tell.)"""
    _edit(copy, chance, chance.choice(("files", "tensors", "tensors", "block")), digest_too=True)


def _edit(copy: Copy, chance: random.Random, part: str, digest_too: bool) -> None:
    path = copy.folder / manifests.NAME
    before = path.read_bytes()
    manifest = json.loads(before)
    while json.dumps(manifest) == json.dumps(json.loads(before)):
        chosen = [place for place in _places(manifest) if not part or place[0] == part]
        _change(manifest, chance.choice(chosen), chance)
    body = json.dumps(manifest, separators=(",", ":")).encode() + b"\n"
    path.write_bytes(body)
    if digest_too:
        (copy.folder / manifests.DIGEST).write_text(f"{manifests.digest(body)}  {manifests.NAME}\n")


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _places(inner, (*path, key))


def _change(manifest: Any, place: tuple[Any, ...], chance: random.Random) -> None:
    holder = manifest
    for key in place[:-1]:
        holder = holder[key]
    key, value = place[-1], holder[place[-1]]
    if len(place) > 1 and chance.random() < 0.2:
        del holder[key]
    elif isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, int):
        holder[key] = max(value + chance.choice((-16, -8, -1, 1, 4, 8, 4096)), 0)
    elif isinstance(value, str):
        others = ["F32", "F16", "I64", "U8", "BF16", "I16", "rank-0.safetensors", "rank-1.safetensors"]
        holder[key] = chance.choice([f"{value[:-1]}{chance.choice('0123456789abcdef')}", *others])
    elif isinstance(value, list) and value:
        chance.choice((value.reverse, value.pop, lambda: value.append(value[0])))()
    elif isinstance(value, dict) and value:
        name = chance.choice(sorted(value))
        value[f"{name}x"] = value.pop(name)


ANY_FOLDER: dict[str, Damage] = {
    "flipped bit, any file": flip_a_bit,
    "flipped bit, data": flip_a_bit_of_a_shard,
    "zeroed block": zero_a_block,
    "truncated": truncate,
    "extended": extend,
    "two shards swapped": swap_two_shards,
    "shard of another save": put_an_older_shard,
    "deleted file": delete_a_file,
    "emptied file": empty_a_file,
    "folder instead of a file": put_a_folder_for_a_file,
}
OURS: dict[str, Damage] = {
    "manifest of another save": put_another_manifest,
    "manifest edited": edit_the_manifest,
    "structure edited, hash recomputed": edit_the_structure,
}
OUTCOMES = ("refused", "equal", "SILENT", "NO CODE")


def outcome(folder: Path, original: dict[str, bytes]) -> str:
    """Loading everything: refused with a code, the bits as they were saved, other bits, or an error without a code."""
    try:
        checkpoint = reader.open_checkpoint(locate(folder))
        loaded = saves.bits(saves.read_full(checkpoint, ""))
    except CheckpointError:
        return "refused"
    except Exception:
        return "NO CODE"
    return "equal" if loaded == original else "SILENT"


def make(root: Path) -> tuple[Copy, Copy, dict[str, bytes]]:
    """A checkpoint of two ranks, with others beside it to take wrong parts from; the same in torch's format."""
    saves_to_make = [("this/step-000007", 7, 0), ("this/step-000003", 3, 1), ("twin/step-000007", 7, 2)]

    def body() -> None:
        writer = Writer(torch_dist.group.WORLD)
        for name, step, seed in saves_to_make:
            content = saves.on_two_ranks(saves.values(seed, ROWS))
            writer.begin(locate(root / "ours" / name), saves.as_held(content), Description(step, 0, True)).result()
            dcp.save(content, checkpoint_id=root / "torch" / name)
        writer.close()

    run_on_ranks(2, body)
    ours, theirs = (
        Copy(*(root / kind / name for name, _, _ in saves_to_make)) for kind in ("ours", "torch")
    )  # fmt: skip
    original = saves.bits(saves.values(0, ROWS))
    assert saves.bits(saves.read_full(reader.verify(locate(ours.folder)), "")) == original
    return ours, theirs, original


def damaged_copy(copy: Copy, place: Path) -> Copy:
    shutil.copytree(copy.folder, place)
    return Copy(place, copy.older, copy.twin)
