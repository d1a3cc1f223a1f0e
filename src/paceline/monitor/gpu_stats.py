"""What NVML says about the GPU of a rank, once a second, from a thread: its calls release the GIL and use no stream.

    {"utilization": 0.97, "memory": …, "temperature": 64, "clock": 1755, "max_clock": 1980, "power": 612.0,
     "throttled": ["power cap"], "ecc_errors": 0}

What a container, MIG or a driver does not provide is absent.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

import torch

SECONDS = 1.0  # between two samples
WINDOW = 60  # samples: a GPU is idle if it was for so long
THROTTLED = 5  # samples of a window, at least: a change of clocks looks like a slowdown for a moment
NUMBERS = 4  # that a rank sends
_IDLE = 0.1  # mean utilization
# Other reasons are normal: no work (1), clocks set by an administrator (2), other GPUs (16), a display (256).
_REASONS = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat", 0x80: "power brake"}
_HOT, _BRAKED, _ECC, _IDLES = 1, 2, 4, 8  # flags that ranks send


_READ: dict[str, Callable[[Any, Any], Any]] = {  # each with pynvml and the handle of a GPU
    "utilization": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "memory": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "temperature": lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    "clock": lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "max_clock": lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
    "power": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    "throttled": lambda nvml, gpu: _reasons_in(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)),
    "ecc_errors": lambda nvml, gpu: nvml.nvmlDeviceGetTotalEccErrors(
        gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    ),
}


def _reasons_in(bits: int) -> list[str]:
    return sorted({name for bit, name in _REASONS.items() if bits & bit})


class Nvml:
    """One GPU."""

    def __init__(self, nvml: Any, gpu: Any) -> None:
        self._nvml, self._gpu = nvml, gpu

    @classmethod
    def open(cls, device: torch.device) -> Nvml | None:
        """None: there is no NVML, or it does not know the device."""
        try:
            nvml = import_module("pynvml")  # of nvidia-ml-py
        except ImportError:
            return None
        facts: Any = torch.cuda.get_device_properties(device)
        bus = f"{facts.pci_domain_id:08x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        with suppress(nvml.NVMLError):
            nvml.nvmlInit()
            # Not by number: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER do not change those of NVML.
            with suppress(nvml.NVMLError):
                return cls(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{facts.uuid}"))
            # The UUID of a MIG device is not that of its GPU.
            return cls(nvml, nvml.nvmlDeviceGetHandleByPciBusId(bus))
        return None

    def sample(self) -> dict[str, Any]:
        found = {}
        for name, read in _READ.items():
            with suppress(self._nvml.NVMLError):
                found[name] = read(self._nvml, self._gpu)
        return found


class GpuStats:
    """The samples of this rank's GPU."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self.last: dict[str, Any] = {}
        self._recent: deque[dict[str, Any]] = deque(maxlen=WINDOW)
        self._errors: int | None = None  # before training
        self._is_warm = False
        self._stopped: threading.Event | None = None  # None: no thread runs

    def start(self) -> None:
        if self._stopped is None:
            self._stopped, self._is_warm = threading.Event(), False
            threading.Thread(target=self._run, args=(self._stopped,), name="paceline-gpu", daemon=True).start()

    def stop(self) -> None:
        if self._stopped is not None:
            self._stopped.set()
            self._stopped = None

    def _run(self, stopped: threading.Event) -> None:
        while not stopped.wait(SECONDS):
            self.sample()

    def sample(self) -> None:
        self.last = found = self._nvml.sample()
        self._recent.append(found)
        if self._errors is None:
            self._errors = found.get("ecc_errors")

    def numbers(self) -> list[float]:
        """What this rank sends: flags, mean utilization, temperature, and the clock as a share of its maximum."""
        if not self._is_warm:  # at the first log point: the GPU had nothing to do while the model was compiled
            self._is_warm = True
            self._recent.clear()
        last, recent = self.last, list(self._recent)
        reasons = Counter(reason for sample in recent for reason in sample.get("throttled", ()))
        utilization = [sample["utilization"] for sample in recent if "utilization" in sample]
        used = sum(utilization) / len(utilization) if utilization else 0.0
        flags = 0
        if reasons["heat"] >= THROTTLED:  # which NVML also calls a hardware slowdown
            flags |= _HOT
        elif max(reasons["power brake"], reasons["hardware slowdown"]) >= THROTTLED:
            flags |= _BRAKED
        flags |= _ECC if last.get("ecc_errors", 0) > (self._errors or 0) else 0
        flags |= _IDLES if len(utilization) == WINDOW and used < _IDLE else 0
        share = last.get("clock", 0) / (last.get("max_clock") or 1)
        return [float(flags), used, float(last.get("temperature", 0)), share]


class _Gpu(NamedTuple):
    flags: float
    used: float
    temperature: float
    clock: float

    def has(self, flag: int) -> bool:
        return bool(int(self.flags) & flag)


class GpuMonitor:
    """Names GPUs that throttle, idle or have errors: each once."""

    def __init__(self, ranks: int, warn: Callable[[str], None]) -> None:
        self._ranks, self._warn = ranks, warn
        self._said: set[tuple[int, int]] = set()

    def log_point(self, numbers: Sequence[float]) -> None:
        """The numbers of all ranks."""
        gpus = [_Gpu(*numbers[rank * NUMBERS : (rank + 1) * NUMBERS]) for rank in range(self._ranks)]
        flagged = [(rank, gpu) for rank, gpu in enumerate(gpus) if gpu.flags]
        for rank, gpu in flagged:
            whose = f"the GPU of rank {rank}"
            clock = f"{gpu.temperature:.0f} °C, SM clock at {gpu.clock:.0%} of its maximum"
            self._say(gpu, rank, _HOT, f"{whose} throttles: it is too hot ({clock}); check its cooling")
            self._say(gpu, rank, _BRAKED, f"{whose} throttles: power or cooling of its node is insufficient ({clock})")
            self._say(gpu, rank, _ECC, f"{whose} has new uncorrectable memory (ECC) errors; results may be wrong")
        idle = [(rank, gpu) for rank, gpu in flagged if gpu.has(_IDLES)]
        if len(idle) < sum(gpu.used < _IDLE for gpu in gpus):
            return  # of some that may be idle as well, less than a minute is known
        if len(idle) == self._ranks:
            used = sum(gpu.used for gpu in gpus) / self._ranks
            whose = "the GPU idles" if self._ranks == 1 else "all GPUs idle"
            self._say(gpus[0], 0, _IDLES, f"{whose} {1 - used:.0%} of the time: steps are too small, or wait for data")
            return
        for rank, gpu in idle:
            self._say(gpu, rank, _IDLES, f"the GPU of rank {rank} idles {1 - gpu.used:.0%} of the time; others do not")

    def _say(self, gpu: _Gpu, rank: int, flag: int, text: str) -> None:
        if gpu.has(flag) and (rank, flag) not in self._said:
            self._said.add((rank, flag))
            self._warn(text)
