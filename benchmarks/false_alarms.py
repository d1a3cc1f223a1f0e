"""Reports of hangs in training that is healthy. Exit status 1 if there is one.

    python benchmarks/false_alarms.py --steps 20000 [--seed 0]

Two ranks each (now and then four), steps of 1 to 20 ms, in layouts that take turns: what happens in them is in
tests/faults/healthy.py. Half of the time, twice as many processes as there are cores compute as well.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import tiny  # noqa: F401  # once, before launchers are forked
from nodes import launchers
from paceline.launcher.local import agent as _agent  # noqa: F401

SCRIPT = Path(__file__).parents[1] / "tests" / "faults" / "healthy.py"
STEPS = 2000  # of a run
BURNING = 15.0  # seconds with, and seconds without other processes
DEADLINE = 900.0  # seconds of a run


@dataclass(frozen=True)
class Plan:
    seed: str
    layout: str
    ranks: int
    seconds: float
    workers: int
    steps: int


def draw(seed: int, number: int, steps: int) -> Plan:
    chance = random.Random(f"{seed} {number}")
    layout = ("ddp", "fsdp", "tp", "pp")[number % 4]
    ranks = 4 if layout in ("ddp", "fsdp") and chance.random() < 0.15 else 2
    workers = chance.choice((0, 0, 1)) if layout in ("ddp", "fsdp") else 0
    return Plan(f"{seed} {number}", layout, ranks, chance.choice((0.0, 0.002, 0.005, 0.015)), workers, steps)


def burn(seconds: float) -> None:
    while True:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        time.sleep(seconds)


@contextmanager
def busy_machine() -> Iterator[None]:
    burners = [multiprocessing.Process(target=burn, args=(BURNING,)) for _ in range(2 * (os.cpu_count() or 1))]
    for each in burners:
        each.start()
    try:
        yield
    finally:
        for each in burners:
            each.kill()
            each.join()


def reports_of(plan: Plan, folder: Path) -> tuple[list[str], Counter[str]]:
    """The texts of the reports, and what has happened."""
    texts, seen = [], 0.0
    with launchers(folder) as launch:
        launcher = launch("launch", "-n", str(plan.ranks), "--cpu", str(SCRIPT), json.dumps(asdict(plan)))
        deadline = time.monotonic() + DEADLINE
        while launcher.status is None and time.monotonic() < deadline:
            time.sleep(0.1)
            for path in folder.glob("runs/*/logs/hang.json"):
                if path.stat().st_mtime != seen:
                    seen = path.stat().st_mtime
                    texts.append(path.read_text())
        if launcher.status != 0:
            sys.exit(f"{plan}: status {launcher.status}\n{launcher.said[-3000:]}")
    happened: Counter[str] = Counter()
    for path in folder.glob("happened-*"):
        happened.update(json.loads(path.read_text()))
    return texts, happened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    alarms = 0
    print(
        "| layout | ranks | steps | slow steps | garbage | long callbacks | minutes | reports |"
        "\n|---|---|---|---|---|---|---|---|"
    )
    for number in range(-(-options.steps // STEPS)):
        plan = draw(options.seed, number, min(STEPS, options.steps - number * STEPS))
        with tempfile.TemporaryDirectory(prefix="paceline-healthy-") as folder, busy_machine():
            began = time.monotonic()
            texts, happened = reports_of(plan, Path(folder))
        alarms += len(texts)
        counts = " | ".join(str(happened[name]) for name in ("slow", "garbage", "long"))
        minutes = (time.monotonic() - began) / 60
        print(f"| {plan.layout} | {plan.ranks} | {plan.steps} | {counts} | {minutes:.1f} | {len(texts)} |", flush=True)
        for text in texts:
            print(text, file=sys.stderr)
    print(f"\n{alarms} reports in {options.steps} steps")
    sys.exit(bool(alarms))


if __name__ == "__main__":
    main()
