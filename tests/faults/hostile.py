"""Manifests and folders made by somebody who means harm, each with a digest that fits, and what loading them comes to.

Each case is loaded in a process of its own, which tells which paths it opened and how much its memory grew.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import damages
from faults.damages import Copy
from paceline.checkpoint import manifest as manifests

_DIGITS = "9" * 1_000_000
_DEEP = "[" * 100_000 + "]" * 100_000
_VALUES: list[Any] = [
    2**63, 2**63 - 1, 2**48, 2**48 + 1, 2**31, -1, -(2**63), 1.5, 1e308, True, None, "", "x" * 100_000, [], {}, [[]],
    "..", "../secret", "/etc/passwd", "rank-0.safetensors/../../secret", "rank-9.safetensors", "rank-0.safetensors\x00",
    "F64", "U8", "BOOL", [2**48] * 64, [2**48, 2**48], [0] * 64, [0] * 65, [1] * 10_000, [-1], ["0"],
]  # fmt: skip
Case = Callable[[Path], None]


def put(folder: Path, body: bytes) -> None:
    """A manifest with a digest that fits it."""
    (folder / manifests.NAME).write_bytes(body)
    (folder / manifests.DIGEST).write_text(f"{manifests.digest(body)}  {manifests.NAME}\n")


def _in_text(old: bytes, new: bytes) -> Case:
    def case(folder: Path) -> None:
        body = (folder / manifests.NAME).read_bytes()
        assert old in body
        put(folder, body.replace(old, new, 1))

    return case


def _instead(body: bytes) -> Case:
    return lambda folder: put(folder, body)


def _in_manifest(change: Callable[[dict[str, Any]], object]) -> Case:
    def case(folder: Path) -> None:
        manifest = json.loads((folder / manifests.NAME).read_bytes())
        change(manifest)
        put(folder, json.dumps(manifest).encode())

    return case


def _empty_chunks(number: int) -> Case:
    chunk = {"file": "rank-0.safetensors", "at": 0, "offsets": [0, 0], "sizes": [0, 3], "hashes": []}

    def change(manifest: dict[str, Any]) -> None:
        at = manifest["files"]["rank-0.safetensors"]["bytes"]
        manifest["tensors"]["model/empty"]["chunks"] = [{**chunk, "at": at}] * number

    return _in_manifest(change)


def _overlapping(folder: Path) -> None:
    """As many values as the tensor has, but some of them twice, from where others' bytes lie."""
    manifest = json.loads((folder / manifests.NAME).read_bytes())
    for chunk in manifest["tensors"]["model/weight"]["chunks"]:
        chunk["offsets"] = [0, 0]
    put(folder, json.dumps(manifest).encode())


def _link(name: str, target: str) -> Case:
    def case(folder: Path) -> None:
        if target == "outside":  # the very same bytes, but not in the folder
            shutil.copy(folder / name, folder.parent / "secret")
        (folder / name).unlink()
        (folder / name).symlink_to("../secret" if target == "outside" else target)

    return case


