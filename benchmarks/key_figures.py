"""The key figures of the paceline on PYTHONPATH, as JSON: cost of a step, a launch, an import and a save.

    python benchmarks/key_figures.py loop | data | optimizer | ddp | gpu | launch | import | checkpoint

`benchmarks/compare_commits.py` runs it for two commits alternately. It uses only the public API and the command line,
so that the same measurement works for commits with different module names. A step time is the median of single steps,
from forward to forward, which a preemption of some of them does not change, in the fastest of a few rounds.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

DATA = {  # name of a figure -> what data_paths.py calls it
    "iterable": "iterable of batches",
    "DataLoader of a stream": "DataLoader, IterableDataset",
    "DataLoader": "DataLoader, TensorDataset",
}
PATHS = (*DATA, "AdamW", "GPU")
UNITS = {
    "step time": "µs",
    "step overhead": "µs",  # compared with the hand-written loop
    "Python calls per step": "calls",
    **{f"step time, {path}": "µs" for path in (*PATHS, "DDP, weighted")},
    **{f"Python calls, {path}": "calls" for path in PATHS},
    "launch to first all-reduce": "s",
    "import time": "ms",
    "imported modules": "modules",
    "checkpoint stall": "ms",
}
# The least difference that counts in figures that may be close to zero or negative, in their unit.
SMALLEST = {"step overhead": 3.0, "checkpoint stall": 1.0}
MODULES = "import sys; before = len(sys.modules); import paceline; print(len(sys.modules) - before)"


def loop(rounds: int = 5, steps: int = 200) -> dict[str, float]:
    """A tiny model on a list of batches, compared with a hand-written loop in the same process."""
    import overhead

    batches, loops = overhead.Batches(overhead.tiny_batches(), steps), (overhead.raw, overhead.paceline_idle)
    raw, ours = _best_steps([partial(loop, batches=batches) for loop in loops], rounds)
    return {
        "step time": ours,
        "step overhead": ours - raw,
        "Python calls per step": overhead.calls_a_step(overhead.paceline_idle)[0],
    }


def data(rounds: int = 5, steps: int = 100) -> dict[str, float]:
    """The same model on other kinds of data."""
    import data_paths
    import overhead

    def train(model: Any, kind: str) -> None:
        needed = overhead.WARM_UP + steps + 1
        data_paths.by_trainer(model, data_paths.KINDS[kind](needed), needed)

    times = _best_steps([partial(train, kind=kind) for kind in DATA.values()], rounds)
    calls = [data_paths.calls_a_step(kind, data_paths.by_trainer) for kind in DATA.values()]
    return {f"step time, {name}": value for name, value in zip(DATA, times, strict=True)} | {
        f"Python calls, {name}": value for name, value in zip(DATA, calls, strict=True)
    }


def optimizer(rounds: int = 5, steps: int = 100) -> dict[str, float]:
    """The same model with an AdamW that the Trainer builds."""
    import overhead

    built = overhead.ADAMW_LOOPS["paceline", "paceline"]
    [microseconds] = _best_steps([partial(built, batches=overhead.Batches(overhead.tiny_batches(), steps))], rounds)
    return {"step time, AdamW": microseconds, "Python calls, AdamW": overhead.calls_a_step(built)[0]}


def ddp(rounds: int = 5, steps: int = 100) -> dict[str, float]:
    """Two ranks, with a loss whose weight depends on the data."""
    import paceline

    return {"step time, DDP, weighted": paceline.launch(_weighted_step, ranks=2, rounds=rounds, steps=steps)}


def _weighted_step(rounds: int, steps: int) -> float:
    import ddp_overhead
    import overhead
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    batches = overhead.Batches(overhead.tiny_batches(), steps)
    weighted = partial(overhead.paceline_idle, criterion=None, loss_fn=ddp_overhead.weighted_loss)
    [microseconds] = _best_steps([partial(weighted, batches=batches)], rounds)
    torch.distributed.destroy_process_group()
    return microseconds


def gpu(rounds: int = 5, steps: int = 100) -> dict[str, float]:
    """The same model on a GPU, which waits for the CPU; nothing on a machine without one."""
    import gpu_step
    import torch

    if not torch.cuda.is_available():
        return {}
    case = gpu_step.Case("pageable", "sgd", torch.device("cuda"))
    batches = gpu_step.Timed(gpu_step.placed(case), steps)
    [microseconds] = _best_steps([lambda model: gpu_step.trainer(case, model.cuda(), batches)], rounds)
    return {"step time, GPU": microseconds, "Python calls, GPU": gpu_step.count(case, "paceline").calls}


def _best_steps(loops: Sequence[Callable[[Any], None]], rounds: int) -> list[float]:
    return [min(times) for times in step_times(loops, rounds)]


def step_times(loops: Sequence[Callable[[Any], None]], rounds: int, seconds: float = math.inf) -> list[list[float]]:
    """µs of a step of the tiny model by loop and round. Rounds are interleaved; none begins after `seconds`."""
    import overhead
    import torch

    def median_step(train: Callable[[Any], None]) -> float:
        model, begun = overhead.tiny_model(), list[float]()
        model.register_forward_pre_hook(lambda module, inputs: begun.append(time.perf_counter()))
        gc.collect()
        train(model)
        steps = zip(begun[overhead.WARM_UP :], begun[overhead.WARM_UP + 1 :], strict=False)
        return 1e6 * statistics.median(end - start for start, end in steps)

    torch.set_num_threads(1)
    measures = {str(number): partial(median_step, train) for number, train in enumerate(loops)}
    return list(overhead.interleaved(measures, rounds, seconds).values())


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
    "data": data,
    "optimizer": optimizer,
    "ddp": ddp,
    "gpu": gpu,
    "launch": launch,
    "import": imports,
    "checkpoint": checkpoint,
}


if __name__ == "__main__":
    print(json.dumps(GROUPS[sys.argv[1]]()))
