"""Versions that do not fit together: this machine's own torch, a CUDA build that stands in for it, recorded drivers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paceline.tools.doctor import software
from paceline.tools.doctor.finding import Finding
from paceline.tools.doctor.gpus import NOT_FOUND, Answer, Gpu
from paceline.tools.doctor.software import SoftwareFacts

HEAD = """\
Tue Mar 10 12:00:00 2026       
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: 13.0     |
+-----------------------------------------+------------------------+----------------------+
"""  # noqa: W291
NEW_HEAD = "| NVIDIA-SMI 610.57.04              KMD Version: 610.57.04     CUDA UMD Version: 13.3     |\n"
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.126\n"
MODULE = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.119.02  Thu Apr  3 01:14:19 UTC 2025\n"
    "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
)
OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)\n"

H100 = Gpu(0, "NVIDIA H100 80GB HBM3", driver="580.95.05", capability=(9, 0))
HEALTHY = SoftwareFacts(
    "3.12.3", "2.11.0+cu130", cuda="13.0", driver="580.95.05", driver_cuda="13.0",
    architectures=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
    nccl="2.28.9", loaded_nccl="2.28.9", nccl_path="/opt/lib/libnccl.so.2", cudnn="91501",
)  # fmt: skip


def judged(facts: SoftwareFacts, *gpus: Gpu) -> dict[str, Finding]:
    return {each.check: each for each in software.check(gpus, facts)}


def bad(findings: dict[str, Finding]) -> dict[str, str]:
    return {name: each.status for name, each in findings.items() if each.status != "ok"}


def smi(output: str, status: int = 0) -> software.nvidia.Run:
    def run(command: Sequence[str]) -> Answer:
        assert command == ["nvidia-smi"]
        return Answer(status, output)

    return run


def root_with(tmp_path: Path, module: str) -> Path:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(module)
    return tmp_path


def test_versions_that_fit_are_all_listed() -> None:
    found = judged(HEALTHY, H100)
    assert bad(found) == {}
    assert list(found) == ["Python", "paceline", "torch", "NVIDIA driver", "GPU architecture", "NCCL", "cuDNN"]
    assert found["torch"].what == "2.11.0+cu130 (CUDA 13.0)"
    assert found["NVIDIA driver"].what == "580.95.05, for CUDA up to 13.0"


def test_this_machine_is_fine() -> None:
    found = {each.check: each for each in software.check([])}
    assert bad(found) == {}
    assert torch.__version__ in found["torch"].what and not torch.cuda.is_initialized()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch can use GPUs")
def test_this_torch_without_cuda_on_a_machine_with_gpus_is_a_failure_with_the_command() -> None:
    found = {each.check: each for each in software.check([H100])}["torch"]
    assert found.status == "fail" and "CPU only" in found.what
    assert found.fix.startswith("pip install") and found.fix.endswith("/whl/cu130")


def test_the_command_installs_a_build_that_fits_the_driver_and_the_gpu() -> None:
    without = replace(HEALTHY, torch="2.11.0+cpu", cuda="", architectures=(), nccl="", cudnn="")
    old_driver, old_gpu = replace(H100, driver="535.183.01"), replace(H100, capability=(7, 0))
    for gpu, index in ((H100, "cu130"), (old_driver, "cu126"), (old_gpu, "cu126")):
        assert judged(without, gpu)["torch"].fix.endswith(index)
    assert "--index-url" not in judged(replace(without, torch="", torch_error="no torch"))["torch"].fix


def test_rocm_does_not_use_nvidia_gpus() -> None:
    rocm = replace(HEALTHY, torch="2.11.0+rocm7.0", cuda="", rocm="7.0.51831", architectures=(), nccl="", cudnn="")
    assert judged(rocm)["torch"] == Finding("torch", "ok", "2.11.0+rocm7.0 (ROCm 7.0.51831)")
    assert bad(judged(rocm, H100)) == {"torch": "fail"}


def test_torch_before_2_11_is_a_failure() -> None:
    for version in ("2.10.1", "2.9.0+cu128", "1.13.1"):
        assert bad(judged(replace(HEALTHY, torch=version), H100)) == {"torch": "fail"}
    for version in ("2.11.0", "2.12.0.dev20260101", "3.0.0"):
        assert bad(judged(replace(HEALTHY, torch=version), H100)) == {}


def test_python_before_3_11_is_a_failure() -> None:
    assert bad(judged(replace(HEALTHY, python="3.10.14"), H100)) == {"Python": "fail"}


@pytest.mark.parametrize(
    ("driver", "cuda", "status"),
    [
        ("450.80.02", "11.8", "ok"), ("450.51.06", "11.8", "fail"),
        ("525.60.13", "12.8", "ok"), ("520.61.05", "12.6", "fail"), ("580.95.05", "12.6", "ok"),
        ("580.65.06", "13.0", "ok"), ("575.57.08", "13.0", "fail"), ("580.65.06", "14.0", "ok"),
    ],
)  # fmt: skip
def test_a_driver_older_than_the_cuda_of_torch_is_a_failure(driver: str, cuda: str, status: str) -> None:
    found = judged(replace(HEALTHY, cuda=cuda, driver_cuda=""), replace(H100, driver=driver))["NVIDIA driver"]
    assert found.status == status
    assert status == "ok" or (f"CUDA {cuda}" in found.why and "pip install" in found.fix)


def test_the_cuda_version_that_the_driver_reports_decides() -> None:
    """It is that of the cuda-compat libraries, if they are installed, and known for versions yet to come."""
    old = replace(H100, driver="535.183.01")
    assert bad(judged(replace(HEALTHY, driver_cuda="12.2"), old)) == {"NVIDIA driver": "fail"}
    assert bad(judged(replace(HEALTHY, driver_cuda="13.0"), old)) == {}
    assert bad(judged(replace(HEALTHY, cuda="14.1", driver_cuda="13.3"), H100)) == {"NVIDIA driver": "fail"}


@pytest.mark.parametrize(
    ("architectures", "capability", "status"),
    [
        ("sm_75 sm_80 sm_86 sm_90", (8, 9), "ok"),  # code for 8.6 runs on 8.9
        ("sm_75 sm_80 sm_86 sm_90", (7, 0), "fail"),
        ("sm_75 sm_80 sm_86 sm_90", (12, 0), "fail"),
        ("sm_75 sm_80 sm_90 compute_90", (12, 0), "ok"),  # compiled by the driver
        ("sm_75 sm_90a", (9, 0), "ok"),
        ("sm_75 sm_100a", (10, 3), "fail"),
        ("sm_100 sm_120", (10, 3), "ok"),
        ("sm_86", (8, 0), "fail"),
    ],
)
def test_a_gpu_that_torch_has_no_kernels_for_is_a_failure(
    architectures: str, capability: tuple[int, ...], status: str
) -> None:
    facts = replace(HEALTHY, architectures=tuple(architectures.split()))
    found = judged(facts, replace(H100, capability=capability))["GPU architecture"]
    assert found.status == status
    assert status == "ok" or f"GPU 0 (NVIDIA H100 80GB HBM3): sm_{''.join(map(str, capability))}" in found.what


def test_another_nccl_than_that_of_torch_is_a_warning_with_its_path() -> None:
    found = judged(replace(HEALTHY, loaded_nccl="2.19.3", nccl_path="/usr/lib/libnccl.so.2"), H100)
    assert bad(found) == {"NCCL": "warn"}
    assert found["NCCL"].what == "2.19.3 is loaded (/usr/lib/libnccl.so.2), but torch was built with 2.28.9"
    assert judged(replace(HEALTHY, loaded_nccl=""), H100)["NCCL"].what == "2.28.9"


def test_a_library_that_does_not_match_the_kernel_module_is_a_failure(tmp_path: Path) -> None:
    facts = software.read(smi(MISMATCH, 18), root_with(tmp_path, MODULE))
    found = {each.check: each for each in software.check([], facts)}["NVIDIA driver"]
    assert (found.status, found.what) == ("fail", "kernel module 580.119.02, library 580.126")
    assert found.fix == "sudo reboot"


@pytest.mark.parametrize(
    ("module", "head", "driver", "cuda"),
    [(MODULE, HEAD, "580.119.02", "13.0"), (OPEN_MODULE, NEW_HEAD, "580.95.05", "13.3")],
)
def test_versions_of_the_driver_are_read(tmp_path: Path, module: str, head: str, driver: str, cuda: str) -> None:
    facts = software.read(smi(head), root_with(tmp_path, module))
    assert (facts.driver, facts.driver_cuda, facts.nvml) == (driver, cuda, "")


def test_a_torch_that_cannot_be_imported_is_a_failure_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    facts = software.read(smi("", NOT_FOUND), tmp_path)
    found = {each.check: each for each in software.check([], facts)}["torch"]
    assert found.status == "fail" and "libcudart.so.13" in found.what


def cuda_torch(**changes: object) -> SimpleNamespace:
    """A CUDA build of torch, without the functions that look for devices: they initialize CUDA."""
    known = {
        "__version__": "2.11.0+cu130",
        "version": SimpleNamespace(cuda="13.0", hip=None),
        "_C": SimpleNamespace(_cuda_getArchFlags=lambda: "sm_75 sm_90 compute_90", _nccl_version=None),
        "cuda": SimpleNamespace(nccl=SimpleNamespace(version=lambda: (2, 28, 9))),
        "backends": SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 91501)),
    }
    return SimpleNamespace(**known | changes)


def test_a_cuda_build_is_read_without_initializing_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", cuda_torch())
    facts = software.read(smi(HEAD), tmp_path)
    assert (facts.torch, facts.cuda, facts.nccl, facts.cudnn) == ("2.11.0+cu130", "13.0", "2.28.9", "91501")
    assert facts.architectures == ("sm_75", "sm_90", "compute_90")


def test_another_cudnn_than_that_of_torch_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version() -> int:
        raise RuntimeError("cuDNN version incompatibility: PyTorch was compiled against (9, 15, 1)")

    cudnn = SimpleNamespace(cudnn=SimpleNamespace(version=version))
    monkeypatch.setitem(sys.modules, "torch", cuda_torch(backends=cudnn))
    found = bad({each.check: each for each in software.check([], software.read(smi(HEAD), tmp_path))})
    assert found == {"cuDNN": "fail"}


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_nccl_that_the_linker_loads_is_asked_for_its_version(tmp_path: Path) -> None:
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text("int ncclGetVersion(int* version) { *version = 21903; return 0; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    assert software.nccl_version(str(source)) == ""
    code = """
import sys
from types import SimpleNamespace as Space
sys.modules["torch"] = Space(
    __version__="2.11.0", version=Space(cuda="13.0", hip=None), _C=Space(_cuda_getArchFlags=str, _nccl_version=None),
    cuda=Space(nccl=Space(version=lambda: (2, 28, 9))), backends=Space(cudnn=Space(version=int)),
)
from paceline.tools.doctor import software
for finding in software.check([]):
    if finding.check == "NCCL":
        print(finding.status, finding.what)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env={**os.environ, "LD_PRELOAD": str(library)},
    )  # fmt: skip
    assert done.stdout == f"warn 2.19.3 is loaded ({library}), but torch was built with 2.28.9\n", done.stderr
