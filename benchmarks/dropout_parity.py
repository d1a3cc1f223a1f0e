"""The tables on dropout in docs/parity.md: the difference between each layout and a single process, with dropout.

    python benchmarks/dropout_parity.py

Trains each model with its dropout on every layout it supports, with accumulation, recomputation, compilation and a
resume on another number of ranks; then with a deliberate fault, which must be detected. Exit status 1 if a bound is
violated. `--no-compile` leaves compilation out, which takes most of the time.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import dropout_models
from dropout_models import Cell, cell

LIBRARY = ("gpt2", "bert", "t5", "vit", "ragged")
PRECISIONS = ("fp64", "fp32")


def cells_of(precision: str) -> dict[str, list[Cell]]:
    """By column of the table."""
    columns: dict[str, list[Cell]] = {
        "ddp, fsdp on 1 to 4 ranks": [],
        "accumulation 3": [],
        "recompute": [],
        "resumed on other ranks": [],
        "tp, sequence parallel": [],
        "pp": [],
        "two axes": [],
    }
    for model in LIBRARY:
        both = [f"{strategy}:{ranks}" for strategy in ("ddp", "fsdp") for ranks in (1, 2, 3, 4)]
        columns["ddp, fsdp on 1 to 4 ranks"] += [cell(model, layout, precision) for layout in both]
        columns["accumulation 3"] += [cell(model, layout, precision, accumulate=3) for layout in both[1:3] + both[5:]]
        for kind in ("full", "selective"):
            columns["recompute"] += [cell(model, layout, precision, recompute=kind) for layout in ("ddp:2", "fsdp:3")]
        for layout, then in (("ddp:1", "fsdp:3"), ("fsdp:2", "ddp:3"), ("ddp:4", "ddp:2")):
            columns["resumed on other ranks"].append(cell(model, layout, precision, then=then, accumulate=2))
    for model in ("gpt", "llama"):
        for settings in ({}, {"tensor": {"sequence": False}}, {"recompute": "full"}, {"accumulate": 3}):
            columns["tp, sequence parallel"].append(cell(model, "tp:2", precision, **settings))
        columns["two axes"] += [
            cell(model, layout, precision) for layout in ("shard=2 tensor=2", "replicate=2 tensor=2")
        ]
    for model in ("gpt", "staged-llama", "sequential"):
        schedules = ("1f1b", "gpipe", "interleaved", "zero-bubble") if model != "sequential" else ("1f1b", "gpipe")
        columns["pp"] += [cell(model, "pp:2", precision, pipeline={"schedule": each}) for each in schedules]
        if model != "sequential":
            columns["pp"].append(cell(model, "pp:2", precision, recompute="full"))
        columns["two axes"].append(cell(model, "pipeline=2 shard=2", precision))
    for model in ("gpt", "llama", "sequential"):
        columns["ddp, fsdp on 1 to 4 ranks"] += [cell(model, layout, precision) for layout in ("ddp:3", "fsdp:2")]
    return columns


def compiled() -> bool:
    """In float64, with batches of one size: each size is compiled."""
    print("\n| compiled, float64 | blocks, ddp on 2 ranks | full model, one rank |\n|---|---|---|")
    fine = True
    for model in ("gpt2", "bert", "t5", "vit", "gpt"):
        cells = [cell(model, "ddp:2", compile="blocks", batch=26), cell(model, "ddp:1", compile="model", batch=26)]
        rows = dropout_models.compare(cells)
        fine &= all(row.holds and not row.refused for row in rows.values())
        print(
            f"| {model} | " + " | ".join(row.refused or f"{row.loss:.0e}" for row in rows.values()) + " |", flush=True
        )
    return fine


def table(columns: dict[str, list[Cell]]) -> bool:
    """Print the largest difference of a loss for each model and column; return whether every bound holds."""
    rows = dropout_models.compare([each for cells in columns.values() for each in cells])
    models = list(dict.fromkeys(each.model for each in rows))
    print("\n| model | " + " | ".join(columns) + " |\n|---" + "|---" * len(columns) + "|")
    for model in models:
        found = []
        for cells in columns.values():
            mine = [rows[each] for each in cells if each.model == model]
            found.append(f"{max(row.loss for row in mine):.0e}" if mine else "")
        print(f"| {model} | " + " | ".join(found) + " |", flush=True)
    wrong = {str(each): row for each, row in rows.items() if row.refused or not row.holds}
    for name, row in wrong.items():
        print(f"**{name}**: {row.refused or row}", flush=True)
    print(f"\n{len(rows)} runs", flush=True)
    return not wrong


def faults() -> bool:
    print("\n| fault, float64 | difference of the losses |\n|---|---|")
    shown = True
    cells = [cell("ragged", "ddp:2", accumulate=2), cell("gpt", "tp:2"), cell("vit", "fsdp:3", accumulate=2)]
    touched = {"wrong sample": [cells[0], cells[2]], "wrong step": [cells[0], cells[2]], "flat index": cells[:2]}
    for fault, affected in touched.items():
        rows = dropout_models.compare(affected, fault)
        shown &= all(row.loss > 1e-4 for row in rows.values())
        text = "; ".join(f"{each.model} {each.layout} {row.loss:.0e}" for each, row in rows.items())
        print(f"| {fault} | {text} |", flush=True)
    return shown


def main() -> int:
    warnings.simplefilter("ignore")
    began = time.perf_counter()
    fine = []
    for precision in PRECISIONS:
        print(f"\n### {precision}, bound {dropout_models.BOUNDS[precision]:g}")
        fine.append(table(cells_of(precision)))
        print(f"{time.perf_counter() - began:.0f} s", flush=True)
    fine.append(faults())
    if "--no-compile" not in sys.argv:
        fine.append(compiled())
    print(f"\n{time.perf_counter() - began:.0f} s")
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
