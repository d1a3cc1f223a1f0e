"""Output of nvidia-smi as it looks on real machines, judged; and commands that are missing, fail or hang."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.tools.doctor import gpus
from paceline.tools.doctor.finding import Finding
from paceline.tools.doctor.gpus import NOT_FOUND, TIMED_OUT, Answer, Gpu, GpuFacts

H100 = "\n".join(
    f"{n}, NVIDIA H100 80GB HBM3, GPU-{n}a6e8cd1-4d0a-6c0e-9c0b-5f7c1d0b8e1{n}, Default, Disabled, 570.133.20, 9.0, "
    f"81559, 4, 16, 16, 0, 31, 0x0000000000000001"
    for n in range(8)
)
# The head is underlined, columns are separated by tabs, and network cards follow the GPUs.
H100_TOPO = "\n".join(
    [
        "\t\x1b[4m" + "\t".join([*(f"GPU{n}" for n in range(8)), "NIC0", "CPU Affinity", "NUMA Affinity"]) + "\x1b[0m",
        *(
            f"GPU{row}\t" + "\t".join(" X " if row == column else "NV18" for column in range(8))
            + f"\t{'PIX' if row == 0 else 'NODE'}\t0-55,112-167\t0"
            for row in range(8)
        ),
        "NIC0\tPIX\tNODE\tNODE\tNODE\tNODE\tNODE\tNODE\tNODE\t X \t\t\t\t",
        "",
        "Legend:",
        "",
        "  X    = Self",
        "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)",
        "  NV#  = Connection traversing a bonded set of # NVLinks",
        "",
        "NIC Legend:",
        "",
        "  NIC0: mlx5_0",
    ]
)  # fmt: skip
H100_LINKS = "\n".join(
    f"GPU {n}: NVIDIA H100 80GB HBM3 (UUID: GPU-{n}a6e8cd1-4d0a-6c0e-9c0b-5f7c1d0b8e1{n})\n"
    + "\n".join(f"\t Link {link}: 26.562 GB/s" for link in range(18))
    for n in range(8)
)

RTX_4090 = """\
0, NVIDIA GeForce RTX 4090, GPU-0f1a9b9e-6d0c-2a3b-8f11-0c3b6d5e7a10, Default, [N/A], 550.54.14, 8.9, \
24564, 15, 16, 16, [N/A], 34, 0x0000000000000001
1, NVIDIA GeForce RTX 4090, GPU-7c2d4e6f-1b3a-5c7d-9e8f-a0b1c2d3e4f5, Default, [N/A], 550.54.14, 8.9, \
24564, 15, 8, 16, [N/A], 33, 0x0000000000000001
"""
RTX_4090_TOPO = """\
\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tPHB\t0-31\t0\t\tN/A
GPU1\tPHB\t X \t0-31\t0\t\tN/A

