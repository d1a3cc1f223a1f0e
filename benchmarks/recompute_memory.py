"""Peak activation memory of a gpt under each kind of recomputation: measured, and by the formula.

    python benchmarks/recompute_memory.py [--layers 8] [--width 256] [--tokens 1024]

On the CPU, in float32, by counting the bytes of live tensors that forward passes created.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from paceline.models.gpt import GPT
from paceline.parallel.recompute import recompute
from saved import formula, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    print(f"gpt: {options.layers} blocks of width {options.width}, {options.tokens} tokens")
    print(f"{'recompute':<12} {'measured':>12} {'formula':>12} {'ratio':>7} {'of off':>7}")
    off = 0
    for kind in ("off", "full", "every-2", "every-4", "selective"):
        model = GPT(layers=options.layers, width=options.width, heads=4, vocabulary=256, context=options.tokens)
        tokens = torch.randint(256, (1, options.tokens), generator=torch.Generator().manual_seed(0))
        recompute(model, kind)
        found, expected = measure(model, tokens), formula(model, tokens, kind)
        off = off or found
        print(
            f"{kind:<12} {found / 1e6:>9.1f} MB {expected / 1e6:>9.1f} MB {found / expected:>7.3f} {found / off:>7.2f}"
        )


if __name__ == "__main__":
    main()
