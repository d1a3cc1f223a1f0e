"""`strategy: split` with and without micro-batches: seconds per training step, in interleaved rounds.

    python benchmarks/split_microbatches.py --devices cuda:0 cuda:1 [--microbatches 4] [--layers 12] [--width 768]

Two GPUs work concurrently. The CPU computes synchronously, so with it micro-batches save no time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import paceline


def trainer_of(options: argparse.Namespace, microbatches: int) -> tuple[paceline.Trainer, dict[str, Any]]:
    torch.manual_seed(0)
    model = paceline.get_model("gpt")(
        layers=options.layers, width=options.width, heads=options.width // 64, vocabulary=512, context=options.tokens
    )
    settings: dict[str, Any] = {"devices": options.devices, "microbatches": microbatches}
    trainer = paceline.Trainer(
        model, strategy="split", split=settings, batch=options.batch, accumulate=1, run=False, quiet=True
    )
    tokens = torch.randint(512, (options.batch, options.tokens), generator=torch.Generator().manual_seed(0))
    return trainer, {"inputs": tokens, "targets": tokens}


def seconds_a_step(trainer: paceline.Trainer, batch: dict[str, Any], steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        loss = trainer.training_step(batch).loss
    loss.item()  # synchronizes with the devices
    return (time.perf_counter() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"])
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    runs = {count: trainer_of(options, count) for count in (1, options.microbatches)}
    for trainer, batch in runs.values():
        seconds_a_step(trainer, batch, 2)
    times: dict[int, list[float]] = {count: [] for count in runs}
    for _ in range(options.rounds):
        for count, (trainer, batch) in runs.items():
            times[count].append(seconds_a_step(trainer, batch, options.steps))
    whole = statistics.median(times[1])
    print(f"gpt of {options.layers} x {options.width} over {', '.join(options.devices)}, batch {options.batch}")
    for count, found in times.items():
        middle = statistics.median(found)
        print(
            f"{count:>2} parts: {middle * 1e3:8.1f} ms per step ({whole / middle:.2f} x), from {min(found) * 1e3:.1f}"
        )


if __name__ == "__main__":
    main()