Legend:

  X    = Self
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
"""

A100_MIXED = """\
0, NVIDIA A100-SXM4-40GB, GPU-a0, Default, Disabled, 535.183.01, 8.0, 40960, 0, 16, 16, 0, 29, 0x0000000000000001
1, NVIDIA A100-SXM4-40GB, GPU-a1, Default, Disabled, 535.183.01, 8.0, 40960, 0, 16, 16, 0, 28, 0x0000000000000001
2, NVIDIA A100-SXM4-80GB, GPU-a2, Default, Disabled, 535.183.01, 8.0, 81920, 0, 16, 16, 0, 30, 0x0000000000000001
"""

A100_MIG = """\
0, NVIDIA A100-SXM4-40GB, GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f, Default, Enabled, 535.183.01, 8.0, \
40960, 21504, 16, 16, 0, 37, [N/A]
"""

NO_COMMUNICATION = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n\n"
)
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.126\n"
UNKNOWN_COMMAND = Answer(NOT_FOUND, "nvidia-smi: No such file or directory")


class Recorded:
    """Answers as nvidia-smi did."""

    def __init__(self, query: str | Answer, apps: str = "", topo: str = "", links: str = "") -> None:
        self.query = query if isinstance(query, Answer) else Answer(0, query)
        self.others = {"--query-compute-apps": apps, "topo": topo, "nvlink": links}

    def __call__(self, command: Sequence[str]) -> Answer:
        assert command[0] == "nvidia-smi"
        if command[1].startswith("--query-gpu="):
            return self.query
        return Answer(0, self.others[command[1].partition("=")[0]])


def machine(root: Path, *, driver: bool = False, hardware: bool = False) -> Path:
    """The files of a machine with the driver loaded, and with GPUs on its PCI bus."""
    if driver:
        (root / "proc/driver/nvidia").mkdir(parents=True)
        (root / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01\n")
    if hardware:
        for device, vendor in (("0000:00:00.0", "0x8086"), ("0000:3b:00.0", "0x10de")):
            (root / "sys/bus/pci/devices" / device).mkdir(parents=True)
            (root / "sys/bus/pci/devices" / device / "vendor").write_text(f"{vendor}\n")
    return root


def judged(run: Recorded, root: Path, visible: str | None = None) -> dict[str, Finding]:
    environment = {"PATH": ""} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    return {each.check: each for each in gpus.check(gpus.read(run, root, environment))}


def bad(findings: dict[str, Finding]) -> dict[str, str]:
    return {name: each.status for name, each in findings.items() if each.status != "ok"}


def test_eight_h100_with_nvlink_are_fine(tmp_path: Path) -> None:
    found = judged(Recorded(H100, topo=H100_TOPO, links=H100_LINKS), tmp_path)
    assert bad(found) == {}
    assert found["GPUs"].what == "8 × NVIDIA H100 80GB HBM3 (79.6 GiB)"
    assert found["NVLink"].what == "NV18 between 28 pairs"
    assert found["GPU memory"].what == "at least 100% free"


def test_two_rtx_4090_communicate_over_pcie_and_one_has_half_of_its_lanes(tmp_path: Path) -> None:
    found = judged(Recorded(RTX_4090, topo=RTX_4090_TOPO), tmp_path)
    assert bad(found) == {"PCIe": "warn"}
    assert found["PCIe"].what == "GPU 1: x8 instead of x16"
    assert found["NVLink"].what == "none: GPUs communicate over PCIe (PHB between 1 pair)"


def test_mixed_models_are_a_warning_that_says_which_gpus_to_use(tmp_path: Path) -> None:
    found = judged(Recorded(A100_MIXED), tmp_path)
    assert bad(found) == {"GPUs": "warn"}
    assert found["GPUs"].what == "2 × NVIDIA A100-SXM4-40GB (40.0 GiB), 1 × NVIDIA A100-SXM4-80GB (80.0 GiB)"
    assert found["GPUs"].fix.endswith("CUDA_VISIBLE_DEVICES=0,1")
    assert bad(judged(Recorded(A100_MIXED), tmp_path, visible="0,1")) == {}


def test_instances_of_other_users_on_a_gpu_with_mig_are_not_judged(tmp_path: Path) -> None:
    apps = "GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f, 4711, python, [N/A]\n"
    found = judged(Recorded(A100_MIG, apps), tmp_path, visible="MIG-3e2b6d1c-9a0f-5b1e-8d2c-7f6a5b4c3d2e")
    assert bad(found) == {}
    assert found["GPUs"].what == "1 × NVIDIA A100-SXM4-40GB (40.0 GiB, MIG)"


def test_fields_that_a_gpu_does_not_report_are_unknown(tmp_path: Path) -> None:
    row = "0, Tesla K80, GPU-k, Default, [Not Supported], 470.256.02, 3.7, 11441, [N/A], [N/A], 16, [Not Supported], \
[Unknown], [Not Supported]\n"
    (gpu,) = gpus.read(Recorded(row), tmp_path, {}).gpus
    assert (gpu.used, gpu.width, gpu.ecc_errors, gpu.temperature, gpu.throttle) == (None,) * 5
    assert gpu.capability == (3, 7) and gpu.memory == 11441
    assert bad(judged(Recorded(row), tmp_path)) == {}


def test_a_field_that_an_old_driver_does_not_know_is_left_out(tmp_path: Path) -> None:
    asked = []

    def run(command: Sequence[str]) -> Answer:
        asked.append(command[1])
        if "compute_cap" in command[1]:
            return Answer(2, 'Field "compute_cap" is not a valid field to query.\n\n')
        return Answer(0, "0, Tesla T4, GPU-t, Default, [N/A], 450.80.02, 15109, 0, 16, 16, 0, 40, 0x0000000000000000\n")

    (gpu,) = gpus.read(run, tmp_path, {}).gpus
    assert len([each for each in asked if each.startswith("--query-gpu")]) == 2
    assert (gpu.driver, gpu.capability, gpu.memory, gpu.throttle) == ("450.80.02", (), 15109, 0)


def test_a_warning_of_nvidia_smi_is_not_a_gpu(tmp_path: Path) -> None:
    warning = "\nWARNING: infoROM is corrupted at gpu 0000:3B:00.0\n"
    assert len(gpus.read(Recorded(RTX_4090 + warning), tmp_path, {}).gpus) == 2


def test_processes_of_others_are_named_with_their_memory(tmp_path: Path) -> None:
    apps = """\
