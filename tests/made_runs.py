"""Large and odd runs, written without training, for the pages that show runs.

python tests/made_runs.py /tmp/runs/large --steps 1000000 --ranks 64
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from ledgers import Line, written
from paceline.config.recipe import Config, effective
from paceline.run.folder import RunFolder

START = 1_763_220_000.0
SECONDS = 0.21  # of a step
LOG_EVERY = 10
PER_NODE = 8
_FAILURE = {
    "cause": "exception", "exception": "RuntimeError", "what": "the last rank raised RuntimeError in step 2000",
    "text": 'Traceback (most recent call last):\n  File "train.py", line 17, in <module>\n    main()\n'
    "RuntimeError: CUDA error: an illegal memory access was encountered", "file": "train.py", "line": 17,
    "function": "main", "code": "main()",
}  # fmt: skip


def make_run(
    path: Path, steps: int = 2000, ranks: int = 2, *, failed: bool = False, seed: int = 0, settings: Sequence[str] = ()
) -> RunFolder:
    """A language model whose loss falls; one rank becomes slow halfway. With `settings`, such as `optimizer.lr=0.1`, it
    has the whole recipe that a run writes."""
    folder, noise = RunFolder(path), random.Random(seed)
    folder.logs.mkdir(parents=True)
    nodes = max(1, ranks // PER_NODE)
    shard = math.gcd(ranks, PER_NODE)
    derived = {
        "world": ranks, "strategy": "hsdp" if nodes > 1 else "fsdp",
        "layout": f"replicate={ranks // shard} shard={shard}",
        "batch": 8 * ranks, "micro_batch": 8, "learning rate": 0.003, "horizon": steps if not failed else 2 * steps,
    }  # fmt: skip
    values = {name: {"value": value, "reason": "made for a test"} for name, value in derived.items()}
    folder.derived.write_text(json.dumps(values))
    folder.config.write_text(
        f"model:\n  name: gpt  # recipe.yaml:1\n  width: 768  # recipe.yaml:1\nbatch: {8 * ranks}  # recipe.yaml:3\n"
        f"precision: bf16  # override precision=bf16\nseed: {seed}  # default\n"
        "optimizer:\n  lr: 0.003  # recipe.yaml:4\n"
    )
    if settings:
        recipe = Config.from_dict({"batch": 8 * ranks, "seed": seed}, settings, origin="recipe.yaml")
        folder.config.write_text(effective(recipe))
    folder.environment.write_text(
        json.dumps({"command": "paceline train recipe.yaml", "torch": "2.13.0", "host": "n0"})
    )
    with folder.metrics.open("w") as file:
        for step in range(1, steps + 1):
            file.write(_record(step, steps, ranks, noise))
            if step % max(1, steps // 20) == 0:
                loss = _loss(step, steps) + 0.12
                values = {"evaluation": True, "step": step, "epoch": 0, "loss": loss, "accuracy": 1 - loss / 12}
                file.write(json.dumps({**values, "time": START + step * SECONDS}) + "\n")
    write_statistics(folder, steps, ranks, noise)
    for rank in range(ranks):
        lines = [f"step {step}: rank {rank} says something that is only a line of a log" for step in range(1, 60)]
        folder.rank_log(rank).write_text("\n".join(lines) + "\n")
    for step in range(steps // 5, steps + 1, max(1, steps // 5)):
        (folder.checkpoints / f"step-{step:06d}").mkdir(parents=True)
    return written(path, *_events(steps, ranks, nodes, failed))


def _loss(step: int, steps: int) -> float:
    return 2.6 + 7.5 * math.exp(-6 * step / steps)


def _record(step: int, steps: int, ranks: int, noise: random.Random) -> str:
    loss = _loss(step, steps) + noise.gauss(0, 0.08)
    rate = 0.003 * min(1, step / (0.02 * steps)) * (1 + math.cos(math.pi * step / steps)) / 2
    record = {"step": step, "epoch": 0, "loss": loss, "lr": rate, "grad_norm": abs(noise.gauss(0.6, 0.15))}
    if step % LOG_EVERY == 0:
        slow = 0.8 if step > steps // 2 else 1.0
        record |= {
            "data_wait": round(abs(noise.gauss(0.01, 0.01)), 4),
            "tflops_per_device": 391.2,
            "mfu": round(0.395 * slow, 4),
        }
        record |= {
            "time": round(START + step * SECONDS, 3),
            "samples_per_second": round(slow * noise.gauss(8 * ranks / SECONDS, ranks), 2),
        }
    return json.dumps(record) + "\n"


def write_statistics(folder: RunFolder, steps: int, ranks: int, noise: random.Random) -> None:
    slow = ranks // 3
    for rank in range(ranks):
        folder.rank_stats(rank).parent.mkdir(exist_ok=True)
        memory = int((60 + 4 * noise.random()) * 2**30)
        lines = []
        for step in range(LOG_EVERY, steps + 1, LOG_EVERY):
            own = SECONDS * (0.78 + 0.03 * noise.random()) * (1.25 if rank == slow and step > steps // 2 else 1.0)
            lines.append(
                f'{{"time": {START + step * SECONDS:.3f}, "step": {step}, '
                f'"samples_per_second": {8 * ranks / SECONDS:.2f}, '
                f'"data_wait": {0.01 * noise.random():.4f}, "memory": {memory}, "peak_memory": {memory}, '
                f'"gpu": {{"utilization": {0.9 + 0.1 * noise.random():.2f}}}, "own_time": {own:.6f}}}\n'
            )
        folder.rank_stats(rank).write_text("".join(lines))


def _events(steps: int, ranks: int, nodes: int, failed: bool) -> list[Line]:
    def at(share: float) -> float:
        return START + share * steps * SECONDS

    events: list[Line] = [
        (START - 20, "launched", {"nodes": nodes, "ranks": ranks, "generation": 0}),
        (START - 8, "joined", {"seconds": 2.5}),
        (START + 5, "first-step", {"step": 1, "steps": 1, "seconds": 6.0}),
    ]
    for part in range(1, 21):
        events.append((at(part / 20), "evaluated", {"seconds": 0.01 * steps * SECONDS / 20}))
        events.append((at(part / 20), "stepped", {"step": steps * part // 20}))
        if part % 4 == 0:
            events.append((at(part / 20) + 0.1, "saved", {"step": steps * part // 20, "seconds": 0.4}))
    events.append(
        (
            at(0.52),
            "warning",
            {"text": f"rank {ranks // 3} has been 1.3 × slower than the others since step {steps // 2}"},
        )
    )
    end = at(1.0) + 1
    if failed:
        return [
            *events,
            (end, "failed", {**_FAILURE, "rank": ranks - 1, "step": steps}),
            (end + 1, "ended", {"status": 1}),
        ]
    return [*events, (end, "finished", {"step": steps}), (end + 1, "ended", {"status": 0})]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--failed", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    make_run(chosen.path, chosen.steps, chosen.ranks, failed=chosen.failed, seed=chosen.seed)
