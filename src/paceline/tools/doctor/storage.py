"""Checks the disk that a run writes to: its space, its speed, and whether a save can be atomic on it. And TMPDIR.

Everything is tried out in a temporary folder, inside the run folder or where that would be created, which is removed
afterwards. The large file has no name, so that even a killed process leaves nothing of it behind.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.text import format_bytes
from paceline.tools.doctor.finding import Finding, graded, level_of

_GIB = 2**30
_SPACE_FAIL = _GIB  # a checkpoint of a small model with its optimizer
_SPACE_WARN = 10 * _GIB
_INODES_FAIL, _INODES_WARN = 100, 10_000  # a run creates some files per rank, and for each checkpoint
_BLOCK, _BYTES, _SECONDS = 2**16, 64 * 2**20, 2.0  # of the test file, and for writing it
_SLOW = 50e6  # bytes per second: a checkpoint of 10 GB takes more than three minutes
_TEMPORARY_WARN = _GIB  # torch.compile and Triton build there
# A loader worker opens the Unix socket TMPDIR/pymp-12345678/listener-12345678, and Linux allows 107 characters.
_LONGEST_TMPDIR = 107 - len("/pymp-12345678/listener-12345678")

_NETWORK = "a network filesystem"  # can be used; advice.toml has a reason against each of the others
_FILESYSTEMS = {  # pattern of types → what it is
    r"nfs4?|lustre|gpfs|beegfs\w*|(fuse\.)?(ceph\S*|glusterfs)|wekafs|panfs|cifs|smb3?|9p": _NETWORK,
    r"fuse\.(s3fs|gcsfuse|goofys|blobfuse2?|rclone)": "an object store",
    r"tmpfs|ramfs": "in memory",
    r"overlay": "the writable layer of a container",
}


@dataclass(frozen=True)
class StorageFacts:
    """Errors are empty if it worked."""

    folder: Path
    home: Path  # it, or the nearest parent that exists
    error: str = ""  # of creating a folder there
    free: int = 0  # bytes
    inodes: int | None = None  # free; None: the filesystem has no limit
    speed: float | None = None  # bytes per second, with fsync; None: not measured
    write_error: str = ""
    rename_error: str = ""
    filesystem: str = ""  # type


@dataclass(frozen=True)
class TemporaryFacts:
    folder: str
    error: str = ""
    free: int = 0


def check(folder: Path) -> list[Finding]:
    """`folder`: of the runs; it need not exist."""
    return [*judge(read(folder)), judge_temporary(read_temporary())]


def read(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> StorageFacts:
    path = folder.absolute()
    facts = StorageFacts(folder, next(each for each in (path, *path.parents) if os.path.lexists(each)))
    try:
        with tempfile.TemporaryDirectory(prefix=".paceline-doctor-", dir=facts.home) as scratch:
            found = os.statvfs(scratch)
            free = found.f_bavail * found.f_frsize
            # A nearly full disk is left alone: the file could take the last space from a running job.
            speed, write_error = _write_speed(scratch) if free >= _SPACE_FAIL else (None, "")
            return replace(
                facts,
                free=free,
                inodes=found.f_favail if found.f_files else None,
                speed=speed,
                write_error=write_error,
                rename_error=_rename_error(Path(scratch)),
                filesystem=filesystem_of(facts.home.resolve(), mounts.read_text()) if mounts.exists() else "",
            )
    except OSError as error:
        return replace(facts, error=error.strerror or str(error))


def _write_speed(folder: str) -> tuple[float | None, str]:
    """Bytes per second of the last half, or the error. Each part is as large as all before it and takes about as long,
    so it is known whether it fits into the time."""
    block, written, start = os.urandom(_BLOCK), 0, time.monotonic()  # not zeros, which a filesystem may compress
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            while True:
                began, size = time.monotonic(), max(_BLOCK, written)
                for _ in range(size // _BLOCK):
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
                written += size
                now = time.monotonic()
                if written >= _BYTES or 2 * (now - start) > _SECONDS:
                    return size / max(now - began, 1e-9), ""
    except OSError as error:
        return None, error.strerror or str(error)


def _rename_error(folder: Path) -> str:
    """What a save does at its end: a new file takes the place of the old one, and the folder is synced."""
    new, old = folder / "new", folder / "old"
    try:
        old.write_text("old")
        new.write_text("new")
        new.replace(old)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return "" if old.read_text() == "new" and not new.exists() else "the old file is still there"
    except OSError as error:
        return error.strerror or str(error)


def filesystem_of(path: Path, mountinfo: str) -> str:
    """The type of the filesystem that a path is on: of mounts at the same place, the last one counts."""
    found = (0, "")
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        mount = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields.split()[4])
        if path.is_relative_to(mount) and len(mount) >= found[0]:
            found = len(mount), rest.split()[0]
    return found[1]


def read_temporary() -> TemporaryFacts:
    folder = os.environ.get("TMPDIR", "")
    try:
        folder = folder or tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=folder):
            found = os.statvfs(folder)
            return TemporaryFacts(folder, "", found.f_bavail * found.f_frsize)
    except OSError as error:
        return TemporaryFacts(folder, error.strerror or str(error))


def judge(facts: StorageFacts) -> list[Finding]:
    if facts.error:
        what = f"{facts.folder} cannot be used: {facts.home}: {facts.error}"
        return [graded("run folder", "fail", what, home=facts.home)]
    state = "exists" if facts.home == facts.folder.absolute() else "can be created"
    space = f"{format_bytes(facts.free)} free"
    rename = f"failed: {facts.rename_error}" if facts.rename_error else "works"
    return [
        Finding("run folder", "ok", f"{facts.folder} {state} and is writable"),
        _judge_filesystem(facts),
        graded("disk space", level_of(facts.free, _SPACE_FAIL, _SPACE_WARN), space, home=facts.home),
        _judge_inodes(facts),
        _judge_speed(facts),
        graded("rename", "fail" if facts.rename_error else "ok", f"replacing a file {rename}"),
    ]


def _judge_filesystem(facts: StorageFacts) -> Finding:
    found = (about for pattern, about in _FILESYSTEMS.items() if re.fullmatch(pattern, facts.filesystem))
    about = next(found, "")
    what = f"{facts.folder} is on {facts.filesystem or 'an unknown filesystem'}" + (f": {about}" if about else "")
    return graded("filesystem", "ok" if about in ("", _NETWORK) else "warn", what, about)


def _judge_inodes(facts: StorageFacts) -> Finding:
    if facts.inodes is None:
        return Finding("inodes", "ok", "no limit")
    return graded("inodes", level_of(facts.inodes, _INODES_FAIL, _INODES_WARN), f"{facts.inodes} free", home=facts.home)


def _judge_speed(facts: StorageFacts) -> Finding:
    if facts.write_error:
        what = f"writing {format_bytes(_BYTES)} failed: {facts.write_error}"
        return graded("write speed", "fail", what, "failed")
    if facts.speed is None:
        return Finding("write speed", "ok", "not measured: too little space")
    what, minutes = f"{facts.speed / 1e6:.0f} MB/s, with fsync", f"{10e9 / facts.speed / 60:.0f}"
    return graded("write speed", "ok" if facts.speed >= _SLOW else "warn", what, minutes=minutes)


def judge_temporary(facts: TemporaryFacts) -> Finding:
    if facts.error:
        return graded("TMPDIR", "fail", f"{facts.folder or 'no temporary folder'}: {facts.error}", "unusable")
    if len(facts.folder) > _LONGEST_TMPDIR:
        what = f"{facts.folder} has {len(facts.folder)} characters; at most {_LONGEST_TMPDIR} work"
        return graded("TMPDIR", "fail", what, "long")
    what = f"{facts.folder}: {format_bytes(facts.free)} free"
    return graded("TMPDIR", "ok" if facts.free >= _TEMPORARY_WARN else "warn", what)