GPU-a0, 4711, /opt/conda/bin/python, 30712
GPU-a0, 4712, python train.py, --lr, 0.1, 512
GPU-a2, 99, [Insufficient Permissions], [N/A]
GPU-elsewhere, 5, python, 10
"""
    found = judged(Recorded(A100_MIXED, apps), tmp_path)["GPU processes"]
    assert found.status == "warn"
    assert found.what == (
        "GPU 0: /opt/conda/bin/python (pid 4711, 30.0 GiB); GPU 0: python train.py, --lr, 0.1 (pid 4712, 512.0 MiB); "
        "GPU 2: [Insufficient Permissions] (pid 99, memory unknown)"
    )
    assert "kill 4711 4712 99;" in found.fix
    assert judged(Recorded(A100_MIXED, apps), tmp_path, visible="1")["GPU processes"].status == "ok"
    assert judged(Recorded(A100_MIXED, "No running processes found\n"), tmp_path)["GPU processes"].status == "ok"


def test_memory_that_is_in_use_is_a_warning() -> None:
    facts = GpuFacts((Gpu(0, "A", "GPU-0", memory=1000, used=190), Gpu(1, "A", "GPU-1", memory=1000, used=210)))
    found = {each.check: each for each in gpus.check(facts)}["GPU memory"]
    assert (found.status, found.what) == ("warn", "GPU 1: 79% free")


@pytest.mark.parametrize(
    ("gpu", "check", "status", "what"),
    [
        (Gpu(3, "A", compute_mode="Exclusive_Process"), "compute mode", "warn", "GPU 3: Exclusive_Process"),
        (Gpu(3, "A", compute_mode="Prohibited"), "compute mode", "fail", "GPU 3: Prohibited"),
        (Gpu(3, "A", ecc_errors=2), "GPU errors", "fail", "GPU 3: 2 uncorrected ECC errors"),
        (Gpu(3, "A", fault="GPU is lost"), "GPU errors", "fail", "GPU 3: GPU is lost"),
        (Gpu(3, "A", throttle=0x48, temperature=91), "GPU clocks", "warn",
         "GPU 3: hardware slowdown, too hot (hardware limit), 91 °C"),
        (Gpu(3, "A", throttle=0x20, temperature=87), "GPU clocks", "warn", "GPU 3: too hot, 87 °C"),
        (Gpu(3, "A", throttle=0x80, temperature=50), "GPU clocks", "warn", "GPU 3: power brake, 50 °C"),
    ],
)  # fmt: skip
def test_an_unhealthy_gpu_is_named(gpu: Gpu, check: str, status: str, what: str) -> None:
    found = {each.check: each for each in gpus.check(GpuFacts((Gpu(0, "A"), gpu)))}
    assert bad(found) == {check: status}
    assert found[check].what == what and found[check].why and found[check].fix


def test_idle_and_power_limited_gpus_are_not_throttled() -> None:
    for harmless in (0x1, 0x2, 0x4, 0x10, 0x100):
        assert bad({each.check: each for each in gpus.check(GpuFacts((Gpu(0, "A", throttle=harmless),)))}) == {}


def test_a_gpu_that_requires_a_reset_is_a_failure(tmp_path: Path) -> None:
    row = "0, NVIDIA H100 80GB HBM3, GPU-h, Default, Disabled, 570.133.20, 9.0, 81559, 0, 16, 16, \
[GPU requires reset], [GPU requires reset], [GPU requires reset]\n"
    found = judged(Recorded(row), tmp_path)
    assert bad(found) == {"GPU errors": "fail"} and found["GPU errors"].what == "GPU 0: GPU requires reset"


def test_inactive_links_of_a_connected_gpu_are_a_warning(tmp_path: Path) -> None:
    broken = H100_LINKS.replace("\t Link 3: 26.562 GB/s\n", "\t Link 3: <inactive>\n", 1)
    found = judged(Recorded(H100, topo=H100_TOPO, links=broken), tmp_path)
    assert bad(found) == {"NVLink": "warn"} and found["NVLink"].what == "GPU 0: 1 of 18 links inactive"


def test_a_gpu_without_any_active_link_among_connected_ones_is_a_warning(tmp_path: Path) -> None:
    first, rest = H100_LINKS.split("\n")[0], H100_LINKS[H100_LINKS.index("GPU 1:") :]
    broken = f"{first}\nNVML: Unable to retrieve NVLink information as all links are inActive\n{rest}"
    found = judged(Recorded(H100, topo=H100_TOPO, links=broken), tmp_path)
    assert found["NVLink"].what == "GPU 0: all links inactive"
    assert "fabricmanager" in found["NVLink"].fix


def test_boards_with_nvswitch_have_active_links_but_pcie_cards_without_a_bridge_do_not() -> None:
    def status(name: str) -> str:
        links = {0: (False, False), 1: (False, False)}
        facts = GpuFacts((Gpu(0, name), Gpu(1, name)), paths={(0, 1): "SYS"}, links=links)
        return {each.check: each.status for each in gpus.check(facts)}["NVLink"]

    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200", "NVIDIA A100-SXM4-40GB"):
        assert status(name) == "warn"
    for name in ("NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA RTX A6000", "NVIDIA A100 80GB PCIe"):
        assert status(name) == "ok"


def test_pairs_with_a_bridge_are_told_from_those_across_sockets(tmp_path: Path) -> None:
    topo = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\tSYS\tSYS\t0-15\t0
GPU1\tNV4\t X \tSYS\tSYS\t0-15\t0
GPU2\tSYS\tSYS\t X \tNV4\t16-31\t1
GPU3\tSYS\tSYS\tNV4\t X \t16-31\t1
"""
    row = "{0}, NVIDIA RTX A6000, GPU-{0}, Default, [N/A], 550.54.14, 8.6, 49140, 1, 16, 16, 0, 30, 0x0000000000000000"
    query = "\n".join(row.format(n) for n in range(4))
    assert judged(Recorded(query, topo=topo), tmp_path)["NVLink"].what == "NV4 between 2 pairs, SYS between 4 pairs"
    assert judged(Recorded(query, topo=topo), tmp_path, visible="2,3")["NVLink"].what == "NV4 between 1 pair"
    assert judged(Recorded(query), tmp_path)["NVLink"].what.startswith("unknown")


