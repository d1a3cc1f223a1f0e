"""Compare the layout that `strategy: auto` selects with the measured step time of each layout.

    python benchmarks/auto_choice.py [--ranks 2] [--steps 20]

Uses a small gpt that fits under every layout, so auto must select the fastest one. Rounds are interleaved. Exit status
1 if another layout is faster than the selected one by more than a tenth.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import paceline

LAYOUTS = ("auto", "ddp", "fsdp", "tp", "pp")
WARM_UP = 5


def measure(layouts: list[str], steps: int, rounds: int) -> dict[str, Any]:
    """On every rank: seconds per step by layout, and the layout that auto selected."""
    times: dict[str, list[float]] = {name: [] for name in layouts}
    chosen = ""
    for _ in range(rounds):
        for name in layouts:
            trainer = paceline.Trainer.from_config(paceline.Config.from_dict(recipe(name, steps)))
            trainer.train(max_steps=WARM_UP)
            began = time.perf_counter()
            trainer.train(max_steps=WARM_UP + steps)
            times[name].append((time.perf_counter() - began) / steps)
            if name == "auto":
                plan = trainer._engine.layout
                chosen = f"{plan.strategy}: {plan.reason}"
    return {"times": {name: statistics.median(values) for name, values in times.items()}, "chosen": chosen}


def recipe(strategy: str, steps: int) -> dict[str, Any]:
    return {
        "model": {"name": "gpt", "layers": 4, "width": 128, "heads": 4, "context": 64},
        "data": {"name": "stdlib-text", "context": 64, "size": 50_000},
        "batch": 16, "strategy": strategy, "device": "cpu", "run": False, "quiet": True, "log_every": 1000,
        "eval_every": 100_000, "train": {"max_steps": WARM_UP + steps},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    import paceline.train.trainer  # import once, before ranks are forked

    found = paceline.launch(
        measure, ranks=options.ranks, layouts=list(LAYOUTS), steps=options.steps, rounds=options.rounds
    )
    fastest = min(found["times"].values())
    print(f"auto selects {found['chosen']}\n\n| layout | ms per step | relative to the fastest |\n|---|---|---|")
    for name, seconds in found["times"].items():
        print(f"| {name} | {seconds * 1e3:.1f} | {seconds / fastest:.2f} × |")
    sys.exit(found["times"]["auto"] > 1.1 * fastest)


if __name__ == "__main__":
    main()
