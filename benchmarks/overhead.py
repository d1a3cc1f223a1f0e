"""Overhead of training loops compared with a hand-written one: µs and calls per step, on a tiny model.

    python benchmarks/overhead.py [--rounds 15] [--steps 500]    paceline and other libraries, plain SGD
    python benchmarks/overhead.py --fused                        AdamW: torch's default and paceline's

Every loop trains the same model on the same batches in memory, in one process with one thread, and must end with the
weights of the hand-written loop. Only the middle of a run counts: the batches record when the first and the last of its
steps request them, so startup is not measured. Rounds are interleaved. `best` is the fastest round, `paired` the median
of the differences to the hand-written loop in the same round. Other libraries take part if they are installed.
"""

from __future__ import annotations

import argparse
import gc
import io
import itertools
import logging
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

import paceline

WARM_UP = 10  # steps at the start of every run that are not counted
COUNTED = 50  # steps over which calls are counted
LR = 0.01
T = TypeVar("T")


class Batches(list[Any]):
    """Prepared batches that measure the time of `steps` of them. No code of the benchmark runs in between."""

    def __init__(self, different: list[Any], steps: int, profile: Callable[..., None] | None = None) -> None:
        # One more than is counted: the last step is over when the next batch is requested.
        super().__init__(itertools.islice(itertools.cycle(different), WARM_UP + steps + 1))
        self._steps, self._profile = steps, profile

    def __iter__(self) -> Iterator[Any]:
        items = super().__iter__()
        warm_up, counted = itertools.islice(items, WARM_UP), itertools.islice(items, self._steps)
        return itertools.chain(warm_up, self._start(), counted, self._stop(), items)

    def _start(self) -> Iterator[Any]:
        sys.setprofile(self._profile)
        self._started = time.perf_counter()
        yield from ()

    def _stop(self) -> Iterator[Any]:
        self.seconds = time.perf_counter() - self._started
        sys.setprofile(None)
        yield from ()


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def tiny_batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(16, 32), torch.randint(10, (16,))) for _ in range(50)]


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=LR)


def by_hand(model: Any, optimizer: Any, batches: Any, backward: Callable[[Tensor], Any] = Tensor.backward) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad()
        backward(cross_entropy(model(inputs), targets))
        optimizer.step()


def raw(model: nn.Module, batches: Batches, make_optimizer: Callable[[nn.Module], Optimizer] = sgd) -> None:
    by_hand(model, make_optimizer(model), batches)


def paceline_idle(model: nn.Module, batches: Batches, optimizer: Any = None, **settings: Any) -> None:
    idle: dict[str, Any] = {"criterion": cross_entropy, "quiet": True, "run": False, "log_every": len(batches) + 1}
    trainer = paceline.Trainer(model, optimizer or sgd(model), batch=len(batches[0][0]), **(idle | settings))
    trainer.train(batches, max_steps=len(batches))


