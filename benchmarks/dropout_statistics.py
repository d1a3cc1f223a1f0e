"""Statistical tests of dropout masks: "Dropout masks" in parity.md.

    python benchmarks/dropout_statistics.py [--scale 0.1] [--numbers same_stride]     # 10 minutes by default
    python benchmarks/dropout_statistics.py --stream | dieharder -g 200 -a            # another battery

Exit status 1 if a deviation is larger than one that 1 in 1,000 runs has by chance, over all comparisons of the run, or
if a generator with a correlation of 5e-4 at some distances (`same_stride`) passes the test that found it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from randomness import generators, measures
from randomness.generators import Numbers, Place
from randomness.measures import KINDS, Result

WIDE, TALL, ATTENTION, DEEP = (64, 2048), (2048, 64), (8, 128, 128), (2, 4, 4, 16, 256)


def campaign(numbers: Numbers, scale: float) -> Iterator[Result]:
    def blocks(full: int) -> int:
        return max(1, round(full * scale))

    yield measures.shares(numbers, blocks(1000), (0.01, 0.1, 0.5, 0.9))
    yield measures.bits(numbers, blocks(1000))
    for p in (0.1, 0.5):
        yield measures.dispersion(numbers, p, blocks(600))
    for kind in ("row", "column", *KINDS):
        yield measures.patterns(numbers, kind, blocks(500), batch=16)
    yield measures.all_pairs(numbers, (64, 64), 5)
    yield measures.duplicates(numbers, blocks(256))
    yield measures.ranks(numbers, blocks(500))
    yield measures.avalanche(numbers, blocks(50))
    for kind in KINDS:
        yield from measures.correlations(numbers, kind, 0.5, WIDE, batch=4, blocks=blocks(240))
        yield from measures.correlations(numbers, kind, 0.1, ATTENTION, batch=4, blocks=blocks(240))
    for shape in (TALL, DEEP):
        yield from measures.correlations(numbers, "call", 0.5, shape, batch=4, blocks=blocks(240))


def stream() -> None:
    """The first byte of each number, in the order of columns, rows, samples, calls and steps."""
    for step in count():
        for call in range(4):
            numbers = generators.dropout(Place(step=step, call=call), 16, (64, 768))
            sys.stdout.buffer.write((numbers >> 24).byte().numpy().tobytes())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the numbers")
    parser.add_argument("--numbers", default="dropout", help="a function of tests/randomness/generators.py")
    parser.add_argument("--stream", action="store_true", help="write bytes to the standard output")
    options = parser.parse_args()
    if options.stream:
        stream()
    print("| test | numbers or pairs | comparisons | largest deviation | effect at 5 sigma |\n|---|---|---|---|---|")
    results = []
    for result in campaign(getattr(generators, options.numbers), options.scale):
        results.append(result)
        effect = f"{5 * result.sigma:.1e} ({result.effect})"
        cells = [result.test, f"{result.count:.1e}", f"{result.deviations.size:,}", f"{result.worst:.2f}", effect]
        print(f"| {' | '.join(cells)} |", flush=True)
    limit = measures.limit(results)
    failed = [result.test for result in results if result.worst > limit]
    print(
        f"\n{sum(each.deviations.size for each in results):,} comparisons; 1 run in 1,000 exceeds {limit:.2f} by chance"
    )
    print(f"failed: {'; '.join(failed) or 'none'}")
    blocks = max(240, round(240 * options.scale))
    control = measures.correlations(generators.same_stride, "call", 0.5, WIDE, batch=4, blocks=blocks)[1]
    print(f"control, {control.test}: {control.worst:.2f}, recognised: {control.worst > limit}")
    return int(bool(failed) or control.worst <= limit)


if __name__ == "__main__":
    sys.exit(main())
