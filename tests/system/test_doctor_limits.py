"""Checks of `paceline doctor` on a machine that is broken for real: mounts in a namespace of their own, and cgroups.

Both end with the process that uses them. The cgroups are of version 1, as in tests/faults/cgroups.py; recorded files of
version 2 are in tests/unit/doctor/test_limits.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.tools.doctor.finding import Finding

pytestmark = pytest.mark.skipif(
    os.environ.get("PACELINE_SYSTEM_TESTS") != "1", reason="mounts filesystems: set PACELINE_SYSTEM_TESTS=1"
)
# Mounts what its first argument says, joins the cgroups of its second, and prints what the checks find.
CHECK = """
import json, os, subprocess, sys
from pathlib import Path
from paceline.tools.doctor import limits, storage
for mount in json.loads(sys.argv[1]):
    subprocess.run(["mount", *mount], check=True)
for folder in json.loads(sys.argv[2]):
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))
os.environ.pop("OMP_NUM_THREADS", None)
found = limits.judge(limits.read(), 2) if sys.argv[3] == "limits" else storage.check(Path(sys.argv[3]))
print(json.dumps([vars(each) for each in found]))
"""


def checked(what: str | Path, *mounts: tuple[str, ...], cgroups: tuple[Path, ...] = ()) -> dict[str, Finding]:
    """The findings about the limits or a folder, by check."""
    arguments = [json.dumps(mounts), json.dumps([str(each) for each in cgroups]), str(what)]
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", CHECK, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return {each["check"]: Finding(**each) for each in json.loads(done.stdout)}


@contextmanager
def cgroup(controller: str, **files: str) -> Iterator[Path]:
    """A child of this process's own cgroup, with these limits."""
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    own = next(path for _, controllers, path in lines if controller in controllers.split(","))
    folder = Path(tempfile.mkdtemp(prefix="paceline-", dir=f"/sys/fs/cgroup/{controller}{own}"))
    try:
        for name, value in files.items():
            Path(folder, f"{controller}.{name}").write_text(value)
        yield folder
    finally:
        folder.rmdir()


def tmpfs(folder: str | Path, options: str) -> tuple[str, ...]:
    return ("-t", "tmpfs", "-o", options, "tmpfs", str(folder))


@pytest.mark.nightly
def test_the_shared_memory_of_a_docker_container_is_a_warning_with_the_docker_flag() -> None:
    found = checked("limits", tmpfs("/dev/shm", "size=64m"))["shared memory"]
    assert found.status == "warn" and "/dev/shm: 64.0 MiB" in found.what and "--shm-size=16g" in found.fix


@pytest.mark.nightly
def test_shared_memory_below_one_gib_is_a_warning() -> None:
    assert checked("limits", tmpfs("/dev/shm", "size=512m"))["shared memory"].status == "warn"


@pytest.mark.nightly
def test_shared_memory_without_a_limit_is_not_taken_for_none() -> None:
    found = checked("limits", tmpfs("/dev/shm", "size=0"))["shared memory"]
    assert found.status == "ok" and "unlimited" in found.what


def test_the_memory_of_a_cgroup_is_found() -> None:
    with cgroup("memory", limit_in_bytes=str(900 * 2**20)) as folder:
        found = checked("limits", cgroups=(folder,))["memory"]
    assert found.status == "fail" and "limit of the cgroup: 900.0 MiB" in found.what


@pytest.mark.nightly
def test_the_processes_of_a_cgroup_are_found() -> None:
    with cgroup("pids", max="50") as folder:
        found = checked("limits", cgroups=(folder,))["threads"]
    assert found.status == "fail" and found.what.endswith(": 49")


@pytest.mark.nightly
def test_the_cores_of_a_cgroup_are_found() -> None:
    with cgroup("cpu", cfs_period_us="100000", cfs_quota_us="50000") as folder:
        found = checked("limits", cgroups=(folder,))["cores"]
    assert found.status == "warn" and "0.5 cores for 2 ranks (limit of the cgroup" in found.what


def test_a_full_disk_is_a_failure(tmp_path: Path) -> None:
    found = checked(tmp_path / "runs", tmpfs(tmp_path, "size=100m"))
    assert found["disk space"].status == "fail" and "100.0 MiB free" in found["disk space"].what
    assert "not measured" in found["write speed"].what
    assert found["filesystem"].status == "warn" and "tmpfs: in memory" in found["filesystem"].what


@pytest.mark.nightly
def test_a_disk_with_little_space_is_a_warning(tmp_path: Path) -> None:
    assert checked(tmp_path, tmpfs(tmp_path, "size=2g"))["disk space"].status == "warn"


@pytest.mark.nightly
def test_a_disk_without_inodes_is_a_failure(tmp_path: Path) -> None:
    assert checked(tmp_path, tmpfs(tmp_path, "size=2g,nr_inodes=50"))["inodes"].status == "fail"


@pytest.mark.nightly
def test_a_folder_without_a_free_inode_cannot_be_used(tmp_path: Path) -> None:
    found = checked(tmp_path, tmpfs(tmp_path, "size=2g,nr_inodes=1"))["run folder"]
    assert found.status == "fail" and "No space left on device" in found.what


@pytest.mark.nightly
def test_a_read_only_disk_is_a_failure(tmp_path: Path) -> None:
    found = checked(tmp_path / "runs", tmpfs(tmp_path, "ro"))["run folder"]
    assert found.status == "fail" and "Read-only file system" in found.what


@pytest.mark.nightly
def test_the_layer_of_a_container_is_a_warning(tmp_path: Path) -> None:
    lower, upper, work, merged = (tmp_path / name for name in ("lower", "upper", "work", "merged"))
    for folder in (lower, upper, work, merged):
        folder.mkdir()
    layers = f"lowerdir={lower},upperdir={upper},workdir={work}"
    found = checked(merged, ("-t", "overlay", "-o", layers, "overlay", str(merged)))["filesystem"]
    assert found.status == "warn" and "deleted with the container" in found.why


@pytest.mark.nightly
def test_a_slow_disk_is_a_warning(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    rate = f"{os.major(device)}:{os.minor(device)} {8 * 2**20}"
    with cgroup("blkio", **{"throttle.write_bps_device": rate}) as folder:
        found = checked(tmp_path, cgroups=(folder,))["write speed"]
    assert found.status == "warn" and int(found.what.split()[0]) < 50
    assert list(tmp_path.iterdir()) == []
