"""Forward and backward of a step's micro-batches. `optimizer_update.py` updates the parameters."""

from __future__ import annotations

from typing import Any

# The first optimizer step imports this, which takes a second: import it before ranks are forked.
from torch import Tensor

from paceline.data.loader import MicroBatch
from paceline.models.loss_module import LossModule
from paceline.parallel.model_parts import ModelParts
from paceline.run.heartbeat import counters
from paceline.runtime.generator_states import marks_now
from paceline.runtime.noise import NoiseContext
from paceline.train.hooks import Hooks, HookTable
from paceline.train.loss_weights import LossWeights, Weight


class TrainStep:
    """Runs the micro-batches of a step. `weights` keeps their losses."""

    run_zero_weight: Any = None  # of a pipeline: its pre-flight

    def __init__(
        self, module: LossModule, parts: ModelParts, weights: LossWeights, draw: NoiseContext, hooks: HookTable
    ) -> None:
        self.weights, self._module, self.draw, self.hooks = weights, module, draw, hooks
        self._forward, self._no_sync = parts.forward, parts.no_sync
        self._always_weighs = weights.is_shared or parts.slices
        self.checks: Any = None  # `first_step.LaterChecks`

    def reset(self) -> None:
        """Discard the micro-batches of an unfinished step."""
        self.weights.reset()

    def check_later(self, checks: Any) -> None:
        """Compare losses again after some steps."""
        self.checks = checks
        self.hooks.set(Hooks(name="later_checks", after_backward=checks.keep))

    def weigh(self, *, several: bool) -> None:
        """Weight means by what they were divided by, if a step averages several of them."""
        weighs = several or self._always_weighs
        if self._module.weighs is not weighs:
            self._module.weighs = weighs

    def add(self, micro: MicroBatch) -> Tensor:
        """Run forward and backward of a micro-batch and return its loss. The last one reduces the gradients."""
        draw, hooks = self.draw, self.hooks
        for hook in hooks.before_micro:
            hook(micro)
        for before in hooks.before_forward:
            before(not micro.group)
        if self._module.weighs is not (self._always_weighs or micro.group > 0 or not micro.last):
            self.weigh(several=not self._module.weighs)
        draw.begin(micro)
        counters.micros += 1
        if micro.last or self._no_sync is None:
            loss = self.weights.backward(micro, *self._forward(micro.batch))
        else:
            with self._no_sync():
                loss = self.weights.backward(micro, *self._forward(micro.batch))
        if draw.idle:
            draw.samples = None
        else:
            draw.end()
        if draw.watch is not None and (marks_now() != draw.before or draw.watch.checks_again):
            draw.look(micro)
        return loss

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Weight]:
        """Of a custom loop, which runs the backward with `weights`."""
        for before in self.hooks.before_forward:
            before(not micro.group)
        self.draw.begin_forward(micro)
        counters.micros += 1
        self.weigh(several=True)  # more micro-batches may follow
        result: tuple[Tensor, Weight] = self._forward(micro.batch)
        return result
