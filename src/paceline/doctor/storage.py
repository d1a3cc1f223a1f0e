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

from paceline.doctor.finding import Finding, graded, level_of
from paceline.text import format_bytes

_GIB = 2**30
_SPACE_FAIL = _GIB  # a checkpoint of a small model with its optimizer
_SPACE_WARN = 10 * _GIB
_INODES_FAIL, _INODES_WARN = 100, 10_000  # a run creates some files per rank, and for each checkpoint
_BLOCK, _BYTES, _SECONDS = 2**16, 64 * 2**20, 2.0  # of the test file, and for writing it
_SLOW = 50e6  # bytes per second: a checkpoint of 10 GB takes more than three minutes
_TEMPORARY_WARN = _GIB  # torch.compile and Triton build there
# A loader worker opens the Unix socket TMPDIR/pymp-12345678/listener-12345678, and Linux allows 107 characters.
_LONGEST_TMPDIR = 107 - len("/pymp-12345678/listener-12345678")

_ELSEWHERE = "use a folder on another disk (run: /data/runs/NAME in the recipe)"
_FILESYSTEMS = {  # pattern of types → what it is, and why not to use it
    r"nfs4?|lustre|gpfs|beegfs\w*|(fuse\.)?(ceph\S*|glusterfs)|wekafs|panfs|cifs|smb3?|9p": (
        "a network filesystem",
        "",
    ),
    r"fuse\.(s3fs|gcsfuse|goofys|blobfuse2?|rclone)": (
        "an object store",
        "a rename copies the whole object, so that a crash may leave half a checkpoint",
    ),
    r"tmpfs|ramfs": ("in memory", "checkpoints take memory from the ranks, and are lost at a reboot"),
    r"overlay": ("the writable layer of a container", "checkpoints are deleted with the container"),
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
        fix = f"{_ELSEWHERE}, or change the permissions (ls -ld {facts.home})"
        return [Finding("run folder", "fail", what, "a run stops at its start, before the first step", fix)]
    state = "exists" if facts.home == facts.folder.absolute() else "can be created"
    return [
        Finding("run folder", "ok", f"{facts.folder} {state} and is writable"),
        _judge_filesystem(facts),
        _judge_space(facts),
        _judge_inodes(facts),
        _judge_speed(facts),
        _judge_rename(facts),
    ]


def _judge_filesystem(facts: StorageFacts) -> Finding:
    found = (about for pattern, about in _FILESYSTEMS.items() if re.fullmatch(pattern, facts.filesystem))
    about, why = next(found, ("", ""))
    what = f"{facts.folder} is on {facts.filesystem or 'an unknown filesystem'}" + (f": {about}" if about else "")
    return graded("filesystem", "warn" if why else "ok", what, why, _ELSEWHERE)


def _judge_space(facts: StorageFacts) -> Finding:
    why = "a run needs space for 3 checkpoints: the one being written, the newest and the best"
    fix = f"delete what is not needed (du -xsh {facts.home}/*), or {_ELSEWHERE}"
    status = level_of(facts.free, _SPACE_FAIL, _SPACE_WARN)
    return graded("disk space", status, f"{format_bytes(facts.free)} free", why, fix)


def _judge_inodes(facts: StorageFacts) -> Finding:
    if facts.inodes is None:
        return Finding("inodes", "ok", "no limit")
    why = 'a file needs one: "No space left on device", although df shows free space'
    fix = f"delete small files: du --inodes -x {facts.home} | sort -n | tail"
    return graded("inodes", level_of(facts.inodes, _INODES_FAIL, _INODES_WARN), f"{facts.inodes} free", why, fix)


def _judge_speed(facts: StorageFacts) -> Finding:
    if facts.write_error:
        what = f"writing {format_bytes(_BYTES)} failed: {facts.write_error}"
        fix = "check the quota (quota -s, lfs quota), which df does not show, and the disk (dmesg)"
        return Finding("write speed", "fail", what, "a save fails in the same way", fix)
    if facts.speed is None:
        return Finding("write speed", "ok", "not measured: too little space")
    why = f"saving 10 GB takes {10e9 / facts.speed / 60:.0f} minutes"
    what, fix = f"{facts.speed / 1e6:.0f} MB/s, with fsync", f"save less often, or {_ELSEWHERE}"
    return graded("write speed", "ok" if facts.speed >= _SLOW else "warn", what, why, fix)


def _judge_rename(facts: StorageFacts) -> Finding:
    what = f"replacing a file {'failed: ' + facts.rename_error if facts.rename_error else 'works'}"
    why = "a save ends with a rename, so that a crash never leaves half a checkpoint"
    return graded("rename", "fail" if facts.rename_error else "ok", what, why, _ELSEWHERE)


def judge_temporary(facts: TemporaryFacts) -> Finding:
    if facts.error:
        what = f"{facts.folder or 'no temporary folder'}: {facts.error}"
        why = "Python silently uses another folder, and other programs fail"
        return Finding("TMPDIR", "fail", what, why, "create the folder, or export TMPDIR=/tmp")
    if len(facts.folder) > _LONGEST_TMPDIR:
        what = f"{facts.folder} has {len(facts.folder)} characters; at most {_LONGEST_TMPDIR} work"
        why = 'a DataLoader with workers hangs, because the name of a socket is too long: "AF_UNIX path too long"'
        return Finding("TMPDIR", "fail", what, why, "export TMPDIR=/tmp")
    what, why = f"{facts.folder}: {format_bytes(facts.free)} free", "torch.compile, Triton and downloads write there"
    fix = "delete old files, or export TMPDIR=/path/on/a/larger/disk"
    return graded("TMPDIR", "ok" if facts.free >= _TEMPORARY_WARN else "warn", what, why, fix)
