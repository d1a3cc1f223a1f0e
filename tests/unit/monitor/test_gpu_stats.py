from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import nodes
import paceline
from paceline.monitor import gpu_stats
from paceline.monitor.gpu_stats import NUMBERS, THROTTLED, WINDOW, GpuMonitor, GpuStats, Nvml

INIT, BY_UUID, ON_BUS = "nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetHandleByPciBusId"


class NVMLError(Exception):
    pass


class Library:
    """pynvml, with one GPU. Functions that are not given are unknown to its driver."""

    NVMLError = NVMLError

    def __init__(self, **values: int) -> None:
        self.values = {
            "nvmlDeviceGetUtilizationRates": 97,
            "nvmlDeviceGetTemperature": 64,
            "nvmlDeviceGetClockInfo": 990,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1 | 0x2,
            "nvmlDeviceGetTotalEccErrors": 3,
            **values,
        }

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            return 0  # a constant

        def call(handle: Any, *arguments: Any) -> Any:
            if self.values.get(name, -1) < 0:
                raise NVMLError(name)
            value = self.values[name]
            return SimpleNamespace(gpu=value) if name == "nvmlDeviceGetUtilizationRates" else value

        return call


def watched(*libraries: Library, samples: int = THROTTLED) -> list[str]:
    """What is said about the GPUs of these ranks, at three log points."""
    said: list[str] = []
    watch, ranks = GpuMonitor(len(libraries), said.append), [GpuStats(Nvml(each, None)) for each in libraries]
    for _ in range(3):
        for rank in ranks:
            for _ in range(samples):
                rank.sample()
        watch.log_point([number for rank in ranks for number in rank.numbers()])
    return said


def test_a_sample_has_what_the_driver_provides() -> None:
    assert Nvml(Library(nvmlDeviceGetTotalEccErrors=-1, nvmlDeviceGetPowerUsage=612_000), None).sample() == {
        "utilization": 0.97, "temperature": 64, "clock": 990, "max_clock": 1980, "power": 612.0, "throttled": [],
    }  # fmt: skip


def test_a_gpu_that_throttles_is_named_once_and_normal_reasons_are_not() -> None:
    power_cap = Library(nvmlDeviceGetCurrentClocksThrottleReasons=0x4)
    hot = Library(nvmlDeviceGetCurrentClocksThrottleReasons=0x4 | 0x40, nvmlDeviceGetTemperature=91)
    assert watched(Library(), power_cap) == []
    [said] = watched(Library(), hot)
    assert said.startswith("the GPU of rank 1 throttles: it is too hot (91 °C, SM clock at 50% of its maximum)")
    [said] = watched(Library(nvmlDeviceGetCurrentClocksThrottleReasons=0x80))
    assert said.startswith("the GPU of rank 0 throttles: power")


def test_heat_is_one_message_and_a_moment_of_it_none() -> None:
    library = Library(nvmlDeviceGetCurrentClocksThrottleReasons=0x8 | 0x40)
    [said] = watched(library)
    assert "too hot" in said
    assert watched(library, samples=1) == []


def test_only_new_memory_errors_count() -> None:
    library, said = Library(), list[str]()
    stats, watch = GpuStats(Nvml(library, None)), GpuMonitor(1, said.append)
    stats.sample()
    watch.log_point(stats.numbers())
    assert said == []
    library.values["nvmlDeviceGetTotalEccErrors"] += 1
    stats.sample()
    watch.log_point(stats.numbers())
    assert len(said) == 1 and "memory (ECC) errors" in said[0]


def test_an_idle_gpu_is_named_after_a_minute() -> None:
    idle = Library(nvmlDeviceGetUtilizationRates=4)
    assert watched(Library(), idle, samples=WINDOW // 2 - 1) == []
    assert watched(Library(), idle, samples=WINDOW) == ["the GPU of rank 1 idles 96% of the time; others do not"]
    assert watched(idle, idle, samples=WINDOW)[0].startswith("all GPUs idle 96% of the time")
    assert watched(idle, samples=WINDOW)[0].startswith("the GPU idles 96% of the time")


def test_no_gpu_is_singled_out_while_another_one_may_turn_out_to_idle_as_well() -> None:
    said: list[str] = []
    idle = [8.0, 0.04, 60.0, 1.0]
    watch = GpuMonitor(2, said.append)
    watch.log_point([0.0, 0.04, 60.0, 1.0, *idle])  # rank 0 has one sample less
    assert said == []
    watch.log_point(idle * 2)
    assert len(said) == 1 and said[0].startswith("all GPUs idle")


def test_samples_are_taken_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_stats, "SECONDS", 0.001)
    stats = GpuStats(Nvml(Library(), None))
    assert stats.numbers() == [0.0] * NUMBERS
    stats.start()
    nodes.eventually(lambda: stats.last)
    stats.stop()
    assert stats.last["clock"] == 990 and stats.numbers()[2:] == [64.0, 0.5]


def test_a_gpu_without_work_before_the_first_log_point_does_not_idle() -> None:
    said: list[str] = []
    library = Library(nvmlDeviceGetUtilizationRates=0)
    stats, watch = GpuStats(Nvml(library, None)), GpuMonitor(1, said.append)
    for utilization in (0, 100):  # while a model is compiled, and then
        library.values["nvmlDeviceGetUtilizationRates"] = utilization
        for _ in range(WINDOW - utilization // 4):
            stats.sample()
        watch.log_point(stats.numbers())
    assert said == []


def opened(monkeypatch: pytest.MonkeyPatch, *works: str) -> Nvml | None:
    """With a pynvml of which only these functions do not fail."""

    def function(name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            if name not in works:
                raise NVMLError(name)

        return call

    facts = SimpleNamespace(uuid="1-2", pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    functions = {name: function(name) for name in (INIT, BY_UUID, ON_BUS)}
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, **functions))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    return Nvml.open(torch.device("cuda", 0))


def test_a_device_is_found_by_its_uuid_or_on_its_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened(monkeypatch, INIT, BY_UUID) is not None
    assert opened(monkeypatch, INIT, ON_BUS) is not None
    assert opened(monkeypatch, INIT) is None
    assert opened(monkeypatch) is None  # no driver


def test_there_may_be_no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert Nvml.open(torch.device("cuda", 0)) is None


def test_without_a_gpu_nvml_is_not_looked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Nvml, "open", lambda device: pytest.fail("looked for NVML"))
    trainer = paceline.Trainer(
        torch.nn.Linear(4, 1), "sgd", criterion=torch.nn.MSELoss(), device="cpu", batch=4, run=False, quiet=True
    )
    trainer.train([(torch.ones(4), torch.ones(1))] * 8, max_steps=4)
    assert "paceline-gpu" not in {thread.name for thread in threading.enumerate()}
    assert "GPU" not in caplog.text
