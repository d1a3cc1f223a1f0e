"""Saves with their file operations written down, and what has to be true after a crash in one."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from disks import Operation, RecordingDisk
from faults import crash_states
from faults.crash_states import AnyOf, Choice, Everything, NothingUnsynced, State, States
from paceline.checkpoint import reader
from paceline.checkpoint.checkpoint_store import step_name
from paceline.checkpoint.local_store import Filesystem, LocalStore, locate
from paceline.checkpoint.planner import LocalShard
from paceline.checkpoint.reader import candidates, verified
from paceline.checkpoint.writer import Description, Writer, prune
from paceline.errors import CheckpointError
from paceline.testing import run_on_ranks


def values(seed: int, rows: int = 48) -> dict[str, Tensor]:
    """A little model: several dtypes, a scalar, something empty."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, 16, generator=generator)
    return {
        "model/weight": weight,
        "model/half": weight.bfloat16(),
        "model/count": torch.tensor(seed),
        "model/empty": torch.zeros(0, 3),
        "optimizer/weight/exp_avg": weight * 0.5,
    }


def save(folder: Path, step: int, content: dict[str, Tensor], disk: Filesystem | None = None, **options: Any) -> Path:
    writer = Writer()
    try:
        description = Description(step, 0, True)
        saving = writer.begin(locate(folder / step_name(step), disk), as_held(content), description, **options)
        return folder / saving.result().at.name
    finally:
        writer.close()


def on_two_ranks(content: dict[str, Tensor]) -> dict[str, Tensor]:
    """On each of two ranks: what has rows is cut in two."""
    mesh = init_device_mesh("cpu", (2,))
    return {
        name: distribute_tensor(tensor, mesh, [Shard(0)]) if tensor.dim() else tensor
        for name, tensor in content.items()
    }


def as_held(content: dict[str, Tensor]) -> dict[str, LocalShard]:
    return {
        name: LocalShard(tensor.to_local(), tensor) if isinstance(tensor, DTensor) else LocalShard(tensor)
        for name, tensor in content.items()
    }


def read_full(checkpoint: reader.Checkpoint, prefix: str) -> dict[str, Tensor]:
    """The full tensors whose names start with `prefix`, by the rest of the name, including aliases."""
    manifest = checkpoint.manifest
    entries = {name: manifest.entry(name) for name in (*manifest.tensors, *manifest.aliases) if name.startswith(prefix)}
    targets = {name: torch.empty(entry.shape, device="meta") for name, entry in entries.items() if entry is not None}
    return {name.removeprefix(prefix): tensor for name, tensor in reader.read_tensors(checkpoint, targets).items()}


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    """By name: dtype, shape and bytes."""
    return {
        name: f"{tensor.dtype} {list(tensor.shape)} ".encode()
        + bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        for name, tensor in tensors.items()
    }


@dataclass(frozen=True)
class Recorded:
    """A save that was recorded below `root`, in the folder `checkpoints` of it."""

    name: str
    root: Path
    before: State
    operations: list[Operation]
    committed: int  # how many of the operations had been done when the checkpoint had its name for good
    old: dict[str, bytes] | None
    new: dict[str, bytes]


def _tidy(disk: RecordingDisk, folder: Path, keep: int | None, committed: list[int]) -> Callable[[str], None]:
    """What a Trainer does when a checkpoint has its name."""

    def after(name: str) -> None:
        committed.append(len(disk.operations))
        LocalStore(folder, disk).point("latest", [name])
        if keep is not None:
            prune(LocalStore(folder, disk), keep, None)

    return after


def record(name: str, root: Path, *, old: int, new_step: int, keep: int | None = None, **options: Any) -> Recorded:
    """A save of one process, after `old` earlier ones."""
    folder = root / "checkpoints"
    root.mkdir(parents=True)
    for step in range(1, old + 1):
        save(folder, step, values(step))
    before = crash_states.snapshot(root)
    disk = RecordingDisk(can_exchange=options.pop("can_exchange", True))
    committed: list[int] = []
    content = values(100 + new_step)
    save(folder, new_step, content, disk, after=_tidy(disk, folder, keep, committed), **options)
    return Recorded(
        name, root, before, disk.operations, committed[0], bits(values(old)) if old else None, bits(content)
    )