def test_gpus_with_mig_do_not_use_their_links() -> None:
    both = tuple(Gpu(n, "NVIDIA A100-SXM4-40GB", is_mig=True) for n in range(2))
    facts = GpuFacts(both, paths={(0, 1): "SYS"}, links={0: (False,), 1: (False,)})
    assert bad({each.check: each for each in gpus.check(facts)}) == {}


def test_only_visible_gpus_are_judged(tmp_path: Path) -> None:
    assert bad(judged(Recorded(RTX_4090), tmp_path, visible="0")) == {}
    assert bad(judged(Recorded(RTX_4090), tmp_path, visible="GPU-7c2d4e6f")) == {"PCIe": "warn"}
    hidden = judged(Recorded(RTX_4090), tmp_path, visible="")
    assert bad(hidden) == {"GPUs": "warn"} and "CUDA_VISIBLE_DEVICES" in hidden["GPUs"].what


def test_a_machine_without_gpu_and_driver_is_fine(tmp_path: Path) -> None:
    found = judged(Recorded(UNKNOWN_COMMAND), tmp_path)
    assert found["GPUs"] == Finding("GPUs", "ok", "no GPU: training uses the CPU")
    # The package of nvidia-smi may be installed on a login node.
    assert judged(Recorded(Answer(9, NO_COMMUNICATION)), tmp_path)["GPUs"].status == "ok"


