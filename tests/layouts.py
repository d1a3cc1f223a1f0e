"""Models and the layouts on which they must agree with one process. Tests run a part, `make parity` all of it.

Every cell trains 10 steps, 6 in tests, with accumulation, clipping, an average of the weights, evaluation on a
number of samples that no layout divides, and a short batch at the end of an epoch, which is after 5 steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tiny
from paceline.config.components import PRECISIONS
from paceline.tools.testing import comparison
from paceline.tools.testing.comparison import ParityLayout, ParityRow, ParityRun

STEPS = 10
DATA = ("ddp:2", "ddp:3", "ddp:4", "fsdp:2", "fsdp:3", "fsdp:4", "hsdp:4")
TENSOR = ("tp:2", "shard=2 tensor=2", "replicate=2 tensor=2")
PIPELINE = ("pp:2", "pipeline=2 replicate=2", "pipeline=2 shard=2")
SPLIT = ("split:1",)
EIGHT = "pipeline=2 shard=2 tensor=2"

CELLS: dict[str, tuple[str, ...]] = {
    "gpt": (*DATA, *TENSOR, "tp:4", *PIPELINE, "pp:3", "pp:4", *SPLIT),
    "padded-gpt": (*DATA, *TENSOR, *PIPELINE, *SPLIT),
    "mlp": (*DATA, "tp:2", *PIPELINE, *SPLIT),
    "sequential": (*DATA, *PIPELINE, *SPLIT),
    "resnet": (*DATA, *SPLIT),
    "vae": (*DATA, *SPLIT),
    "hf-gpt2": (*DATA, *SPLIT),
    "llama": (*DATA, *TENSOR, *SPLIT),
    "hf-vit": DATA,
}
# Rounding is not algebra: small-batch BatchNorm amplifies it, so a resnet in float32 is compared at its first step.
FIRST_STEP_ONLY = {("resnet", "fp32")}


@dataclass(frozen=True)
class Variant:
    """Settings that a whole column of the table is trained with."""

    name: str
    precision: str
    recompute: bool = False
    adamw: bool = False

    def settings(self, model: str) -> dict[str, Any]:
        changes: dict[str, Any] = {
            "precision": self.precision, "batch": 12, "accumulate": 2, "clip_norm": 1.0, "ema": 0.9,
        }  # fmt: skip
        if self.recompute:
            changes["recompute"] = "full"
        recipe = tiny.recipe(model, **changes)
        if self.adamw:
            recipe["optimizer"] = {"name": "adamw", "lr": 3e-3, "weight_decay": 0.1}
        elif self.precision == "bf16":  # at three times the rate its rounding grows: 4e-2 in ddp's norms
            recipe["optimizer"] = {"name": "sgd", "lr": 2 * recipe["optimizer"]["lr"]}
        elif recipe["optimizer"]["name"] == "sgd":  # faster: these are 10 steps, not 20
            recipe["optimizer"] = {"name": "sgd", "lr": 3 * recipe["optimizer"]["lr"], "momentum": 0.5}
        if model == "gpt":  # enough layers and heads for four ranks
            recipe["model"] |= {"layers": 4, "heads": 4}
        if model == "mlp":
            recipe["tensor"] = {"plan": {"layers.0": "column", "layers.2": "row"}}
        return {**recipe, "device": "cpu"}


FP64 = Variant("float64", "fp64")
FP32 = Variant("float32", "fp32")
RECOMPUTE = Variant("float64, recompute", "fp64", recompute=True)
ADAMW = Variant("float64, AdamW", "fp64", adamw=True)
BF16 = Variant("bf16", "bf16")


@dataclass(frozen=True)
class Cell:
    model: str
    layout: str
    variant: Variant

    @property
    def bound(self) -> float:
        return PRECISIONS.facts(self.variant.precision).parity_bound


def run(
    cells: Sequence[Cell], prepare: Callable[[], None] | None = None, steps: int = STEPS
) -> dict[Cell, tuple[ParityRun, ParityRow]]:
    """Each cell's reference and how far it is from that; cells of one number of ranks share a world."""
    references = on_one_rank(cells, steps)
    rows: dict[Cell, tuple[ParityRun, ParityRow]] = {}
    for ranks in sorted({ParityLayout.read(cell.layout).ranks for cell in cells}):
        same = [cell for cell in cells if ParityLayout.read(cell.layout).ranks == ranks]
        runs = _train(ranks, [_settings(cell) for cell in same], prepare, steps)
        for cell, other in zip(same, runs, strict=True):
            one = references[cell.model, cell.variant]
            rows[cell] = (one, _compare(cell, one, other))
    return {cell: rows[cell] for cell in cells}


