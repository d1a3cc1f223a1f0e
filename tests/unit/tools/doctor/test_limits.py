"""Limits are lowered for real, in a process of their own; limits of cgroups are recorded files of both versions."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.tools.doctor import limits
from paceline.tools.doctor.finding import Finding, worst
from paceline.tools.doctor.limits import LimitFacts

MIB, GIB = 2**20, 2**30
HEALTHY = LimitFacts(
    shm=(16 * GIB, 16 * GIB),
    open_files=(65536, 1048576),
    locked_memory=math.inf,
    threads=math.inf,
    memory=64 * GIB,
    memory_limit=math.inf,
    affinity=16,
    quota=math.inf,
    has_thread_count=False,
    now=1_790_000_000.0,
    newest_file=1_780_000_000.0,
    is_synchronized=True,
)
CHECK = """
import json, os, resource, sys
from paceline.tools.doctor import limits
{setup}
print(json.dumps([vars(each) for each in limits.judge(limits.read(), {arguments})]))
"""


def named(check: str, findings: Iterable[Finding]) -> Finding:
    return next(each for each in findings if each.check == check)


def judged(
    check: str, ranks: int = 4, has_infiniband: bool = False, several_hosts: bool = False, **facts: object
) -> Finding:
    changed = replace(HEALTHY, **facts)  # type: ignore[arg-type]
    return named(check, limits.judge(changed, ranks, has_infiniband=has_infiniband, several_hosts=several_hosts))


def checked_after(setup: str, arguments: str = "1") -> list[Finding]:
    """What a new process finds after it has lowered its own limits."""
    code = CHECK.format(setup=setup, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return [Finding(**each) for each in json.loads(done.stdout)]


def recorded(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A root folder with /proc/self/cgroup and these files."""
    for name, text in {"proc/self/cgroup": cgroup, "proc/meminfo": "MemAvailable: 67108864 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_healthy_machine_has_one_finding_for_each_thing_checked_and_all_are_ok() -> None:
    findings = limits.judge(HEALTHY, 8, has_infiniband=True, several_hosts=True)
    assert worst(findings) == "ok" and not any(each.why or each.fix for each in findings)
    assert [each.check for each in findings] == [
        "shared memory", "open files", "locked memory", "threads", "memory", "cores", "clock", "clock synchronization",
    ]  # fmt: skip


def test_every_problem_comes_with_a_reason_and_a_fix() -> None:
    broken = replace(
        HEALTHY,
        shm=(64 * MIB, 64 * MIB),
        open_files=(1024, 4096),
        locked_memory=8 * MIB,
        threads=10,
        memory=GIB,
        affinity=1,
        now=0.0,
        is_synchronized=False,
    )
    findings = limits.judge(broken, 4, has_infiniband=True, several_hosts=True)
    assert all(each.status != "ok" and each.why and each.fix for each in findings)


def test_a_small_shared_memory_is_a_warning_with_the_docker_flag_and_hardly_any_a_failure() -> None:
    found = judged("shared memory", shm=(64 * MIB, 64 * MIB))
    assert found.status == "warn" and "64.0 MiB" in found.what
    assert judged("shared memory", shm=(8 * MIB, 8 * MIB)).status == "fail"
    assert "--shm-size=16g" in found.fix and "--ipc=host" in found.fix and "emptyDir" in found.fix
    assert judged("shared memory", shm=(512 * MIB, 512 * MIB)).status == "warn"


def test_shared_memory_that_killed_jobs_filled_is_to_be_cleaned_up_rather_than_enlarged() -> None:
    found = judged("shared memory", shm=(16 * GIB, 10 * MIB))
    assert found.status == "fail" and "rm /dev/shm/torch_*" in found.fix and "--shm-size" not in found.fix


def test_a_machine_without_shared_memory_is_a_failure(tmp_path: Path) -> None:
    found = named("shared memory", limits.judge(limits.read(tmp_path), 1))
    assert found.status == "fail" and "/dev/shm does not exist" in found.what


def test_a_low_limit_of_open_files_is_a_warning_with_ulimit() -> None:
    found = named("open files", checked_after("resource.setrlimit(resource.RLIMIT_NOFILE, (512, 8192))"))
    assert found.status == "warn" and "512" in found.what and found.fix == "ulimit -n 8192"


def test_a_low_hard_limit_of_open_files_needs_more_than_ulimit() -> None:
    found = named("open files", checked_after("resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))"))
    assert found.status == "warn" and "--ulimit nofile" in found.fix and "limits.conf" in found.fix


def test_large_limits_are_shown_in_full() -> None:
    assert "1048576" in judged("open files", open_files=(1048576, math.inf)).what
    assert "unlimited" in judged("threads").what


def test_little_locked_memory_matters_with_infiniband_only() -> None:
    setup = "resource.setrlimit(resource.RLIMIT_MEMLOCK, (2**20, 2**20))"
    found = named("locked memory", checked_after(setup, "1, has_infiniband=True"))
    assert found.status == "fail" and "1.0 MiB" in found.what and "memlock" in found.fix
    assert named("locked memory", checked_after(setup)).status == "ok"
    assert judged("locked memory", has_infiniband=True, locked_memory=64 * MIB).status == "ok"


def test_a_low_limit_of_processes_is_found_for_users_but_not_for_root() -> None:
    setup = "resource.setrlimit(resource.RLIMIT_NPROC, (100, 100))"
    # A Python in root's home has to be complete before it is closed to this process.
    as_user = setup + "\nimport sysconfig; sysconfig.get_paths()\nif os.geteuid() == 0: os.seteuid(65534)"
    assert named("threads", checked_after(as_user, "1")).status == "warn"
    found = named("threads", checked_after(as_user, "4"))
    assert found.status == "fail" and "100" in found.what and "ulimit -u" in found.fix
    if os.geteuid() == 0:
        assert "100" not in named("threads", checked_after(setup, "4")).what


def test_fewer_cores_than_ranks_are_a_warning() -> None:
    found = named("cores", checked_after("os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})", "2"))
    assert found.status == "warn" and "1 cores for 2 ranks" in found.what and "--cpus-per-task" in found.fix


V2 = "0::/kubepods/pod1/main\n"
V1 = "12:cpuset:/\n5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n3:pids:/docker/abc\n0::/\n"


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        (V2, {"kubepods/pod1/cpu.max": "200000 100000", "kubepods/pod1/main/cpu.max": "max 100000"}),
        (V1, {"cpu/docker/abc/cpu.cfs_quota_us": "200000", "cpu/docker/abc/cpu.cfs_period_us": "100000"}),
        (V1, {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}),  # mounted in a container
    ],
)
def test_the_cpu_quota_of_a_cgroup_counts(tmp_path: Path, cgroup: str, files: dict[str, str]) -> None:
    root = recorded(tmp_path, cgroup, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert limits.read_cores(root)[1] == 2.0


def test_an_unlimited_cpu_quota_is_none(tmp_path: Path) -> None:
    assert limits.read_cores(recorded(tmp_path / "2", V2, {"sys/fs/cgroup/cpu.max": "max 100000"}))[1] == math.inf
    files = {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}
    assert limits.read_cores(recorded(tmp_path / "1", V1, files))[1] == math.inf


def test_torch_is_told_about_a_cpu_quota_unless_it_was() -> None:
    found = judged("cores", ranks=2, affinity=64, quota=8.0)
    assert found.status == "warn" and "8 cores" in found.what and found.fix == "export OMP_NUM_THREADS=4"
    assert judged("cores", ranks=2, affinity=64, quota=8.0, has_thread_count=True).status == "ok"


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        (
            V2,
            {
                "kubepods/pod1/memory.max": str(8 * GIB),
                "kubepods/pod1/memory.current": str(7 * GIB),
                "kubepods/pod1/memory.stat": f"anon {5 * GIB}\ninactive_file {2 * GIB}\n",
                "kubepods/pod1/main/memory.max": "max",
            },
        ),
        (
            V1,
            {
                "memory/docker/abc/memory.limit_in_bytes": str(8 * GIB),
                "memory/docker/abc/memory.usage_in_bytes": str(7 * GIB),
                "memory/docker/abc/memory.stat": f"inactive_file 0\ntotal_inactive_file {2 * GIB}\n",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": str(60 * GIB),
            },
        ),
    ],
)
def test_the_memory_limit_of_a_cgroup_counts_without_cached_files(
    tmp_path: Path, cgroup: str, files: dict[str, str]
) -> None:
    root = recorded(tmp_path, cgroup, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    found = named("memory", limits.judge(limits.read(root), 2))
    assert (
        found.status == "warn"
        and "3.0 GiB available for 2 ranks" in found.what
        and "limit of the cgroup: 8.0 GiB" in found.what
    )
    assert "docker run --memory" in found.fix
    assert named("memory", limits.judge(limits.read(root), 8)).status == "fail"


def test_memory_without_a_cgroup_is_that_of_the_machine(tmp_path: Path) -> None:
    found = named("memory", limits.judge(limits.read(recorded(tmp_path, "0::/\n", {})), 4))
    assert found.status == "ok" and found.what == "64.0 GiB available for 4 ranks"
    assert "fewer ranks" in judged("memory", memory=3 * GIB).fix


@pytest.mark.parametrize(("cgroup", "folder"), [(V2, "kubepods/pod1"), (V1, "pids/docker/abc")])
def test_the_limit_of_processes_of_a_cgroup_counts(tmp_path: Path, cgroup: str, folder: str) -> None:
    files = {f"sys/fs/cgroup/{folder}/pids.max": "1000", f"sys/fs/cgroup/{folder}/pids.current": "900"}
    found = named("threads", limits.judge(limits.read(recorded(tmp_path, cgroup, files)), 4))
    assert found.status == "fail" and found.what.endswith(": 100") and "--pids-limit" in found.fix


def test_a_clock_before_the_newest_installed_package_is_a_failure(tmp_path: Path) -> None:
    package = tmp_path / Path(sysconfig.get_path("purelib")).relative_to("/") / "torch-2.13.0.dist-info"
    package.mkdir(parents=True)
    os.utime(package, (4e9, 4e9))  # 2096: from there, the clock of this machine is behind
    found = named("clock", limits.judge(limits.read(tmp_path), 1))
    assert found.status == "fail" and "2096" in found.what and "TLS" in found.why and "set-ntp" in found.fix


def test_the_clock_is_compared_with_paceline_itself() -> None:
    newest = limits.read().newest_file
    assert newest >= Path(limits.__file__).stat().st_mtime
    assert judged("clock", now=newest - 3600, newest_file=newest).status == "ok"  # a clock somewhere else was ahead
    assert judged("clock", now=newest - 30 * 86400, newest_file=newest).status == "fail"


def test_a_clock_that_is_not_synchronized_matters_on_several_hosts_only() -> None:
    found = judged("clock synchronization", several_hosts=True, is_synchronized=False)
    assert found.status == "warn" and "chronyd" in found.fix
    alone = judged("clock synchronization", is_synchronized=False)
    assert alone.status == "ok" and alone.what == "not synchronized; only logs of several hosts are ordered by it"
    assert judged("clock synchronization", several_hosts=True, is_synchronized=None).status == "ok"


def test_systemd_knows_that_the_clock_is_synchronized(tmp_path: Path) -> None:
    root = recorded(tmp_path, "0::/\n", {"run/systemd/timesync/synchronized": ""})
    assert limits.read(root).is_synchronized is True


def test_checks_need_neither_torch_nor_numpy() -> None:
    """The doctor starts fast, also where torch is broken."""
    modules = ", ".join(f"paceline.tools.doctor.{name}" for name in ("limits", "storage", "variables"))
    code = f"import sys, {modules}; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "False"]
