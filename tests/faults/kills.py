"""A rank that is killed in a save of a training on two ranks, and what has to be true afterwards.

The training saves every second step and keeps one checkpoint. The save of step 4 is the one in which a rank dies, so
that of step 2 is the old one. `problem_after` is empty where all promises hold.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import tiny
from faults import worlds
from faults.saves import read_full
from paceline.checkpoint.checkpoint_store import step_name
from paceline.checkpoint.local_store import Filesystem, LocalStore
from paceline.checkpoint.reader import candidates, verified
from paceline.checkpoint.writer import Writer, _SaveJob

STEPS, OLD, NEW = 7, 2, 4
_PARTIAL = f".{step_name(NEW)}.partial-"
_GONE = f".{step_name(OLD)}.gone-"


@dataclass(frozen=True)
class Phase:
    """The moment before, in or after the `use`-th time that an operation meets a path that holds `where`."""

    name: str
    when: Literal["before", "middle", "after"]
    operation: str  # of Disk, or of what a save is made of
    where: str = ""
    first_rank_only: bool = False
    commits: bool = False  # the new checkpoint has its name by then
    use: int = 1


def _phases() -> list[Phase]:
    file, first = f"{_PARTIAL}*/rank-", partial(Phase, first_rank_only=True)
    named = partial(first, commits=True)
    return [
        Phase("before it begins", "before", "begin", use=2),
        Phase("begun", "before", "run", use=2),
        first("folder made", "after", "make_folder", _PARTIAL),
        Phase("file created", "after", "create", file),
        Phase("in the middle of writing", "middle", "write", file),
        Phase("before fsync", "before", "sync", file),
        Phase("after fsync", "after", "sync", file),
        Phase("before ranks tell what they wrote", "after", "close", file),
        Phase("after all have told it", "after", "_gather", use=4),  # a save gathers twice
        first("manifest created", "after", "create", f"{_PARTIAL}*/manifest.json"),
        first("manifest written", "after", "sync", f"{_PARTIAL}*/manifest.json"),
        first("before it gets its name", "before", "rename", _PARTIAL),
        named("it has its name", "after", "rename", _PARTIAL),
        named("latest written", "after", "sync", ".latest.partial-", use=2),
        named("latest moved", "after", "rename", ".latest.partial-", use=2),
        named("the old one lost its name", "after", "rename", f"/{step_name(OLD)}"),
        named("the old one half removed", "middle", "remove", _GONE),
        named("the old one removed", "after", "remove", _GONE),
    ]


PHASES = _phases()


@dataclass(frozen=True)
class Kill:
    phase: Phase
    rank: int
    strategy: str
    background: bool

    def __str__(self) -> str:
        how = "background" if self.background else "blocking"
        return f"{self.strategy}, {how}, rank {self.rank}: {self.phase.name}"


def all_kills() -> Iterator[Kill]:
    for strategy in ("ddp", "fsdp"):
        for background in (True, False):
            for phase in PHASES:
                for rank in (0,) if phase.first_rank_only else (0, 1):
                    yield Kill(phase, rank, strategy, background)


def train(folder: Path, strategy: str, background: bool, prepare: Callable[[], None] | None = None, **more: Any) -> Any:
    """On one rank of two: the loss of each step, by its number."""
    if prepare is not None:
        prepare()
    settings: dict[str, Any] = {"save_every": 2, "keep": 1, **more}
    trainer = tiny.classifier_trainer(
        strategy=strategy, ema=0.9, run=str(folder / "r"), resume="auto", log_every=1,
        checkpoint={"background": background}, **settings,
    )  # fmt: skip
    history = trainer.train(tiny.blobs(), max_steps=STEPS)
    return [[record["step"], record["loss"]] for record in history.steps]


@dataclass(frozen=True)
class Unbroken:
    """What a run to which nothing happened says: each step's loss, and what its checkpoint holds."""

    losses: dict[int, float]
    contents: dict[int, dict[str, Tensor]]


def unbroken(folder: Path, strategy: str) -> Unbroken:
    records = worlds.values(2, partial(train, folder, strategy, False, save_every=1, keep=None))[0]
    found = {
        checkpoint.manifest.step: read_full(checkpoint, "") for checkpoint in verified(LocalStore(_checkpoints(folder)))
    }
    return Unbroken(dict(records), found)


def _checkpoints(folder: Path) -> Path:
    return folder / "r" / "checkpoints"


