"""The cost of comparing replicas: two ranks with and without the check, interleaved, with a log point every ten steps.

    python benchmarks/guard_cost.py [--rounds 15]

`time, paired` is the median over rounds of the time of a step with the check divided by that without; `share` is the
time inside the check divided by the time of all steps; `calls` are Python calls per step that the check adds.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from overhead import Batches, interleaved, sgd, tiny_batches, tiny_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paceline
from paceline.train.checks.same_model import ReplicaCheck

WIDTH = 5000


def large_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def large_batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(64, 32), torch.randint(10, (64,))) for _ in range(5)]


class Timed(ReplicaCheck):
    """Adds up the time inside the check."""

    seconds = 0.0
    checks = 0

    def digest(self) -> Any:
        return self._timed(super().digest)

    def shares(self, digest: Any) -> list[float]:
        Timed.checks += digest is not None
        result: list[float] = self._timed(partial(super().shares, digest))
        return result

    def _timed(self, work: Callable[[], Any]) -> Any:
        began = perf_counter()
        result = work()
        Timed.seconds += perf_counter() - began
        return result


def train(
    make_model: Callable[[], nn.Module], different: list[Any], steps: int, guard: str, profile: Any = None
) -> float:
    """Seconds per step."""
    batches, model = Batches(different, steps, profile), make_model()
    settings: dict[str, Any] = {"quiet": True, "run": False, "log_every": 10, "criterion": cross_entropy}
    trainer = paceline.Trainer(model, sgd(model), batch=len(different[0][0]), **settings)
    engine, kind = trainer._engine, {"on": ReplicaCheck, "timed": Timed}.get(guard)
    engine.features.replicas = kind(engine.parts.model, engine.mesh) if kind else None
    trainer.train(batches, max_steps=len(batches))
    return batches.seconds / steps


def calls_a_step(work: Callable[..., float], steps: int) -> float:
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    work(profile=count)
    return calls / steps


def measure(rounds: int) -> list[dict[str, Any]]:
    results = []
    for name, make_model, different, steps in (
        ("tiny model", tiny_model, tiny_batches(), 500),
        ("25 million parameters", large_model, large_batches(), 40),
    ):
        work = partial(train, make_model, different, steps)
        times: dict[str, Any] = interleaved({guard: partial(work, guard) for guard in ("off", "on")}, rounds)
        Timed.seconds, Timed.checks = 0.0, 0
        total = work("timed") * steps
        added = calls_a_step(partial(work, "on"), steps) - calls_a_step(partial(work, "off"), steps)
        facts = {"share": Timed.seconds / total, "checks": Timed.checks, "steps": steps, "calls": added}
        results.append({"name": name, **times, **facts})
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    import paceline.train.trainer  # import once, before ranks are forked

    results = paceline.launch(measure, ranks=2, rounds=rounds)
    print(f"{rounds} rounds, interleaved, 2 ranks on {os.cpu_count()} cores; load {os.getloadavg()[0]:.1f}\n")
    print("| case | step, best | time, best | time, paired | share | checks / steps | calls |")
    print("|---" * 7 + "|")
    for row in results:
        off, on = row["off"], row["on"]
        paired = statistics.median(with_it / without for without, with_it in zip(off, on, strict=True))
        print(f"| {row['name']} | {min(off) * 1e6:.0f} µs | {min(on) / min(off):.3f} | {paired:.3f} |", end="")
        print(f" {row['share']:.2%} | {row['checks']} / {row['steps']} | {row['calls']:.2f} |")


if __name__ == "__main__":
    main()
