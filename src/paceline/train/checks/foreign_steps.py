"""Optimizer steps and gradients that do not come from the Trainer.

On several ranks, `loss.backward(); optimizer.step()` beside a Trainer updates each rank with its own gradients. The
first such step is refused. Gradients that another backward leaves behind never enter a step of the Trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from paceline.errors import TrainError
from paceline.log import Log
from paceline.parallel.dynamic_ddp import GradientMark, marks_of
from paceline.runtime import collectives

_INSPECTED = 3  # steps: what a loop does to gradients, it does from the beginning
# A later Trainer may use the same optimizer. Trainers that no longer exist do not guard it.
_Owners = list["ref[Stepping]"]
_OWNERS: WeakKeyDictionary[torch.optim.Optimizer, _Owners] = WeakKeyDictionary()


class Stepping(Protocol):
    """What steps the optimizer on behalf of a Trainer."""

    is_changing: bool


def refuse_foreign_steps(optimizer: torch.optim.Optimizer, owner: Stepping) -> None:
    """Raise when `optimizer` is stepped by anything but its owners, for as long as one of them exists."""
    owners = _OWNERS.setdefault(optimizer, [])
    owners.append(ref(owner))
    if len(owners) == 1 and hasattr(optimizer, "_optimizer_step_pre_hooks"):  # otherwise torch did not initialize it
        optimizer.register_step_pre_hook(RequireOwner(owners))


@dataclass(eq=False)
class RequireOwner:
    """The hook on the steps of an optimizer that refuses all but those of its owners."""

    owners: _Owners

    def __call__(self, optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        for reference in self.owners:
            owner = reference()
            if owner is not None and owner.is_changing:
                return
        del owner  # or the traceback would keep it alive
        if any(reference() is not None for reference in self.owners):
            raise TrainError(
                "foreign-step",
                f"{type(optimizer).__name__}.step() was called directly, but a Trainer owns this optimizer.",
            )


class GradientInspector:
    """Looks at gradients in a custom loop, in which other code may run between any two calls of the Trainer."""

    _trainer_backwards = 0  # of all Trainers

    def __init__(self, parameters: Sequence[Tensor], discard: Callable[[], bool], log: Log) -> None:
        self._parameters, self._discard, self._log = parameters, discard, log
        self._seen = 0  # of them, after the last one of this Trainer
        self._said: set[bool] = set()
        self._left = _INSPECTED
        self._marks: list[GradientMark] | None = None  # of the gradients after the last backward
        self._changed = False  # by others, since the first backward of the step

    def begin_step(self) -> None:
        """Discard gradients from elsewhere, as zero_grad() before a step does."""
        self._changed = False
        if self._discard():
            by_trainer = GradientInspector._trainer_backwards != self._seen
            if by_trainer not in self._said:
                self._said.add(by_trainer)
                text = "gradients that {} left in the parameters are discarded before a step"
                if by_trainer:  # as in adversarial training
                    self._log.info(text.format("the backward of another Trainer"))
                else:
                    fix = "add an auxiliary loss to the result of trainer.forward(batch), or compute it in loss_fn"
                    self._log.warning(f"{text.format('a backward outside the Trainer')}; {fix}")

    def after_backward(self, *, last: bool) -> None:
        """A backward of this Trainer is done. Unless it was the last one of its step, the loop continues before it."""
        GradientInspector._trainer_backwards += 1
        self._seen = GradientInspector._trainer_backwards
        self._marks = None
        if self._left and last:
            self._left -= 1
        elif self._left:
            self._marks = marks_of(self._parameters)

    def continue_step(self, *, may_change: bool) -> None:
        """Call before another micro-batch or the update of a step: its gradients must not be gone, nor changed before
        the last backward."""
        if not any(parameter.grad is not None for parameter in self._parameters):
            raise TrainError(
                "gradients-cleared",
                "The gradients of this step were set to None or zero_grad() was called before its optimizer step.",
            )
        parts = zip(self._marks or (), self._parameters, strict=False)
        changed = any(not mark.holds_for(parameter.grad) for mark, parameter in parts)
        if changed and not may_change:
            raise TrainError(
                "gradients-changed",
                "Gradients were changed between the micro-batches of a step.",
                why="another backward, that of a second Trainer for example, would be counted in this step",
                fix="run all micro-batches of a step (accumulate) before anything else computes gradients of the same "
                "parameters",
            )
        self._changed |= changed

    def inspect(self, factor: Callable[[], Tensor | float], *, scaled: bool, replicated: bool) -> None:
        """Look at what happened to the gradients since the first backward. Collective.

        `factor` returns what they are yet to be multiplied by. `scaled`: they have a loss scale as well. `replicated`:
        they should be equal on every rank.
        """
        if not self._left:
            return
        self._left -= 1
        changed = self._changed
        if replicated and collectives.world() > 1:
            by_rank = collectives.all_gather_object([changed, _norm(self._parameters)])
            changed = any(one[0] for one in by_rank)
            if changed and len({norm for _, norm in by_rank}) > 1:
                raise TrainError(
                    "not-reduced",
                    "Gradients were changed after trainer.backward(), and now differ between ranks.",
                    why="a backward of one's own is not reduced, so parameters would diverge between ranks",
                    fix="add the auxiliary loss to the result of trainer.forward(batch) and pass the sum to "
                    "trainer.backward(); change gradients in the same way on every rank",
                )
        if changed and (scaled or float(factor()) != 1.0):
            raise TrainError(
                "gradients-changed",
                "Gradients were changed between trainer.backward() and trainer.step().",
                why="they are not yet divided by the loss scale and by the weight of all micro-batches of the step",
                fix="clip with clip_norm or clip_value; add an auxiliary loss to the result of trainer.forward(batch)",
            )


def _norm(parameters: Iterable[Tensor]) -> float:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64).cpu() for gradient in gradients]
    return float(torch.stack(norms).norm()) if norms else 0.0
