"""The table in docs/parity.md: how far the losses of 2, 3 and 4 ranks are from one rank's.

python benchmarks/parity_table.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import paceline
import tiny


def train(recipe: dict[str, Any]) -> paceline.History:
    history: paceline.History = paceline.Trainer.from_config(paceline.Config.from_dict(recipe)).train()
    return history


def worst(recipe: dict[str, Any]) -> tuple[float, list[float]]:
    reference = paceline.launch(train, ranks=1, recipe=recipe).losses
    differences = [
        abs(a - b) / abs(a)
        for ranks in (2, 3, 4)
        for a, b in zip(reference, paceline.launch(train, ranks=ranks, recipe=recipe).losses, strict=True)
    ]
    return max(differences), reference


def main() -> None:
    import paceline.train.trainer  # noqa: F401  # once, before ranks are forked

    for name in ("mlp", "vae", "gpt", "padded-gpt"):
        cells = []
        for precision in ("fp64", "fp32"):
            runs = [worst(tiny.recipe(name, batch=batch, precision=precision)) for batch in (12, 10)]
            cells.append(f"{max(difference for difference, _ in runs):.0e}")
        losses = runs[0][1]
        print(f"| {name} | {cells[0]} | {cells[1]} | {losses[0]:.2f} → {sum(losses[-3:]) / 3:.2f} |", flush=True)


if __name__ == "__main__":
    main()