def problem_after(kill: Kill, folder: Path, expected: Unbroken) -> str:
    """Let it happen below `folder`, look at what is there, and go on from it; what was not as promised."""
    ended = worlds.run(2, partial(train, folder, kill.strategy, kill.background, partial(arm, kill)))
    if ended[kill.rank].status != -signal.SIGKILL:
        return f"rank {kill.rank} was not killed: {ended[kill.rank]}"
    other = ended[1 - kill.rank]
    if other.status != 1:
        return f"the other rank ended with {other.status}: {other.error}{other.output}"
    return _problem_on_disk(kill, folder, expected) or _problem_going_on(kill, folder, expected)


def _problem_on_disk(kill: Kill, folder: Path, expected: Unbroken) -> str:
    """There is a good one, old or new; and every one that has a name is good and holds the step that it says."""
    found = candidates(LocalStore(_checkpoints(folder)))
    good = list(verified(LocalStore(_checkpoints(folder))))
    if len(found) != len(good):
        return f"of {len(found)} checkpoints {len(good)} are good"
    if not good or (kill.phase.commits and all(checkpoint.manifest.step < NEW for checkpoint in good)):
        return f"only {[checkpoint.at.name for checkpoint in good]} are there"
    for checkpoint in good:
        difference = differing(read_full(checkpoint, ""), expected.contents[checkpoint.manifest.step])
        if difference:
            return f"{checkpoint.at.name} holds another {difference}"
    return ""


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    """The first tensor that is not the same, bit for bit. Rank 0 may have saved alone, without 1's random state."""
    for name in sorted(found.keys() | expected.keys()):
        if name.startswith("random/rank-1/"):
            continue
        if name not in found or name not in expected or not same_bits(found[name], expected[name]):
            return name
    return ""


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _problem_going_on(kill: Kill, folder: Path, expected: Unbroken) -> str:
    ended = worlds.run(2, partial(train, folder, kill.strategy, kill.background))
    for rank, each in enumerate(ended):
        if each.status != 0:
            return f"rank {rank} could not go on: {each.error}{each.output}"
        wrong = [step for step, loss in each.value if loss != expected.losses[step]]
        if wrong or not each.value or each.value[-1][0] != STEPS:
            return f"resumed, the losses of steps {wrong} differ: {each.value}"
    last = next(verified(LocalStore(_checkpoints(folder))))
    difference = differing(read_full(last, ""), expected.contents[STEPS])
    left = [path.name for path in _checkpoints(folder).iterdir() if path.name.startswith(".")]
    return f"resumed, {difference} differs" if difference else f"{left} were left behind" if left else ""


def arm(kill: Kill) -> None:
    """In a rank's process, before training: everything that a save does passes by here first."""
    if int(os.environ["RANK"]) != kill.rank:
        return
    if hasattr(Filesystem, kill.phase.operation):
        _arm_disk(kill.phase)
    else:
        _arm_save(kill.phase)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arm_disk(phase: Phase) -> None:
    paths: dict[int, Path] = {}
    original, create, met = getattr(Filesystem, phase.operation), Filesystem.create, [0]

    def noted_create(self: Filesystem, path: Path) -> int:
        descriptor = create(self, path)
        paths[descriptor] = path
        return descriptor

    def passed_by(self: Filesystem, which: Any, *rest: Any) -> Any:
        met[0] += _is_meant(phase, paths.get(which) if isinstance(which, int) else which)
        if met[0] < phase.use:
            return original(self, which, *rest)
        if phase.when == "middle":
            _half(which, *rest)
        elif phase.when == "after":
            original(self, which, *rest)
        return _die()

    Filesystem.create = noted_create  # type: ignore[method-assign]
    setattr(Filesystem, phase.operation, passed_by)


def _is_meant(phase: Phase, path: Path | None) -> bool:
    """`where` is a part of the path; a `*` in it stands for the random end of a folder's name."""
    start, _, end = phase.where.partition("*/")
    return path is not None and start in str(path) and (not end or path.name.startswith(end))


def _half(which: Any, *rest: Any) -> None:
    """Half of a write, or of the removal of a folder."""
    if isinstance(which, int):
        os.write(which, rest[0][: len(rest[0]) // 2])
    else:
        next(which.glob("rank-*")).unlink()


def _arm_save(phase: Phase) -> None:
    owner: Any = Writer if phase.operation == "begin" else _SaveJob
    original, calls = getattr(owner, phase.operation), [0]

    def passed_by(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == phase.use and phase.when == "before":
            _die()
        result = original(*args, **kwargs)
        if calls[0] == phase.use:
            _die()
        return result

    setattr(owner, phase.operation, passed_by)
