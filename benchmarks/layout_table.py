"""The tables on layouts in docs/parity.md: the difference between each layout and a single process.

    make parity

Trains every model with every layout it supports, in float64 and float32, and some of them with recomputation, AdamW and
bf16; then with a deliberate fault, which must be detected. Exit status 1 if a bound is violated.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import layouts
from layouts import ADAMW, BF16, CELLS, EIGHT, FP32, FP64, RECOMPUTE, Cell, Variant

TABLES: list[tuple[Variant, list[str]]] = [
    (FP64, list(CELLS)),
    (FP32, list(CELLS)),
    (RECOMPUTE, ["gpt", "sequential", "resnet", "vae", "hf-gpt2", "llama", "hf-vit"]),
    (ADAMW, ["gpt", "mlp"]),
    (BF16, ["gpt"]),
]
LOSS_FALLS_BY = 0.2


def table(variant: Variant, models: list[str]) -> bool:
    """Print one table; return whether all bounds hold."""
    cells = [Cell(model, layout, variant) for model in models for layout in CELLS[model]]
    if variant is FP64:
        cells.append(Cell("gpt", EIGHT, variant))
    rows = layouts.run(cells)
    print(f"\n### {variant.name}: loss, gradient norm, weights, evaluation; bound {cells[0].bound:g}\n")
    print("| model | loss decreases by | layout: the largest of the four |\n|---|---|---|")
    fine = True
    for model in models:
        mine = {cell: pair for cell, pair in rows.items() if cell.model == model}
        fell = layouts.fall(next(iter(mine.values()))[0])
        cells_text = []
        for cell, (_, row) in mine.items():
            largest = max(row.loss, row.norm, row.weights, row.evaluation or 0.0)
            good = row.holds and not row.refused
            cells_text.append(f"{cell.layout} {row.refused or f'{largest:.0e}'}{'' if good else ' **no**'}")
            fine &= good
        fine &= fell >= LOSS_FALLS_BY
        print(f"| {model} | {fell:.0%} | {'; '.join(cells_text)} |", flush=True)
    return fine


def faults() -> bool:
    print("\n### With a deliberate fault, which must be detected\n\n| fault | difference |\n|---|---|")
    shown = True
    for name, (prepare, touched) in layouts.FAULTS.items():
        rows = layouts.run([Cell("padded-gpt", layout, FP64) for layout in touched], prepare)
        shown &= all(not row.holds for _, row in rows.values())
        text = "; ".join(f"{cell.layout} {max(row.loss, row.norm, row.weights):.0e}" for cell, (_, row) in rows.items())
        print(f"| {name} | {text} |", flush=True)
    return shown


def main() -> int:
    import paceline.train.trainer  # noqa: F401  # import once, before ranks are forked

    began = time.perf_counter()
    fine = [table(variant, models) for variant, models in TABLES]
    shown = faults()
    print(f"\n{time.perf_counter() - began:.0f} s")
    return 0 if all(fine) and shown else 1


if __name__ == "__main__":
    sys.exit(main())
