"""Hostile frames, byte streams and connections on the control port of a job: "Hostile connections" in reliability.md.

    python benchmarks/hostile_frames.py [COUNT] [--seed SEED]        # 100,000 by default

A job of two nodes on loopback joins, trains and ends under them. Exit status 1 unless both nodes end with status 0, the
losses are those of a job that nobody attacks, and the coordinator's memory and descriptors stay bounded.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import paceline.train.trainer  # noqa: F401  # before launchers are forked, so that it is imported once
from faults import frames

_MAX_GROWTH = 32 << 10  # KiB; a stranger occupies a few hundred bytes, the rest is for sockets and the allocator
_MAX_DESCRIPTORS = 300  # 256 strangers, and the coordinator's own


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as peace, tempfile.TemporaryDirectory() as war:
        expected = frames.losses_in_peace(Path(peace))
        siege = frames.besiege(Path(war), options.count, options.seed)
    for kind, number in sorted(siege.attacks.items()):
        print(f"| {kind.replace('_', ' ')} | {number:,} |")
    memory, descriptors = siege.memory, siege.descriptors
    print(f"| all | {sum(siege.attacks.values()):,} |\n")
    print(f"{siege.seconds:.0f} s; statuses {siege.statuses}; same losses: {siege.losses == expected}")
    for name, values in (("memory, MiB", [each // 1024 for each in memory]), ("descriptors", descriptors)):
        print(f"coordinator, {name}: {values[0]} before, {max(values)} at most, {values[-1]} in the end")
    is_bounded = max(memory) - memory[0] < _MAX_GROWTH and max(descriptors) < _MAX_DESCRIPTORS
    if siege.statuses != [0, 0] or siege.losses != expected or not is_bounded:
        print(siege.said)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
