"""Compares a recipe on several numbers of ranks. Tests run a part of the table, `make parity` all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import paceline
import tiny
import worlds

STEPS = 20
LOSS_BOUND = {"fp64": 1e-9, "fp32": 1e-6, "bf16": 1e-3, "fp16": 5e-3}


@dataclass(frozen=True)
class Case:
    """One training, on however many ranks."""

    model: str
    precision: str
    accumulate: int = 1
    batch: int = 10  # which 3 and 4 ranks do not divide

    def recipe(self, steps: int) -> dict[str, Any]:
        # A bound that nothing reaches: the gradient's norm is then recorded.
        return tiny.recipe(
            self.model, batch=self.batch, accumulate=self.accumulate, precision=self.precision, clip_norm=1e9,
            train={"max_steps": steps},
        )  # fmt: skip


def run(cases: Sequence[Case], ranks: int, fault: str | None = None, steps: int = STEPS) -> list[paceline.History]:
    """Train them one after the other in one world of that many ranks."""
    launch = worlds.launch if fault is None else paceline.launch
    histories: list[paceline.History] = launch(_train_all, ranks=ranks, cases=cases, fault=fault, steps=steps)
    assert {len(history.losses) for history in histories} == {steps}
    return histories


def _train_all(cases: Sequence[Case], fault: str | None, steps: int) -> list[paceline.History]:
    if fault is not None:
        FAULTS[fault]()
    return [paceline.Trainer.from_config(paceline.Config.from_dict(case.recipe(steps))).train() for case in cases]


def difference(reference: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative one, in the steps of the other."""
    assert len(reference) == STEPS
    return max(abs(a - b) / abs(a) for a, b in zip(reference, other, strict=False))


def first_step_difference(reference: paceline.History, other: paceline.History, key: str) -> float:
    first, second = float(reference.steps[0][key]), float(other.steps[0][key])
    return abs(first - second) / abs(first)


def evaluation_difference(reference: paceline.History, other: paceline.History) -> float:
    """At the other's last evaluation."""
    step, second = other.evaluations[-1]["step"], float(other.evaluations[-1]["loss"])
    [first] = [float(each["loss"]) for each in reference.evaluations if each["step"] == step]
    return abs(first - second) / abs(first)


def fall(history: paceline.History) -> float:
    """How much of the first loss is gone at the end."""
    return 1.0 - sum(history.losses[-3:]) / 3 / history.losses[0]


def skipped(history: paceline.History) -> int:
    return sum(bool(record.get("skipped")) for record in history.steps)


def _mean_of_means() -> None:
    """Each rank's mean counts the same: what plain DDP computes, and the loss contract is there to prevent."""
    from dataclasses import replace

    from paceline.models.divisor import Divisor
    from paceline.train.loss_weights import LossWeights

    exact, ranks = LossWeights.backward, paceline.dist.world()

    def broken(self: Any, micro: Any, value: Any, weight: Any) -> Any:
        if weight is not None:
            value, weight = value if isinstance(weight, Divisor) else value / max(1.0, float(weight)), None
        micro = replace(micro, step_samples=max(1, micro.samples) * ranks, exact=True)
        return exact(self, micro, value, weight)

    LossWeights.backward = broken  # type: ignore[method-assign]  # in a rank's own process


def _no_set_epoch() -> None:
    """Ranks that shuffle by themselves: rank 0 forgets to tell its sampler the epoch."""
    from paceline.data.sample_order import FormulaOrder

    exact = FormulaOrder.epoch
    if paceline.dist.rank() == 0 and paceline.dist.world() > 1:
        FormulaOrder.epoch = lambda self, epoch, skip=0: exact(self, 0, skip)  # type: ignore[method-assign]


def _repeated_samples() -> None:
    """Ranks evened out by repeating samples, as DistributedSampler does."""
    from paceline.data import loader
    from paceline.plan.slicing import BatchSlice

    def share(indices: Sequence[Any], share: BatchSlice) -> Sequence[Any]:
        start, stop = share.rows
        even = -(-(share.group_stop - share.group_start) // paceline.dist.world())
        own = list(indices[start:stop])
        return own + own[:1] * (even - len(own))

    exact = loader.micro_of

    def counted(batch: Any, share: BatchSlice, *rest: Any) -> Any:
        micro = exact(batch, share, *rest)
        ranks = paceline.dist.world()
        even = -(-(share.group_stop - share.group_start) // ranks)
        micro.samples, micro.step_samples = even, even * ranks * share.groups
        return micro

    if paceline.dist.world() > 1:
        loader.own_or_placeholder, loader.micro_of = share, counted  # type: ignore[assignment]


FAULTS = {"mean of means": _mean_of_means, "no set_epoch": _no_set_epoch, "repeated samples": _repeated_samples}