def record_two_ranks(root: Path) -> Recorded:
    """Two real ranks, each with its file; their operations in the order in which they happened."""
    folder = root / "checkpoints"
    root.mkdir(parents=True)
    save(folder, 1, values(1))
    before = crash_states.snapshot(root)
    notes = root.parent / f"{root.name}-notes"
    notes.mkdir()

    def body() -> None:
        mesh = init_device_mesh("cpu", (2,))
        rank = torch_dist.get_rank()
        disk = RecordingDisk()
        committed: list[int] = []
        cut = {
            name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in values(102).items() if tensor.dim()
        }
        held = {name: LocalShard(tensor.to_local(), tensor) for name, tensor in cut.items()}
        held["model/count"] = LocalShard(values(102)["model/count"])
        writer = Writer(torch_dist.group.WORLD)
        target = folder / step_name(2)
        after = _tidy(disk, folder, 1, committed)
        writer.begin(locate(target, disk), held, Description(2, 0, True), after=after).result()
        writer.close()
        rows = [(op.kind, str(op.path), op.other and str(op.other), op.data, op.at) for op in disk.operations]
        (notes / str(rank)).write_text(repr((rows, committed)))

    run_on_ranks(2, body)
    merged: list[Operation] = []
    last = 0
    for rank in (0, 1):
        rows, committed = ast.literal_eval((notes / str(rank)).read_text())
        merged += [Operation(kind, Path(path), other and Path(other), data, at) for kind, path, other, data, at in rows]
        last = rows[committed[0] - 1][-1] if committed else last
    merged.sort(key=lambda operation: operation.at)
    count = sum(operation.at <= last for operation in merged)
    return Recorded("two ranks, keep=1", root, before, merged, count, bits(values(1)), bits(values(102)))


def record_all(root: Path) -> list[Recorded]:
    return [
        record("first save", root / "first", old=0, new_step=1),
        record("second save", root / "second", old=1, new_step=2),
        record("save with keep=1", root / "retention", old=2, new_step=3, keep=1),
        record("overwrite, exchanged", root / "exchange", old=1, new_step=1, overwrite=True),
        record("overwrite, two renames", root / "renames", old=1, new_step=1, overwrite=True, can_exchange=False),
        record_two_ranks(root / "ranks"),
    ]


def crashes(recorded: Recorded, random_ones: int, seed: int) -> Iterator[tuple[int, State]]:
    """Distinct states with how many operations had been done: every prefix, then as many random ones as asked for."""
    seen: set[int] = set()

    def fresh(prefix: int, choice: Choice) -> State | None:
        disk = States(recorded.root, recorded.before)
        disk.play(recorded.operations[:prefix])
        state = disk.crash(choice)
        # What has to be true depends on whether the save had returned, so that is a part of the state.
        key = hash((prefix >= recorded.committed, frozenset(state.items())))
        new = key not in seen
        seen.add(key)
        return state if new else None

    points = range(len(recorded.operations) + 1)
    for prefix in points:
        for choice in (Everything(), NothingUnsynced()):
            if (state := fresh(prefix, choice)) is not None:
                yield prefix, state
    made, tries = 0, 0
    while made < random_ones and tries < 40 * random_ones:
        tries += 1
        prefix = points[(seed + tries) % len(points)]
        if (state := fresh(prefix, AnyOf(seed * 1_000_003 + tries))) is not None:
            made += 1
            yield prefix, state


def problem_after(recorded: Recorded, prefix: int, state: State, root: Path) -> str | None:
    """What is wrong when a run is opened after this crash; `root` is a place that does not exist yet."""
    crash_states.rebuild(state, root)
    folder = root / "checkpoints"
    found = _found(recorded, folder)
    allowed = ["new"] if prefix >= recorded.committed else ["new", "nothing" if recorded.old is None else "old"]
    if found not in allowed:
        return f"found {found}, allowed {' or '.join(allowed)}"
    LocalStore(folder).remove_leftovers()
    if _found(recorded, folder) != found:
        return f"found {found}, and after clearing up {_found(recorded, folder)}"
    left = [path.name for path in folder.glob(".*")] if folder.is_dir() else []
    if left:
        return f"left behind: {left}"
    damaged = [each.at.name for each in candidates(LocalStore(folder)) if not is_good(folder / each.at.name)]
    return f"damaged, with the name of a good one: {damaged}" if damaged else None


def is_good(folder: Path) -> bool:
    try:
        reader.verify(locate(folder))
    except CheckpointError:
        return False
    return True


def _found(recorded: Recorded, folder: Path) -> str:
    checkpoint = next(verified(LocalStore(folder)), None)
    if checkpoint is None:
        return "nothing"
    read = bits(read_full(checkpoint, ""))
    return "new" if read == recorded.new else "old" if read == recorded.old else "a mixture"