def _pipe(name: str) -> Case:
    def case(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return case


SHARD = "rank-1.safetensors"
SPECIAL: dict[str, Case] = {
    "nested 100,000 deep": _in_text(b'"metadata":{}', b'"metadata":' + _DEEP.encode()),
    "nested, all of it": _instead(_DEEP.encode()),
    "a number of 10^6 digits": _in_text(b'"step":7', b'"step":' + _DIGITS.encode()),
    "10^6 digits in metadata": _in_text(b'"metadata":{}', b'"metadata":' + _DIGITS.encode()),
    "a key twice": _in_text(b'"step":7', b'"step":8,"step":7'),
    "tensors twice": _in_text(b'"tensors":', b'"tensors":{},"tensors":'),
    "NaN": _in_text(b'"step":7', b'"step":NaN'),
    "Infinity in metadata": _in_text(b'"metadata":{}', b'"metadata":[Infinity,NaN]'),
    "invalid UTF-8": _in_text(b'"metadata":{}', b'"metadata":"\xff\xfe"'),
    "half of a surrogate pair": _in_text(b'"metadata":{}', b'"metadata":"\\ud800"'),
    "nothing": _instead(b""),
    "a list": _instead(b"[]"),
    "UTF-16": _instead('{"format":2}'.encode("utf-16")),
    "a dtype that is none": _in_text(b'"dtype":"F32"', b'"dtype":"__class__"'),
    "10,000 empty chunks": _empty_chunks(10_000),
    "overlapping chunks": _overlapping,
    "an alias to nowhere": _in_manifest(lambda m: m["aliases"].update({"model/a": "model/b"})),
    "aliases in a circle": _in_manifest(lambda m: m["aliases"].update({"model/a": "model/b", "model/b": "model/a"})),
    "an alias over a tensor": _in_manifest(lambda m: m["aliases"].update({"model/half": "model/half"})),
    "a linked shard": _link(SHARD, "outside"),
    "a linked manifest": _link(manifests.NAME, "outside"),
    "a linked digest": _link(manifests.DIGEST, "outside"),
    "a shard linked to a device": _link(SHARD, "/dev/zero"),
    "a manifest linked to a device": _link(manifests.NAME, "/dev/zero"),
    "a shard linked to itself": _link(SHARD, SHARD),
    "a pipe for a shard": _pipe(SHARD),
    "a pipe for the manifest": _pipe(manifests.NAME),
    "a pipe for the digest": _pipe(manifests.DIGEST),
}


def random_case(number: int) -> Case:
    """One to three hostile values or names, anywhere in the manifest."""
    chance = random.Random(number)

    def change(manifest: dict[str, Any]) -> None:
        for _ in range(chance.randint(1, 3)):
            places = [place for place in damages._places(manifest) if place[0] not in ("recipe", "versions")]
            *path, key = chance.choice(places)
            holder = manifest
            for part in path:
                holder = holder[part]
            value = deepcopy(chance.choice(_VALUES))
            if isinstance(holder, dict) and isinstance(value, str) and chance.random() < 0.5:
                holder[value] = holder.pop(key)  # a hostile name
            else:
                holder[key] = value

    return _in_manifest(change)


def cases(random_ones: int) -> Iterator[tuple[str, Case]]:
    yield from SPECIAL.items()
    yield "100,000 empty chunks", _empty_chunks(100_000)
    yield from ((f"random {number}", random_case(number)) for number in range(random_ones))


@dataclass(frozen=True)
class Result:
    outcome: str
    outside: list[str]  # paths outside of the folder that were opened
    growth: int  # bytes of memory at the peak, beyond those before
    tensors: int  # bytes of the files that hold tensors
    manifest: int  # bytes of the manifest

    def problem(self) -> str | None:
        if self.outcome not in ("refused", "equal"):
            return self.outcome
        if self.outside:
            return f"opened {self.outside}"
        # A manifest becomes Python objects, which take 20 times its text; it may have 4 MiB, or a 16th of the tensors.
        allowed = 2 * (self.tensors + self.manifest) + (96 << 20)
        return f"memory grew by {self.growth:,} bytes, allowed {allowed:,}" if self.growth > allowed else None


def load(folder: Path, original: dict[str, bytes]) -> Result:
    ready, telling = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(telling, "w") as pipe:
                pipe.write(json.dumps(_load_here(folder, original)))
        finally:
            os._exit(0)
    os.close(telling)
    with os.fdopen(ready) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    sizes = {path.name: path.lstat().st_size for path in folder.iterdir()}
    manifest = sizes.pop(manifests.NAME)
    told_of = json.loads(text) if text else ("the process ended", [], 0)
    return Result(*told_of, sum(sizes.values()), manifest)


def _load_here(folder: Path, original: dict[str, bytes]) -> tuple[str, list[str], int]:
    opened: list[str] = []
    inside = str(folder.resolve())

    def watch(event: str, details: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(details[0], (str, bytes, os.PathLike)):
            path = Path(os.fsdecode(details[0]))
            # This is told before the file is opened; and then a link is refused, or followed.
            followed = path.resolve() if not details[2] & os.O_NOFOLLOW else path.parent.resolve() / path.name
            if not str(followed).startswith((inside, sys.prefix, sys.base_prefix)):
                opened.append(str(followed))

    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = _memory("VmHWM")
    sys.addaudithook(watch)
    outcome = damages.outcome(folder, original)
    return outcome, list(opened), _memory("VmHWM") - before


def _memory(field: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024


def run(copy: Copy, original: dict[str, bytes], root: Path, case: Case) -> Result:
    place = root / "hostile"
    damaged = damages.damaged_copy(copy, place / copy.folder.name)
    try:
        case(damaged.folder)
        return load(damaged.folder, original)
    finally:
        with suppress(FileNotFoundError):
            shutil.rmtree(place)


def report(copy: Copy, original: dict[str, bytes], root: Path, random_ones: int) -> int:
    """Print the table; how many cases were wrong."""
    counts: Counter[str] = Counter()
    problems, most = [], Result("", [], 0, 0, 0)
    for name, case in cases(random_ones):
        result = run(copy, original, root, case)
        counts[result.outcome] += 1
        most = max(most, result, key=lambda each: each.growth)
        if (problem := result.problem()) is not None:
            problems.append(f"{name}: {problem}")
    print("| hostile manifests and folders | rejected with a code | unchanged bits | opened a file outside, silently "
          "wrong, no code or too much memory | peak memory, for a manifest of |\n|---|---|---|---|---|")  # fmt: skip
    wrong = len(problems)
    memory = f"{most.growth / 1e6:.0f} MB, {most.manifest / 1e6:.1f} MB"
    print(f"| {sum(counts.values()):,} | {counts['refused']:,} | {counts['equal']:,} | {wrong} | {memory} |")
    for problem in problems[:10]:
        print(f"    {problem}")
    return wrong
