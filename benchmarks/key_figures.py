"""The key figures of the paceline on PYTHONPATH, as JSON: cost of a step, a launch, an import and a save.

    python benchmarks/key_figures.py loop | launch | import | checkpoint

`benchmarks/compare_commits.py` runs it for two commits alternately. It uses only the public API and the command line,
so that the same measurement works for commits with different module names.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

UNITS = {
    "step time": "µs",
    "step overhead": "µs",  # compared with the hand-written loop
    "Python calls per step": "calls",
    "launch to first all-reduce": "s",
    "import time": "ms",
    "imported modules": "modules",
    "checkpoint stall": "ms",
}
MODULES = "import sys; before = len(sys.modules); import paceline; print(len(sys.modules) - before)"


def loop(rounds: int = 15, steps: int = 100) -> dict[str, float]:
    """A tiny model, compared with a hand-written loop in the same process."""
    import overhead
    import torch

    torch.set_num_threads(1)
    measure = partial(
        overhead.microseconds_a_step, make_model=overhead.tiny_model, different=overhead.tiny_batches(), steps=steps
    )
    loops = {"raw": overhead.raw, "paceline": overhead.paceline_idle}
    times = overhead.interleaved({name: partial(measure, each) for name, each in loops.items()}, rounds)
    best = {name: min(values) for name, values in times.items()}  # the least disturbed round
    return {
        "step time": best["paceline"],
        "step overhead": best["paceline"] - best["raw"],
        "Python calls per step": overhead.calls_a_step(overhead.paceline_idle)[0],
    }


def launch() -> dict[str, float]:
    import start_time

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "reduce.py"
        script.write_text(start_time.SCRIPT)
        seconds = start_time.seconds_to_first_reduction(start_time.COMMANDS["paceline launch"], script)
    return {"launch to first all-reduce": seconds}


def imports(rounds: int = 5) -> dict[str, float]:
    import import_time

    milliseconds = 1000 * min(import_time.import_seconds() for _ in range(rounds))
    modules = subprocess.run([sys.executable, "-c", MODULES], capture_output=True, text=True, check=True).stdout
    return {"import time": milliseconds, "imported modules": float(modules)}


class Steps:
    """A callback that records when steps end, and waits for each checkpoint before the next one is due."""

    def __init__(self, checkpoints: Path, spacing: int) -> None:
        self.times: list[float] = []
        self._latest, self._spacing = checkpoints / "latest", spacing

    def on_step(self, record: Any) -> None:
        self.times.append(time.perf_counter())
        saved, place = divmod(record.step, self._spacing)
        if saved and place == self._spacing - 2:
            self._wait_for(f"step-{saved * self._spacing:06d}")

    def _wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 60
        while not self._latest.exists() or self._latest.read_text().strip() != name:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} was not committed within 60 s")
            time.sleep(0.005)
        os.sync()

    def stalls(self) -> list[float]:
        """Extra time of the step after a save compared with the median. The first save allocates and is excluded."""
        took = {
            number + 2: end - start for number, (start, end) in enumerate(zip(self.times, self.times[1:], strict=False))
        }
        usual = statistics.median(took[step] for step in took if step % self._spacing == self._spacing - 3)
        return [took[step] - usual for step in took if step % self._spacing == 1 and step > 2 * self._spacing]


class Repeated:
    """Repeats one batch: reading data is not measured."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._batch, self._batch


def checkpoint(
    saves: int = 6, layers: int = 8, width: int = 1024, rows: int = 32, spacing: int = 6
) -> dict[str, float]:
    """The delay of the optimizer step that follows a scheduled save, with 100 MB of weights and Adam's moments."""
    import torch

    import paceline

    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        steps = Steps(run / "checkpoints", spacing)
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        trainer = paceline.Trainer(
            model, {"name": "adamw", "lr": 1e-4}, criterion=torch.nn.MSELoss(), batch=rows, run=str(run), quiet=True,
            save_every=spacing, save_last=False, keep=1, callbacks=[steps], device="cpu", log_every=10_000,
        )  # fmt: skip
        trainer.train(Repeated(torch.randn(rows, width)), max_steps=spacing * (saves + 1) + 3)
    return {"checkpoint stall": 1000 * statistics.median(steps.stalls())}


GROUPS: dict[str, Callable[[], dict[str, float]]] = {
    "loop": loop,
    "launch": launch,
    "import": imports,
    "checkpoint": checkpoint,
}


if __name__ == "__main__":
    print(json.dumps(GROUPS[sys.argv[1]]()))