@pytest.mark.parametrize(
    ("answer", "fix"),
    [
        (Answer(18, MISMATCH), "reboot"),
        (Answer(9, NO_COMMUNICATION), "modprobe nvidia"),
        (Answer(255, "Failed to initialize NVML: Unknown Error\n"), "restart the container"),
        (Answer(TIMED_OUT, "nvidia-smi did not answer within 5 s"), "dmesg"),
        (Answer(255, "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.\n"), "dmesg"),
    ],
)
def test_nvidia_smi_that_fails_on_a_machine_with_gpus_is_a_failure(tmp_path: Path, answer: Answer, fix: str) -> None:
    found = judged(Recorded(answer), machine(tmp_path, driver=True, hardware=True))
    assert bad(found) == {"GPUs": "fail"}
    assert answer.output.splitlines()[0] in found["GPUs"].what and fix in found["GPUs"].fix


def test_a_gpu_without_driver_or_without_access_is_a_warning(tmp_path: Path) -> None:
    without_driver = judged(Recorded(UNKNOWN_COMMAND), machine(tmp_path / "a", hardware=True))["GPUs"]
    assert (without_driver.status, without_driver.fix) == ("warn", "install the NVIDIA driver, then reboot")
    for answer in (UNKNOWN_COMMAND, Answer(6, "No devices were found\n")):
        root = machine(tmp_path / str(answer.status), driver=True, hardware=True)
        without_access = judged(Recorded(answer), root)["GPUs"]
        assert without_access.status == "warn" and "--gpus all" in without_access.fix


def test_amd_gpus_are_mentioned(tmp_path: Path) -> None:
    (tmp_path / "rocm-smi").touch(mode=0o755)
    facts = gpus.read(Recorded(UNKNOWN_COMMAND), tmp_path, {"PATH": str(tmp_path)})
    assert [(each.check, each.status) for each in gpus.check(facts)] == [("AMD GPUs", "ok")]


def command(folder: Path, script: str) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_command_that_hangs_is_given_up_with_everything_it_started(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        answer = gpus.run([command(tmp_path, f"exec 3> {pipe}; sleep 600 & sleep 600")], seconds=0.3)
        assert answer.status == TIMED_OUT and "did not answer within 0.3 s" in answer.output
        end = time.monotonic() + 30
        while is_held(reading):
            assert time.monotonic() < end, "a process was left behind"
    finally:
        os.close(reading)


def is_held(pipe: int) -> bool:
    """Whether a process holds the other end."""
    try:
        os.read(pipe, 1)
    except BlockingIOError:
        return True
    return False


def test_a_missing_command_and_one_that_fails_are_answers(tmp_path: Path) -> None:
    assert gpus.run([str(tmp_path / "nvidia-smi")]).status == NOT_FOUND
    (tmp_path / "not-executable").touch()
    assert gpus.run([str(tmp_path / "not-executable")]).status == NOT_FOUND
    assert gpus.run([command(tmp_path, "echo out; echo error >&2; exit 18")]) == Answer(18, "out\nerror\n")


def test_a_real_command_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(tmp_path, f"printf '{MISMATCH}'; exit 18".replace("\n", "\\n"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    facts = gpus.read(root=machine(tmp_path / "root", driver=True))
    assert facts.failure == Answer(18, MISMATCH)
