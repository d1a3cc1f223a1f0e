"""Checks that Python, torch, the NVIDIA driver, NCCL and cuDNN fit together.

torch is imported, but CUDA is not initialized: that fails exactly where the driver does not match, and does not survive
a fork. Functions of torch that do so are called in a forked process. What has to be known about the GPUs comes from
nvidia-smi.
"""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline import __version__
from paceline.runtime.processes import call_in_child
from paceline.tools.doctor import gpus as nvidia
from paceline.tools.doctor.finding import Finding, graded
from paceline.tools.doctor.gpus import Gpu

_PYTHON, _TORCH = (3, 11), (2, 11)
# Oldest driver by major version of CUDA: docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
_DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
_CUDA_13 = (7, 5)  # the oldest compute capability that it supports


@dataclass(frozen=True)
class SoftwareFacts:
    """Versions; empty: there is none."""

    python: str
    torch: str = ""
    torch_error: str = ""  # why it cannot be imported
    cuda: str = ""  # that torch was built for
    rocm: str = ""
    architectures: tuple[str, ...] = ()  # that torch has kernels for: sm_90, compute_120
    nccl: str = ""  # that torch was built with
    loaded_nccl: str = ""  # by the dynamic linker, which LD_LIBRARY_PATH and LD_PRELOAD influence
    nccl_path: str = ""
    cudnn: str = ""
    cudnn_error: str = ""
    driver: str = ""  # kernel module
    nvml: str = ""  # library of the driver, if it does not match the kernel module
    driver_cuda: str = ""  # newest CUDA that the driver supports


def read(run: nvidia.Run = nvidia.run, root: Path = Path("/")) -> SoftwareFacts:
    output = run(["nvidia-smi"]).output
    module = root / "proc/driver/nvidia/version"
    is_mismatch = "Driver/library version mismatch" in output
    return replace(
        _read_torch(SoftwareFacts(platform.python_version())),
        driver=_first(r"Kernel Module.*? (\d+\.[\d.]+)", module.read_text() if module.exists() else ""),
        nvml=(_first(r"NVML library version: ([\d.]+)", output) or "unknown") if is_mismatch else "",
        driver_cuda=_first(r"CUDA (?:UMD )?Version: ([\d.]+)", output),  # UMD: since driver 610
    )


def _read_torch(facts: SoftwareFacts) -> SoftwareFacts:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
        return replace(facts, torch_error=str(error).partition("\n")[0])
    facts = replace(facts, torch=torch.__version__, cuda=torch.version.cuda or "", rocm=torch.version.hip or "")
    if not facts.cuda:
        return facts
    path = _first(r"(/\S*libnccl\.so\S*)", Path("/proc/self/maps").read_text())
    cudnn = cudnn_error = ""
    try:
        cudnn = str(call_in_child(torch.backends.cudnn.version) or "")
    except RuntimeError as error:
        cudnn_error = str(error)
    return replace(
        facts,
        architectures=tuple((call_in_child(torch._C._cuda_getArchFlags) or "").split()),
        nccl=".".join(map(str, torch.cuda.nccl.version()[:3])) if hasattr(torch._C, "_nccl_version") else "",
        loaded_nccl=nccl_version(path) if path else "",
        nccl_path=path,
        cudnn=cudnn,
        cudnn_error=cudnn_error,
    )


def nccl_version(path: str) -> str:
    number = ctypes.c_int(0)
    try:
        ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    return f"{number.value // 10_000}.{number.value % 10_000 // 100}.{number.value % 100}"


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""


def check(gpus: Sequence[Gpu], facts: SoftwareFacts | None = None) -> list[Finding]:
    facts = facts or read()
    python = graded("Python", "fail" if _version(facts.python) < _PYTHON else "ok", facts.python)
    findings = [python, Finding("paceline", "ok", __version__), _torch(facts, gpus)]
    if gpus or facts.driver or facts.nvml:
        findings.append(_driver(facts, gpus))
    if gpus and facts.architectures:
        findings.append(_architectures(facts, gpus))
    if facts.nccl:
        findings.append(_nccl(facts))
    if facts.cudnn_error:
        findings.append(graded("cuDNN", "fail", facts.cudnn_error))
    elif facts.cudnn:
        findings.append(Finding("cuDNN", "ok", facts.cudnn))
    return findings


