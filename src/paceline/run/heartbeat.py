"""What a rank is doing, seen from outside: a page of 64 bytes that the rank writes and its launcher reads.

    page = progress.open_page()      # in the rank; where no launcher asked for it, a page that nobody reads
    page.enter("load")
    page.at(12)                      # 12 steps are done: the 13th is being trained

    progress.clear(folder)           # in the launcher, before ranks start
    progress.read(folder)[0]         # Page(phase="training", step=12, time=1763220000.1)

The page is a mapped file. A write costs no system call, and what was written is there after a SIGKILL. A reader may see
the step of one write with the time of the one before; each number by itself is whole.

After several deaths in the same step the launcher names that step to the ranks (PACELINE_SUSPECT_STEP). Each then
writes down which samples it is about to train on, for the launcher to tell.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import time
from typing import Any, Literal, NamedTuple, get_args

from paceline.runtime import environment

FOLDER = "PACELINE_PROGRESS"  # where ranks write their pages
SUSPECT_STEP = "PACELINE_SUSPECT_STEP"  # the number of a step, as metrics.jsonl counts: the first one is 1
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # torchrun's name for it

Phase = Literal["start", "rendezvous", "load", "first step", "training", "saving", "evaluating", "done"]

_PHASES: tuple[Phase, ...] = get_args(Phase)
_TRAINING = _PHASES.index("training")
_SIZE = 64
_HEAD = b"paceline page 1\0"
_BODY = struct.Struct("@Hqd")  # behind the head: phase, steps done, time of the last write
_BODY_AT = len(_HEAD)
_write_body = _BODY.pack_into
_PAGES, _SUSPECTS = "progress-", "suspects-"


class Heartbeat(NamedTuple):
    """What a rank last wrote: its phase, the optimizer steps that are done, and when that was."""

    phase: Phase
    step: int
    time: float

    @property
    def trained(self) -> int | None:
        """The number of the step that is being trained, as metrics.jsonl counts; None in another phase."""
        return self.step + 1 if self.phase in ("first step", "training") else None

    def __str__(self) -> str:
        """For people, after "rank 3 failed"."""
        if self.trained is not None:
            return f"in step {self.trained}"
        before = self.phase in ("start", "rendezvous", "load")
        return f"before training ({self.phase})" if before else f"{self.phase} after step {self.step}"


class HeartbeatWriter:
    """A rank's own page. `at` is called in every step."""

    def __init__(self, buffer: mmap.mmap | bytearray) -> None:
        self._buffer = buffer
        _write_body(buffer, _BODY_AT, 0, 0, time())
        buffer[:_BODY_AT] = _HEAD

    def at(self, step: int) -> None:
        """That many steps are done, and the next one begins."""
        _write_body(self._buffer, _BODY_AT, _TRAINING, step, time())

    def enter(self, phase: Phase, step: int | None = None) -> None:
        before: int = _BODY.unpack_from(self._buffer, _BODY_AT)[1]
        _write_body(self._buffer, _BODY_AT, _PHASES.index(phase), before if step is None else step, time())

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Another phase for the time of a block; also after an error it is then the one before."""
        before = _PHASES[_BODY.unpack_from(self._buffer, _BODY_AT)[0]]
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)


def open_page(variables: Mapping[str, str] = os.environ) -> HeartbeatWriter:
    """This rank's page. One that can't be written is no reason to stop a training: then nobody sees it."""
    told = variables.get(FOLDER)
    if told:
        place = environment.read_rank_info(variables) or environment.RankInfo()
        with suppress(OSError):
            return HeartbeatWriter(_map(Path(told) / f"{_PAGES}{place.rank}"))
    return HeartbeatWriter(bytearray(_SIZE))


def _map(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        # Written, not just made longer: on a full disk a hole in a mapped file would be a SIGBUS in some later step.
        os.pwrite(descriptor, bytes(_SIZE), 0)
        return mmap.mmap(descriptor, _SIZE)
    finally:
        os.close(descriptor)


def read(folder: Path) -> dict[int, Heartbeat]:
    """The pages of all ranks that have one. What is no page, or not yet one, is left out."""
    found = {}
    for rank, path in _of_ranks(folder, _PAGES):
        with suppress(OSError, struct.error, IndexError):
            content = path.read_bytes()
            phase, step, when = _BODY.unpack_from(content, _BODY_AT)
            if content.startswith(_HEAD):
                found[rank] = Heartbeat(_PHASES[phase], step, when)
    return found


def clear(folder: Path) -> None:
    """Before ranks start: what those before them wrote is not theirs."""
    for _, path in [*_of_ranks(folder, _PAGES), *_of_ranks(folder, _SUSPECTS)]:
        path.unlink(missing_ok=True)


def _of_ranks(folder: Path, prefix: str) -> list[tuple[int, Path]]:
    """A rank's files by its number."""
    paths = sorted(folder.glob(f"{prefix}*"))
    numbers = [(path.stem.removeprefix(prefix), path) for path in paths]
    return [(int(number), path) for number, path in numbers if number.isdecimal()]


def generation(variables: Mapping[str, str] = os.environ) -> int:
    """How often the ranks of this launch were started again: 0 for the first start."""
    text = variables.get(RESTARTS, "")
    return int(text) if text.isdecimal() else 0


def suspect_step(variables: Mapping[str, str] = os.environ) -> int | None:
    """The step whose samples are to be written down, if there is one."""
    text = variables.get(SUSPECT_STEP, "")
    return int(text) if text.isdecimal() and variables.get(FOLDER) else None


@dataclass(frozen=True)
class Suspects:
    """The samples of a step that one rank has."""

    step: int
    epoch: int
    samples: Sequence[Any]  # their indices in the dataset; none where it has no indices


def write_suspects(suspects: Suspects, variables: Mapping[str, str] = os.environ) -> None:
    """On the disk's way when this returns, so that they outlast a death in the next moment."""
    place = environment.read_rank_info(variables) or environment.RankInfo()
    with suppress(OSError):
        text = json.dumps(asdict(suspects), default=_plain)
        (Path(variables[FOLDER]) / f"{_SUSPECTS}{place.rank}.json").write_text(text)


def _plain(value: Any) -> int | str:
    return int(value) if hasattr(value, "__index__") else str(value)


def read_suspects(folder: Path) -> dict[int, Suspects]:
    found = {}
    for rank, path in _of_ranks(folder, _SUSPECTS):
        with suppress(OSError, ValueError, TypeError):
            found[rank] = Suspects(**json.loads(path.read_text()))
    return found
