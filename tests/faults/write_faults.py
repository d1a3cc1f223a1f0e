"""A save on a disk that fails at one of its operations, and what has to be true afterwards."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disks import ERRORS, OPERATIONS, FailingDisk
from faults import saves
from paceline.checkpoint.local_store import Filesystem, LocalStore
from paceline.checkpoint.reader import candidates, verified
from paceline.checkpoint.writer import prune
from paceline.errors import CheckpointError

OLD, NEW, NEXT = (saves.values(seed) for seed in (1, 2, 3))


@dataclass(frozen=True)
class Way:
    """A way to save; in each there is an older checkpoint, of step 1."""

    name: str
    step: int
    can_exchange: bool = True
    options: dict[str, Any] = field(default_factory=dict)


WAYS = (
    Way("new, keep=1", 2),
    Way("new, in the background, keep=1", 2, options={"background": True}),
    Way("overwrite, exchanged", 1, options={"overwrite": True}),
    Way("overwrite, two renames", 1, can_exchange=False, options={"overwrite": True}),
)


@dataclass(frozen=True)
class Fault:
    way: Way
    operation: str
    call: int
    error: int | None  # None: a short write
    lasting: bool

    def __str__(self) -> str:
        what = "short" if self.error is None else errno.errorcode[self.error]
        return f"{self.way.name}: {self.operation} {self.call} {what}{' and on' if self.lasting else ''}"


def faults(root: Path, errors: Sequence[tuple[int, bool]], ways: Sequence[Way] = WAYS) -> Iterator[Fault]:
    """At every call of every operation, each error; it lasts where the second part says so."""
    for way in ways:
        disk = FailingDisk(can_exchange=way.can_exchange)
        attempt(root / "count", way, disk)
        shutil.rmtree(root / "count")
        for operation in (*OPERATIONS, "free_bytes"):
            for call in range(1, disk.calls[operation] + 1):
                for error, lasting in errors:
                    yield Fault(way, operation, call, error, lasting)
                if operation == "write":
                    yield Fault(way, operation, call, None, False)


ALL_ERRORS = [(error, lasting) for error in ERRORS for lasting in (True, False)]
TWO_ERRORS = [(errno.ENOSPC, True), (errno.EIO, False)]


def attempt(folder: Path, way: Way, disk: Filesystem) -> CheckpointError | None:
    """Save over, or beside, an older one. Any other error is a mistake and goes through."""
    saves.save(folder, 1, OLD)

    def after(name: str) -> None:
        LocalStore(folder, disk).point("latest", [name])
        prune(LocalStore(folder, disk), 1, None)

    try:
        saves.save(folder, way.step, NEW, disk, after=after, **way.options)
    except CheckpointError as error:
        return error
    return None


def problem(folder: Path, fault: Fault) -> str | None:
    """What is wrong with a save that met this fault."""
    disk = FailingDisk(
        fault.operation, fault.call, fault.error, lasting=fault.lasting, can_exchange=fault.way.can_exchange
    )
    error = attempt(folder, fault.way, disk)
    expected = ["new"] if error is None or error.code == "checkpoint.not-tidied" else ["old", "new"]
    if fault.error is None and error is not None:
        return f"a short write ended in {error.code}"
    return problem_in(folder, expected)


def problem_in(folder: Path, expected: Sequence[str]) -> str | None:
    """The newest good one is as expected, none is damaged; and on a disk that works again the next save works."""
    if (found := newest(folder)) not in expected:
        return f"found {found}, expected {' or '.join(expected)}"
    bad = [each.at.name for each in candidates(LocalStore(folder)) if not saves.is_good(folder / each.at.name)]
    if bad:
        return f"damaged: {bad}"
    LocalStore(folder).remove_leftovers()
    if newest(folder) != found:
        return f"found {newest(folder)} after clearing up"
    saves.save(folder, 9, NEXT)
    left = sorted(path.name for path in folder.glob(".*"))
    return f"left behind: {left}" if left or newest(folder) != "next" else None


def newest(folder: Path) -> str:
    checkpoint = next(verified(LocalStore(folder)), None)
    if checkpoint is None:
        return "nothing"
    read = saves.bits(saves.read_full(checkpoint, ""))
    known = {"old": OLD, "new": NEW, "next": NEXT}
    return next((name for name, content in known.items() if read == saves.bits(content)), "a mixture")


class NotMounted(Exception):
    """Mounting takes rights that this process lacks."""


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """A real file system of so many bytes, in memory."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(["mount", *options], capture_output=True, text=True)
    if mounted.returncode:
        raise NotMounted(mounted.stderr.strip())
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, capture_output=True)


def make_read_only(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True, capture_output=True)


def fill(folder: Path, leave: int) -> Path:
    """A file that takes all of a disk but `leave` bytes."""
    path = folder / "filler"
    path.write_bytes(bytes(max(shutil.disk_usage(folder).free - leave, 0)))
    return path


class Optimist(Filesystem):
    """Says that there is room, as when another program takes it a moment later."""

    def free_bytes(self, path: Path) -> int:
        return 1 << 60