def _version(text: str) -> tuple[int, ...]:
    """Major and minor version."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def _torch(facts: SoftwareFacts, gpus: Sequence[Gpu]) -> Finding:
    build = f"CUDA {facts.cuda}" if facts.cuda else f"ROCm {facts.rocm}" if facts.rocm else "CPU only"
    what = f"{facts.torch} ({build})"
    if not facts.torch:
        return Finding("torch", "fail", f"cannot be imported: {facts.torch_error}", fix=_install(gpus))
    if _version(facts.torch) < _TORCH:
        return Finding("torch", "fail", what, "paceline requires torch 2.11", _install(gpus))
    if gpus and not facts.cuda:
        return Finding("torch", "fail", what, f"it cannot use the NVIDIA GPUs ({gpus[0].name})", _install(gpus))
    return Finding("torch", "ok", what)


def _install(gpus: Sequence[Gpu]) -> str:
    """The command that installs a build of torch for these GPUs and their driver."""
    command = "pip install --upgrade --force-reinstall 'torch>=2.11'"
    if not gpus:
        return command
    is_new = all(gpu.capability >= _CUDA_13 and _version(gpu.driver) >= _DRIVERS[13] for gpu in gpus)
    return f"{command} --index-url https://download.pytorch.org/whl/{'cu130' if is_new else 'cu126'}"


def _driver(facts: SoftwareFacts, gpus: Sequence[Gpu]) -> Finding:
    if facts.nvml:
        what = f"kernel module {facts.driver or 'unknown'}, library {facts.nvml}"
        return graded("NVIDIA driver", "fail", what)
    driver = next((gpu.driver for gpu in gpus if gpu.driver), facts.driver)
    what = driver + (f", for CUDA up to {facts.driver_cuda}" if facts.driver_cuda else "")
    major = _version(facts.cuda)[:1]
    oldest: tuple[int, ...] = _DRIVERS.get(major[0], ()) if major else ()
    is_old = _version(driver) < oldest
    if facts.driver_cuda:  # of cuda-compat, if that is installed: with it, an older driver runs a newer CUDA
        is_old = _version(facts.driver_cuda)[:1] < major
    if not is_old:
        return Finding("NVIDIA driver", "ok", what)
    least = f", which requires driver {'.'.join(map(str, oldest))}" if oldest else ""
    why = f"too old: torch was built for CUDA {facts.cuda}{least}"
    return Finding("NVIDIA driver", "fail", what, why, f"update the driver, or {_install(gpus)}")


def _architectures(facts: SoftwareFacts, gpus: Sequence[Gpu]) -> Finding:
    without = [gpu for gpu in gpus if gpu.capability and not _has_kernels(facts.architectures, gpu.capability)]
    built = f"torch was built for {', '.join(facts.architectures)}"
    if not without:
        return Finding("GPU architecture", "ok", built)
    what = ", ".join(f"GPU {gpu.index} ({gpu.name}): sm_{''.join(map(str, gpu.capability))}" for gpu in without)
    return Finding("GPU architecture", "fail", what, f"{built}: no kernel image is available", _install(without))


def _has_kernels(architectures: Sequence[str], capability: tuple[int, ...]) -> bool:
    """Code runs on later minor versions (sm_86 on 8.9), except for variants (sm_90a); PTX (compute_90) on all later."""
    for kind, digits, variant in re.findall(r"(sm|compute)_(\d+)([a-z]?)", " ".join(architectures)):
        own = (int(digits[:-1]), int(digits[-1]))
        if own == capability or (not variant and own <= capability and (kind == "compute" or own[0] == capability[0])):
            return True
    return False


def _nccl(facts: SoftwareFacts) -> Finding:
    if facts.loaded_nccl in ("", facts.nccl):
        return Finding("NCCL", "ok", facts.nccl)
    what = f"{facts.loaded_nccl} is loaded ({facts.nccl_path}), but torch was built with {facts.nccl}"
    return graded("NCCL", "warn", what)