_on_one_rank: dict[tuple[str, Variant, int], ParityRun] = {}  # each is trained once


def on_one_rank(cells: Sequence[Cell], steps: int = STEPS) -> dict[tuple[str, Variant], ParityRun]:
    ones = list(dict.fromkeys((cell.model, cell.variant) for cell in cells))
    if new := [one for one in ones if (*one, steps) not in _on_one_rank]:
        runs = _train(1, [_one(*one) for one in new], None, steps)
        assert all(isinstance(run, ParityRun) for run in runs), runs
        _on_one_rank.update(((*one, steps), run) for one, run in zip(new, runs, strict=True))  # type: ignore[misc]
    return {one: _on_one_rank[*one, steps] for one in ones}


def _train(
    ranks: int, settings: list[dict[str, Any]], prepare: Callable[[], None] | None, steps: int
) -> list[ParityRun | str]:
    def make(**own: Any) -> Any:
        if prepare is not None:
            prepare()
            own["preflight"] = False  # or replicas would be found to differ before anything is compared
        return tiny.trainer_of(own)

    return comparison.train_on(ranks, settings, {}, build=make, data=None, val=None, steps=steps)


def _one(model: str, variant: Variant) -> dict[str, Any]:
    return {**variant.settings(model), "strategy": "single"}


def _settings(cell: Cell) -> dict[str, Any]:
    settings = {**cell.variant.settings(cell.model), **ParityLayout.read(cell.layout).settings}
    if cell.layout.startswith("split"):
        settings["split"] = {"devices": ["cpu", "cpu"]}
    return settings


def _compare(cell: Cell, one: ParityRun, other: ParityRun | str) -> ParityRow:
    if isinstance(other, ParityRun) and (cell.model, cell.variant.precision) in FIRST_STEP_ONLY:
        one = ParityRun(one.losses[:1], one.norms[:1], {})
        other = ParityRun(other.losses[:1], other.norms[:1], {})
    row = comparison.compare(cell.layout, one, other, cell.bound)
    if cell.variant.adamw or cell.variant.precision == "bf16":
        # AdamW divides gradients that are pure rounding by themselves: the model as a whole is compared.
        row = ParityRow(**{**row.__dict__, "parameter": None})
    return row


def no_reduction_between_copies() -> None:
    """A forgotten gradient reduction on one axis: copies of a sharded model part. (torch's own switch for it leaves no
    gradient at all, which is found before the first step.)"""
    import torch.distributed
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    class Forgetful:
        all_reduce = staticmethod(lambda *arguments, **options: None)

        def __getattr__(self, name: str) -> Any:
            return getattr(torch.distributed, name)

    _fsdp_collectives.dist = Forgetful()  # type: ignore[attr-defined]  # in a rank's own process


def norm_of_own_pieces() -> None:
    """A wrong clip norm under sharding: each rank clips by the norm of what it holds."""
    from paceline.optim.clip import total_norm
    from paceline.train.held_params import HeldParams

    HeldParams.norm_of = lambda self, parameters: total_norm  # type: ignore[method-assign]


FAULTS = {
    "no reduction between copies": (no_reduction_between_copies, ("hsdp:4", "replicate=2 tensor=2")),
    "norm of own pieces": (norm_of_own_pieces, ("fsdp:2", "tp:2", "pp:2")),
}


def fall(run: ParityRun) -> float:
    """How much of the first loss is gone at the end."""
    return 1.0 - sum(run.losses[-2:]) / 2 / run.losses[0]
