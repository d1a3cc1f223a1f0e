"""Folders are broken for real where that takes no mount; tests/system/test_doctor_limits.py has those with mounts."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from multiprocessing.connection import Listener
from pathlib import Path

import pytest

from paceline.tools.doctor import storage
from paceline.tools.doctor.finding import Finding, worst
from paceline.tools.doctor.storage import StorageFacts, TemporaryFacts

GIB = 2**30
HEALTHY = StorageFacts(
    Path("runs"), Path("runs").absolute(), free=100 * GIB, inodes=10**6, speed=1e9, filesystem="ext4"
)
CHECK = """
import json, os, resource, sys
from pathlib import Path
from paceline.tools.doctor import storage
{setup}
print(json.dumps([vars(each) for each in storage.check(Path(sys.argv[1]))]))
"""


def named(check: str, findings: Iterable[Finding]) -> Finding:
    return next(each for each in findings if each.check == check)


def judged(check: str, **facts: object) -> Finding:
    changed = StorageFacts(**{**vars(HEALTHY), **facts})
    return named(check, storage.judge(changed))


def checked_after(setup: str, folder: Path) -> list[Finding]:
    """What a new process finds."""
    command = [sys.executable, "-c", CHECK.format(setup=setup), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [Finding(**each) for each in json.loads(done.stdout)]


def everything_in(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_a_folder_that_does_not_exist_can_be_created_and_is_not_left_behind(tmp_path: Path) -> None:
    findings = storage.check(tmp_path / "data" / "runs")
    assert named("run folder", findings).status == "ok" and "can be created" in named("run folder", findings).what
    assert everything_in(tmp_path) == set()


def test_an_existing_folder_keeps_what_it_has_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.yaml").write_text("batch: 8")
    findings = storage.check(tmp_path)
    assert "exists and is writable" in named("run folder", findings).what
    assert [each.check for each in findings] == [
        "run folder", "filesystem", "disk space", "inodes", "write speed", "rename", "TMPDIR",
    ]  # fmt: skip
    assert everything_in(tmp_path) == {tmp_path / "gpt", tmp_path / "gpt" / "config.yaml"}


def test_what_works_here_is_ok(tmp_path: Path) -> None:
    findings = storage.check(tmp_path)
    assert {named(check, findings).status for check in ("run folder", "rename")} == {"ok"}
    assert storage.read(tmp_path).write_error == ""


@pytest.mark.parametrize("below", ["", "gpt"])
def test_a_file_in_place_of_the_folder_is_a_failure(tmp_path: Path, below: str) -> None:
    (tmp_path / "runs").write_text("")
    findings = storage.check(tmp_path / "runs" / below)
    assert findings[0].status == "fail" and "Not a directory" in findings[0].what and findings[0].fix
    assert [each.check for each in findings] == ["run folder", "TMPDIR"]


def test_a_link_that_leads_nowhere_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "unmounted" / "runs")
    found = named("run folder", storage.check(tmp_path / "runs"))
    assert found.status == "fail" and "No such file or directory" in found.what


def test_a_folder_of_somebody_else_is_a_failure() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's are closed to other users
        Path(folder).chmod(0o555)
        as_user = "if os.geteuid() == 0: os.seteuid(65534)"
        found = named("run folder", checked_after(as_user, Path(folder, "runs")))
    assert found.status == "fail" and "Permission denied" in found.what and "ls -ld" in found.fix


def test_a_write_that_fails_is_a_failure_and_leaves_nothing(tmp_path: Path) -> None:
    """As with a quota: there is space, but not for this process."""
    findings = checked_after("resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))", tmp_path)
    found = named("write speed", findings)
    assert found.status == "fail" and "File too large" in found.what and "quota" in found.fix
    assert named("run folder", findings).status == "ok"
    assert everything_in(tmp_path) == set()


def test_a_rename_that_fails_is_a_failure_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "replace", refuse)
    found = named("rename", storage.check(tmp_path))
    assert found.status == "fail" and "Operation not permitted" in found.what and "half a checkpoint" in found.why
    assert everything_in(tmp_path) == set()


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        storage.check(tmp_path)
    assert everything_in(tmp_path) == set()


def test_little_space_is_a_warning_and_almost_none_a_failure() -> None:
    assert judged("disk space").status == "ok"
    assert judged("disk space", free=5 * GIB).status == "warn"
    found = judged("disk space", free=GIB // 2)
    assert found.status == "fail" and "512.0 MiB free" in found.what and "du -xsh" in found.fix


def test_an_almost_full_disk_is_not_filled_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_SPACE_FAIL", 2**62)
    assert storage.read(tmp_path).speed is None
    found = judged("write speed", speed=None)
    assert found.status == "ok" and "not measured" in found.what


def test_few_inodes_are_a_problem_although_there_is_space() -> None:
    assert judged("inodes", inodes=5000).status == "warn"
    found = judged("inodes", inodes=50)
    assert found.status == "fail" and "50 free" in found.what and "--inodes" in found.fix
    assert judged("inodes", inodes=None).status == "ok"  # btrfs has no limit


def test_a_slow_disk_is_a_warning_with_the_time_of_a_save() -> None:
    found = judged("write speed", speed=20e6)
    assert found.status == "warn" and "20 MB/s" in found.what and "8 minutes" in found.why
    assert judged("write speed", speed=50e6).status == "ok"


MOUNTS = r"""
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
31 27 0:50 / /data rw,relatime shared:9 - nfs4 server:/export rw,vers=4.2
32 27 0:51 / /data rw,relatime shared:9 master:1 - lustre 10.0.0.1@o2ib:/fs rw
33 27 0:52 / /my\040bucket rw,nosuid - fuse.s3fs s3fs rw
34 27 0:53 / /database rw - xfs /dev/vdb rw
""".strip()


@pytest.mark.parametrize(
    ("path", "filesystem"),
    [
        ("/home/runs", "ext4"),
        ("/data/runs", "lustre"),  # mounted over the other
        ("/my bucket/runs", "fuse.s3fs"),
        ("/database", "xfs"),  # not in /data
        ("/", "ext4"),
    ],
)
def test_the_filesystem_of_a_folder_is_that_of_the_nearest_mount(path: str, filesystem: str) -> None:
    assert storage.filesystem_of(Path(path), MOUNTS) == filesystem


def test_a_network_filesystem_is_fine_and_named() -> None:
    for kind in ("nfs4", "lustre", "fuse.ceph-fuse", "beegfs"):
        found = judged("filesystem", filesystem=kind)
        assert found.status == "ok" and f"{kind}: a network filesystem" in found.what
    assert judged("filesystem", filesystem="").status == "ok"


@pytest.mark.parametrize(
    ("kind", "why"),
    [("tmpfs", "lost at a reboot"), ("overlay", "deleted with the container"), ("fuse.s3fs", "half a checkpoint")],
)
def test_a_filesystem_that_loses_checkpoints_is_a_warning(kind: str, why: str) -> None:
    found = judged("filesystem", filesystem=kind)
    assert found.status == "warn" and why in found.why and "another disk" in found.fix


def test_a_temporary_folder_that_does_not_exist_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    found = named("TMPDIR", storage.check(tmp_path))
    assert (
        found.status == "fail" and "missing: No such file or directory" in found.what and "export TMPDIR" in found.fix
    )


def test_a_temporary_folder_that_is_too_long_for_loader_workers_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = 107 - len("/pymp-12345678/listener-12345678")
    for length, status in ((longest, "ok"), (longest + 1, "fail")):
        base = tempfile.mkdtemp(prefix="p-", dir="/tmp")
        folder = Path(base, "x" * (length - len(base) - 1))
        socket = folder / "pymp-12345678" / "listener-12345678"  # as multiprocessing names it
        socket.parent.mkdir(parents=True)
        try:
            monkeypatch.setenv("TMPDIR", str(folder))
            found = storage.judge_temporary(storage.read_temporary())
            if status == "ok":
                Listener(str(socket), "AF_UNIX").close()
                assert "AF_UNIX" not in found.why
            else:
                with pytest.raises(OSError, match="AF_UNIX path too long"):
                    Listener(str(socket), "AF_UNIX")
                assert found.status == "fail" and "hangs" in found.why and found.fix == "export TMPDIR=/tmp"
        finally:
            socket.parent.rmdir()
            folder.rmdir()
            Path(base).rmdir()


def test_a_full_temporary_folder_is_a_warning() -> None:
    assert storage.judge_temporary(TemporaryFacts("/tmp", free=100 * 2**20)).status == "warn"
    assert storage.judge_temporary(TemporaryFacts("/tmp", free=2 * GIB)).status == "ok"


def test_a_healthy_disk_has_no_reasons_and_no_fixes() -> None:
    findings = storage.judge(HEALTHY)
    assert worst(findings) == "ok" and not any(each.why or each.fix for each in findings)
