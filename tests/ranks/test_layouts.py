"""A core of the table of models and layouts; `make parity` runs all of it."""

from __future__ import annotations

import pytest

import layouts
from layouts import ADAMW, BF16, FP32, FP64, RECOMPUTE, Cell
from paceline.tools.testing.comparison import ParityLayout
from samples import ALL, sample

# Further pairs of axes are in test_tensor.py and test_pipeline.py.
CORE = [
    *(Cell("padded-gpt", layout, FP64) for layout in ("tp:2", "pp:2", "hsdp:4", "split:1")),
    Cell("gpt", "fsdp:2", BF16),
    Cell("padded-gpt", "shard=2 tensor=2", RECOMPUTE),
]
if ALL:
    CORE += [
        *(Cell("gpt", layout, BF16) for layout in ("tp:2", "pp:2")),
        Cell("gpt", "pp:2", RECOMPUTE),
        *(Cell("gpt", layout, ADAMW) for layout in ("fsdp:3", "pipeline=2 shard=2")),
        *(Cell(model, "fsdp:3", FP64) for model in ("resnet", "hf-vit", "sequential", "vae", "hf-gpt2")),
        *(Cell(model, "pp:2", FP64) for model in ("sequential", "mlp")),
        Cell("padded-gpt", "tp:2", FP32),
    ]
STEPS = 6


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.nightly), 4])
def test_every_kind_of_layout_agrees_with_one_process(ranks: int) -> None:
    cells = [cell for cell in CORE if ParityLayout.read(cell.layout).ranks == ranks]
    assert cells
    rows = layouts.run(cells, steps=STEPS)
    assert {cell: row for cell, (_, row) in rows.items() if not row.holds or row.refused} == {}


def test_one_process_learns() -> None:
    runs = layouts.on_one_rank(CORE, sample(STEPS, 20))  # some of the night learn slowly
    assert {one: layouts.fall(run) for one, run in runs.items() if layouts.fall(run) < 0.2} == {}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", layouts.FAULTS)
def test_a_fault_shows_in_every_layout_that_it_can_touch(fault: str) -> None:
    prepare, touched = layouts.FAULTS[fault]
    rows = layouts.run([Cell("padded-gpt", layout, FP64) for layout in touched[: sample(1, 3)]], prepare, STEPS)
    assert {cell.layout: row for cell, (_, row) in rows.items() if row.holds or row.refused} == {}
