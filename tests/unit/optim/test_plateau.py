from __future__ import annotations

import json
import random

import pytest
import torch

from paceline.optim.schedules import Plateau


def values(seed: int, count: int = 60) -> list[float]:
    """Falling at first, then around a level, with a NaN."""
    source = random.Random(seed)
    noisy = [1.0 + 3.0 * 0.8**place + 0.02 * source.random() for place in range(count)]
    noisy[source.randrange(count)] = float("nan")
    return noisy


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(("patience", "threshold", "floor"), [(0, 1e-2, 1e-3), (2, 1e-4, 0.0), (3, 0.0, 0.3)])
def test_it_cuts_where_torchs_scheduler_does(
    seed: int, mode: str, patience: int, threshold: float, floor: float
) -> None:
    plateau = Plateau(0.5, patience, threshold, mode, floor)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode=mode, factor=0.5, patience=patience, threshold=threshold, min_lr=floor, eps=0.0
    )
    cuts = 0
    for value in values(seed):
        before = optimizer.param_groups[0]["lr"]
        reference.step(value)
        assert plateau.observe(value) == (optimizer.param_groups[0]["lr"] < before)
        assert plateau.scale == pytest.approx(optimizer.param_groups[0]["lr"])
        cuts += plateau.scale < before
    assert cuts > 0


def test_the_direction_follows_from_the_metric() -> None:
    rising, falling = [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]
    for metric, good, bad in (("accuracy", rising, falling), ("loss", falling, rising)):
        content = Plateau(0.5, 1, 1e-4, None, 0.0, metric)
        assert not any(content.observe(value) for value in good)
        unhappy = Plateau(0.5, 1, 1e-4, None, 0.0, metric)
        assert [unhappy.observe(value) for value in bad] == [False, False, True, False]


@pytest.mark.parametrize("stop", range(0, 60, 4))
def test_a_resumed_plateau_cuts_at_the_same_evaluation(stop: int) -> None:
    whole, first, second = (Plateau(0.5, 3, 1e-2, "min", 0.0) for _ in range(3))
    expected = [(whole.observe(value), whole.scale) for value in values(3)]
    seen = [(first.observe(value), first.scale) for value in values(3)[:stop]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    seen += [(second.observe(value), second.scale) for value in values(3)[stop:]]
    assert seen == expected


def test_at_the_floor_nothing_is_cut() -> None:
    plateau = Plateau(0.1, 0, 0.0, "min", 0.5)
    assert [plateau.observe(1.0) for _ in range(4)] == [False, True, False, False]
    assert plateau.scale == 0.5