def paceline_busy(model: nn.Module, batches: Batches) -> None:
    """A run folder with metrics, a log point every ten steps, a live progress bar and a callback."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True  # otherwise there is no live bar

    class KeepRecord:
        def on_step(self, record: Any) -> None:
            self.record = record

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(Terminal()):
        paceline_idle(model, batches, quiet=False, run=f"{folder}/run", log_every=10, callbacks=[KeepRecord()])


def fabric(model: nn.Module, batches: Batches) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    wrapped, optimizer = fabric.setup(model, sgd(model))
    by_hand(wrapped, optimizer, batches, fabric.backward)


def accelerate(model: nn.Module, batches: Batches) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(model, sgd(model))
    by_hand(wrapped, optimizer, batches, accelerator.backward)


def lightning(model: nn.Module, batches: Batches) -> None:
    from lightning.pytorch import LightningModule, Trainer

    class Task(LightningModule):
        def training_step(self, batch: Any, index: int) -> Tensor:
            return cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Optimizer:
            return sgd(self.model)

    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    (task := Task()).model = model
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, **dict.fromkeys(off, False))
    trainer.fit(task, iter(batches))  # a list would be treated as a list of loaders


def hf_trainer(model: nn.Module, batches: Batches) -> None:
    from transformers import Trainer, TrainingArguments

    class Task(Trainer):
        def get_train_dataloader(self) -> Any:
            return batches

        def compute_loss(self, model: Any, inputs: Any, **unused: Any) -> Tensor:
            return cross_entropy(model(inputs[0]), inputs[1])

    off = {"logging_strategy": "no", "logging_nan_inf_filter": False, "save_strategy": "no", "max_grad_norm": 0}
    off |= {"report_to": [], "disable_tqdm": True, "lr_scheduler_type": "constant", "use_cpu": True}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, max_steps=len(batches), **off)
        Task(model, arguments, optimizers=(sgd(model), None)).train()


Loop = Callable[[nn.Module, Batches], None]
# A loop's name and the package it needs -> the loop.
SGD_LOOPS: dict[tuple[str, str], Loop] = {
    ("raw", "torch"): raw,
    ("paceline, idle", "paceline"): paceline_idle,
    ("paceline, busy", "paceline"): paceline_busy,
    ("Fabric", "lightning"): fabric,
    ("Accelerate", "accelerate"): accelerate,
    ("Lightning", "lightning"): lightning,
    ("HF Trainer", "transformers"): hf_trainer,
}
ADAMW_LOOPS: dict[tuple[str, str], Loop] = {
    ("raw", "torch"): partial(raw, make_optimizer=lambda model: AdamW(model.parameters(), lr=LR)),
    ("paceline", "paceline"): partial(paceline_idle, optimizer={"name": "adamw", "lr": LR}),
}


def run(loop: Loop, model: nn.Module, batches: Batches) -> Tensor:
    """The final weights."""
    gc.collect()
    with redirect_stdout(io.StringIO()):
        loop(model, batches)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def microseconds_a_step(loop: Loop, make_model: Callable[[], nn.Module], different: list[Any], steps: int) -> float:
    batches = Batches(different, steps)
    run(loop, make_model(), batches)
    return batches.seconds / steps * 1e6


def calls_a_step(loop: Loop) -> list[float]:
    """Calls of Python functions and of C functions."""
    events: Counter[str] = Counter()
    batches = Batches(tiny_batches(), COUNTED, profile=lambda frame, event, argument: events.update((event,)))
    run(loop, tiny_model(), batches)
    return [events[kind] / COUNTED for kind in ("call", "c_call")]


def interleaved(measures: dict[str, Callable[[], T]], rounds: int, seconds: float = math.inf) -> dict[str, list[T]]:
    """Results by round. A warm-up round before the first is not counted. No round begins after `seconds`, except for
    the first two."""
    results: dict[str, list[T]] = {name: [] for name in measures}
    names, began = list(measures), time.monotonic()
    for number in range(rounds + 1):
        if number > 2 and time.monotonic() > began + seconds:
            break
        for name in names:
            results[name].append(measures[name]())
        names.append(names.pop(0))
    return {name: values[1:] for name, values in results.items()}


def print_row(name: str, times: list[float], reference: list[float], calls: list[float]) -> None:
    best, least, median = min(times), min(reference), statistics.median(times)
    paired = statistics.median(mine - raw for mine, raw in zip(times, reference, strict=True))
    print(f"| {name} | {best:.0f} | {median:.0f} | {best - least:+.0f} | {paired:+.0f} | {least / best:.2f} |", end="")
    print("".join(f" {number:.0f} |" for number in calls))


def _is_wanted(package: str, without_peers: bool) -> bool:
    if package in ("torch", "paceline"):
        return True
    needed = (package, "accelerate") if package == "transformers" else (package,)
    return not without_peers and all(find_spec(name) for name in needed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=500, help="steps per round")
    parser.add_argument("--fused", action="store_true", help="AdamW: torch's default and paceline's")
    parser.add_argument("--without-peers", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # other libraries print and warn at every start
    logging.disable(logging.INFO)
    os.environ["TERM"] = "xterm"  # a live bar needs a terminal that can move its cursor
    rows = ADAMW_LOOPS if options.fused else SGD_LOOPS
    loops = {name: loop for (name, package), loop in rows.items() if _is_wanted(package, options.without_peers)}
    weights = {name: run(loop, tiny_model(), Batches(tiny_batches(), COUNTED)) for name, loop in loops.items()}
    if not options.fused:  # a fused AdamW rounds differently, and paceline's does not decay biases
        assert all(torch.equal(weights["raw"], others) for others in weights.values()), "not the same work"
    measure = partial(microseconds_a_step, make_model=tiny_model, different=tiny_batches(), steps=options.steps)
    times = interleaved({name: partial(measure, loop) for name, loop in loops.items()}, options.rounds)
    print(f"{options.rounds} rounds of {options.steps} steps, interleaved; load {os.getloadavg()[0]:.1f}\n")
    print("| loop | best µs | median µs | over raw, best | over raw, paired | speed | Python calls | C calls |")
    print("|---" * 8 + "|")
    for name, package in rows:
        if name not in loops:
            print(f"| {name} | not installed: pip install -c constraints.txt {package} |" + " |" * 6)
            continue
        numbered = paceline.__version__ if package == "paceline" else version(package)
        print_row(f"{name} ({package} {numbered})", times[name], times["raw"], calls_a_step(loops[name]))


if __name__ == "__main__":
    main()
