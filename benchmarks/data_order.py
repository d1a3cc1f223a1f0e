"""Cost of the sample order, compared with reading the samples.

python benchmarks/data_order.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import paceline
from paceline.data.sample_order import FormulaOrder

BATCH = 64


def microseconds_a_batch(order: FormulaOrder, batches: int) -> float:
    steps: Iterator[object] = order.epoch(0, 0)
    next(steps)
    started = time.perf_counter()
    for _ in range(batches):
        next(steps)
    return (time.perf_counter() - started) / batches * 1e6


def main() -> None:
    for n in (50_000, 1_000_000_000):
        shuffled = microseconds_a_batch(FormulaOrder(n, BATCH, 0, shuffle=True), 700)
        print(
            f"order of a batch of {BATCH} from {n:>13,} samples: {shuffled:6.2f} µs ({shuffled / BATCH:.3f} a sample)"
        )
    for name in ("shapes", "stdlib-text"):
        train, _ = paceline.get_data(name)
        started = time.perf_counter()
        for index in range(BATCH):
            train[index]
        print(f"reading a batch of {BATCH} from {name}: {(time.perf_counter() - started) * 1e6:.0f} µs")


if __name__ == "__main__":
    main()
