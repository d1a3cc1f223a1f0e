"""The layout of a run, once its model is there: `auto` is settled, and what can't be held is refused."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD, Adafactor, Optimizer

from paceline.config.recipe import Config
from paceline.config.sections import OptimizerSection as Settings
from paceline.errors import LayoutError
from paceline.models.size import size_of
from paceline.parallel.tensor.apply import check_plan
from paceline.plan import memory as plan_memory
from paceline.plan.layout import LayoutPlan
from paceline.plan.memory import MachineFacts
from paceline.plan.passes import require_allowed
from paceline.runtime import collectives
from paceline.runtime.device import memory_of
from paceline.runtime.process_group import World


def resolve(plan: LayoutPlan, config: Config, model: nn.Module, world: World, own: Optimizer | None) -> LayoutPlan:
    """A matter of all ranks: machines may differ, and the smallest one counts. `own` is an optimizer of the user's."""
    if own is not None:
        config = config.model_copy(update={"optimizer": _as_settings(own)})
    memory = min(collectives.all_gather_object(memory_of(world.device, world.rank_info.local_world)))
    return settle_on(plan, config, model, MachineFacts(world.size, world.rank_info.nodes, memory))


def settle_on(plan: LayoutPlan, config: Config, model: nn.Module, machine: MachineFacts) -> LayoutPlan:
    size = size_of(model, config.blocks, _tensor_degrees(config, model, machine.ranks))
    if config.strategy == "auto" and config.layout is None:
        plan = plan_memory.choose_layout(config, size, machine)
        require_allowed(config, plan)
    if config.strategy not in ("split", "dp"):
        plan_memory.require_fit(config, size, plan, machine)
    return plan


def _as_settings(own: Optimizer) -> Settings:
    """One in the recipe's words that keeps as much beside each weight; of one that is not known, as AdamW does."""
    if isinstance(own, SGD):
        return Settings(name="sgd", momentum=0.9 if any(group["momentum"] for group in own.param_groups) else None)
    return Settings(name="adafactor" if isinstance(own, Adafactor) else "adamw")


def _tensor_degrees(config: Config, model: nn.Module, ranks: int) -> list[int]:
    """Those that the model's plan allows."""
    allowed = []
    for degree in range(2, ranks + 1):
        try:
            if ranks % degree == 0:
                check_plan(model, config.tensor, degree)
                allowed.append(degree)
        except LayoutError:
            continue
    return allowed
