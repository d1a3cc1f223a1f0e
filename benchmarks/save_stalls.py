"""How long training stalls for each of many scheduled saves, and why.

    OMP_NUM_THREADS=1 python benchmarks/save_stalls.py
    python benchmarks/save_stalls.py --gpu --saves 100

Steps are timed between the ends of their optimizer steps: on a GPU by events on its stream, so that nothing waits
which would not wait in training. The stall of a save is how much longer the step after it took than the median step
without a save; of the first save, which plans and allocates, all steps before it as well. For each stall above the
limit, the time that the training thread spent in each phase of the save is printed.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

import torch
from checkpoint_cost import Batches, model_of
from torch import nn

import paceline
from paceline.checkpoint.host_copy import HostCopy, HostMemory
from paceline.checkpoint.state import TrainingState
from paceline.checkpoint.writer import Writer
from paceline.train.checkpointing.run_handle import RunHandle
from paceline.train.checkpointing.saver import Saver
from paceline.train.recorder import Recorder

PHASES = {
    "log point": (Recorder, "flush"),
    "flush records": (RunHandle, "before_save"),
    "capture": (TrainingState, "capture"),
    "describe": (Saver, "_describe"),
    "plan": (Writer, "_plan"),
    "allocate": (HostCopy, "__init__"),
    "enqueue copies": (HostCopy, "begin"),
    "wait for the copy": (HostCopy, "wait_for_copy"),
    "wait for the previous write": (Saver, "finish"),
    "save, all of it": (Saver, "save"),
}


class Stalls:
    """Times every step, and the phases of saves on the training thread."""

    def __init__(self, device: torch.device, saves: int, seconds: float) -> None:
        self._device, self._thread = device, threading.get_ident()
        self._saves, self._until = saves, time.perf_counter() + seconds
        self.step = 0
        self.phases: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.ends: list[Any] = []
        self.saved: list[int] = []
        self.writing: dict[int, float] = {}
        self.trainer: paceline.Trainer
        self.allocated = 0.0  # seconds, on a thread
        HostMemory.prepare = self._timed_allocation(HostMemory.prepare)  # type: ignore[method-assign]
        for label, (owner, name) in PHASES.items():
            setattr(owner, name, self._timed(label, getattr(owner, name)))

    def _timed(self, label: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                if threading.get_ident() == self._thread:
                    self.phases[self.step][label] += time.perf_counter() - began

        return timed

    def _timed_allocation(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> None:
            began = time.perf_counter()
            call(*args)
            self.allocated = time.perf_counter() - began

        return timed

    def on_step(self, record: Any) -> None:
        self.step = record.step
        if len(self.saved) >= self._saves or time.perf_counter() > self._until:
            self.trainer.stop()
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.ends.append(event)
        else:
            self.ends.append(time.perf_counter())

    def on_save(self, record: Any) -> None:
        self.saved.append(record.step)
        cost = self.trainer._saver.last_cost
        self.writing[record.step] = 0.0 if cost is None else cost.seconds["all"]

    def durations(self) -> list[float]:
        """Seconds of steps 2, 3, …"""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self.ends, self.ends[1:], strict=False)]
        return [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def report(stalls: Stalls, every: int, limit: float) -> None:
    took = dict(enumerate(stalls.durations(), start=2))
    begun = sorted(step for step, phases in stalls.phases.items() if "enqueue copies" in phases)
    after = {step + 1 for step in begun}
    plain = [seconds for step, seconds in took.items() if step not in after and step > 5]
    usual = median(plain)
    excess = {step: took[step + 1] - usual for step in begun if step + 1 in took}
    values = list(excess.values())
    late = sum(step % every != 0 for step in begun)
    print(f"{len(begun)} saves, {late} of them late, the first of step {begun[0]}; ", end="")
    print(f"a step takes {usual * 1e3:.1f} ms; their memory was allocated within {stalls.allocated:.2f} s")
    named = [(0.5, "median"), (0.99, "99th percentile"), (1.0, "longest")]
    shown = ", ".join(f"{name} {percentile(values, share) * 1e3:.1f} ms" for share, name in named)
    print(f"  stall: {shown}; of the first save {values[0] * 1e3:.1f} ms")
    early = [(took[step] - usual, step) for step in range(3, begun[0] + 1)]
    print(f"  longest excess before the first save: {max(early)[0] * 1e3:.1f} ms in step {max(early)[1]}")
    others = [(seconds - usual, step) for step, seconds in took.items() if step > begun[0] and step not in after]
    print(f"  other steps: {sum(s for s, _ in others) / len(others) / usual:+.2%} in the mean, ", end="")
    print(
        f"99th percentile {percentile([s for s, _ in others], 0.99) * 1e3:+.1f} ms, longest {max(others)[0] * 1e3:+.1f}"
    )
    writing = list(stalls.writing.values())
    print(
        f"  a write takes {median(writing):.2f} s (up to {max(writing):.2f}); saves are due every {every * usual:.2f} s"
    )
    phases = {label: [stalls.phases[step].get(label, 0.0) * 1e3 for step in begun] for label in PHASES}
    print("  median of the phases, ms: " + ", ".join(f"{name} {median(each):.2f}" for name, each in phases.items()))
    for step in [step for step in begun if excess.get(step, 0.0) > limit][:12]:
        spent = {label: seconds for label, seconds in stalls.phases[step].items() if seconds > 5e-4}
        shown = ", ".join(f"{label} {seconds * 1e3:.1f}" for label, seconds in spent.items())
        print(f"  step {step}: {excess[step] * 1e3:.1f} ms ({shown})")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", action="store_true", help="3 GB of state and steps of 120 ms on an H200")
    parser.add_argument("--megabytes", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--rows", type=int, help="samples per step, which determines the step time")
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--every", type=int, help="steps between saves")
    parser.add_argument("--seconds", type=float, default=600, help="stop after so many")
    parser.add_argument("--limit", type=float, default=10.0, help="milliseconds; longer stalls are explained")
    parser.add_argument("--folder", help="folder on the disk to write to; default: a temporary folder")
    options = parser.parse_args()
    device = torch.device("cuda" if options.gpu else "cpu")
    defaults = (3000, 4096, 4096, 40) if options.gpu else (200, 1024, 64, 8)
    given = (options.megabytes, options.width, options.rows, options.every)
    megabytes, width, rows, every = (value or default for value, default in zip(given, defaults, strict=True))
    torch.manual_seed(0)
    stalls = Stalls(device, options.saves, options.seconds)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        trainer = paceline.Trainer(
            model_of(megabytes, width), {"name": "adamw", "lr": 1e-4}, criterion=nn.MSELoss(), batch=rows, quiet=True,
            run=str(Path(folder) / "run"), save_every=every, save_last=False, keep=1, callbacks=[stalls], device=device,
            log_every=10_000,
        )  # fmt: skip
        stalls.trainer = trainer
        batch = torch.randn(rows, width, device=device)
        trainer.train(Batches(batch), max_steps=3 * every * options.saves)
        print(f"{megabytes} MB of state on {device}, every {every} steps, torch {torch.__version__}")
        report(stalls, every, options.limit / 1e3)


if __name__ == "__main__":
    main()
