"""Resume is invisible: histories of stops, failures and moves, each beside the run that was never touched.

`python benchmarks/resume_histories.py --trainings 300` lives many more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import histories
from histories import BOUNDS, CASES, ENDINGS, LAYOUTS, STEPS, Case, History, Leg, Told
from samples import ALL

pytestmark = pytest.mark.timeout(600)
COSINE, PLATEAU, MULTI_STEP = CASES[:3]
DRAWN = [histories.drawn(number) for number in (range(5, 10) if ALL else (6,))]
# In it, the numbers of workers and of micro-batches change at every stop.
CHANGING = History(
    MULTI_STEP,
    (
        Leg("ddp:2", 8, "killed", 2), Leg("single", 11, "failed", 0, 3), Leg("fsdp:2", 23, "by-hand", 0, 2),
        Leg("single", STEPS, "stopped", 2),
    ),
)  # fmt: skip
LIVED = [*DRAWN, CHANGING]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    """Runs without a stop, which learn, clip, and change their rate."""
    cases = list(dict.fromkeys(history.case for history in LIVED))
    unbroken = [History(case, (Leg("single", STEPS),), number) for number, case in enumerate(cases)]
    lived = histories.live(unbroken, tmp_path_factory.mktemp("unbroken"))
    references = {case.name: told for case, told in zip(cases, lived, strict=True)}
    for name, told in references.items():
        losses, rates = ([record[key] for record in told.records] for key in ("loss", "lr"))
        assert losses[-1] < losses[0] - 0.3, name
        assert any(record["grad_norm"] > 1.0 for record in told.records), name
        assert len({f"{rate:.6g}" for rate in rates}) >= 4, name
    return references


def visible(lived: list[History], references: dict[str, Told], folder: Path) -> dict[str, histories.Difference]:
    """The histories that can be told from a run without a stop."""
    found = {}
    for history, told in zip(lived, histories.live(lived, folder), strict=True):
        difference = histories.compare(references[history.case.name], told)
        if difference.wrong or not max(difference.loss, difference.evaluation) <= BOUNDS[history.case.precision]:
            found[str(history)] = difference
    return found


@pytest.mark.nightly  # the histories below move between six of these twelve layouts
def test_a_run_may_move_through_every_layout(references: dict[str, Told], tmp_path: Path) -> None:
    layouts = list(LAYOUTS)
    moves = [2 * n + 2 + n // 2 for n in range(len(layouts) - 1)]  # some behind an epoch's end, some inside
    legs = [Leg(layout, until) for layout, until in zip(layouts, [*moves, STEPS], strict=True)]
    assert visible([History(PLATEAU, tuple(legs))], references, tmp_path) == {}


def test_random_histories_equal_a_run_without_a_stop(references: dict[str, Told], tmp_path: Path) -> None:
    assert {history.case.name for history in LIVED} == references.keys()
    assert {leg.ends for history in LIVED for leg in history.legs} == set(ENDINGS)
    assert visible(LIVED, references, tmp_path) == {}


# Layouts on the same number of ranks share their launches.
UNCHANGED = {"fp32": ("ddp:3" if ALL else "ddp:2", "fsdp:2"), "bf16": ("ddp:2", "fsdp:4")}


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.nightly)])
def test_the_same_ranks_end_with_the_same_bits(tmp_path: Path, precision: str) -> None:
    """With dropout, which draws from each rank's own generator."""
    broken, unbroken = [], []
    for number, layout in enumerate(UNCHANGED[precision]):
        case = Case("bits", precision, settings=COSINE.settings, dropout=0.1)
        stops = (Leg(layout, 9, "killed"), Leg(layout, 10), Leg(layout, 12))
        broken.append(History(case, stops, number))
        unbroken.append(History(case, (Leg(layout, 12),), 100 + number))
    told = histories.live(broken + unbroken, tmp_path)
    assert [[start for _, start in one.starts] for one in told[: len(broken)]] == [[0, 7, 10]] * len(broken)
    for history, ours, theirs in zip(broken, told, told[len(broken) :], strict=False):
        kept, expected = (histories.hashes(one.starts[-1][0] / "checkpoints" / "step-000012") for one in (ours, theirs))
        assert {name.split("/")[0] for name in expected} == {"model", "ema", "optimizer", "random"}
        assert kept == expected, history
