"""What follows from the axes for each rank, on every layout of up to three ranks an axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from typing import get_args

import torch

from paceline.config.recipe import Config
from paceline.config.sections import LayoutSection
from paceline.plan.layout import AXIS_NAMES, STRATEGIES, Degrees
from paceline.runtime import mesh
from paceline.runtime.mesh import Mesh

CPU = torch.device("cpu")
LAYOUTS = [Degrees(*degrees) for degrees in product((1, 2, 3), repeat=4)]


def ranks(degrees: Degrees) -> Iterator[Mesh]:
    for rank in range(degrees.world):
        yield Mesh(degrees, CPU, None, mesh._coordinates(rank, degrees), None)


def test_names_of_axes_and_strategies_are_the_same_everywhere() -> None:
    assert AXIS_NAMES == tuple(field.name for field in fields(Degrees)) == tuple(LayoutSection.model_fields)
    assert list(STRATEGIES) == list(get_args(Config.model_fields["strategy"].annotation))


def test_ranks_are_numbered_from_the_outermost_axis_to_the_innermost() -> None:
    order = [tuple(each.coords[name] for name in AXIS_NAMES) for each in ranks(Degrees(2, 3, 2, 2))]
    assert order == list(product(range(2), range(3), range(2), range(2)))


def test_ranks_along_pipeline_and_tensor_read_the_same_samples_and_one_of_them_reports() -> None:
    for degrees in LAYOUTS:
        assert degrees.data_ranks == degrees.replicate * degrees.shard
        assert degrees.is_replicated == (degrees.pipeline == degrees.shard == degrees.tensor == 1)
        for each in ranks(degrees):
            where = each.coords
            assert each.data_rank == where["replicate"] * degrees.shard + where["shard"]
            assert each.reports_loss == (where["tensor"] == 0 and where["pipeline"] == degrees.pipeline - 1)
            assert each.repeats_loss == (degrees.tensor > 1)
        assert [each.data_rank for each in ranks(degrees) if each.reports_loss] == list(range(degrees.data_ranks))


def test_the_same_values_get_the_same_noise_and_different_ones_their_own() -> None:
    for degrees in LAYOUTS:
        for each in ranks(degrees):
            where, stage = each.coords, degrees.world * each.coords["pipeline"]
            assert each.noise_rank(tokens_apart=False) == each.data_rank + stage
            assert each.noise_rank(tokens_apart=True) == each.data_rank + degrees.data_ranks * where["tensor"] + stage
        assert len({each.noise_rank(tokens_apart=True) for each in ranks(degrees)}) == degrees.world


def test_stages_hold_different_parameters_and_all_other_ranks_the_same() -> None:
    for each in ranks(Degrees(2, 2, 2, 2)):
        assert each.coords_in_stage == {name: each.coords[name] for name in ("replicate", "shard", "tensor")}
