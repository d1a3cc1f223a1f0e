"""Compares the order in which ranks gather the units of FSDP.

A gather matches ranks by order alone. If ranks run different units (experts chosen by the samples), the shapes fit and
each rank gets a unit made of shards of several, without an error. So in the pre-flight every rank announces a unit
before it gathers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from paceline.errors import LayoutError
from paceline.runtime import collectives

_END = "(end of the forward)"


def units_of(root: nn.Module) -> dict[str, list[Any]]:
    """The parameter groups of each unit of FSDP, by the name of its module."""
    units = {}
    for name, module in root.named_modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # newer torch
            groups = [state._fsdp_param_group] if groups is None else groups
            units[name.removeprefix("model.") or "the rest of the model"] = [each for each in groups if each]
    return {name: groups for name, groups in units.items() if groups}


@contextmanager
def compared(root: nn.Module, group: collectives.Group) -> Iterator[list[str]]:
    """Compare each unit that a forward in this context gathers, before it does. The list receives their names, in the
    order that all ranks have agreed on. Collective within `group`."""
    order: list[str] = []
    units = units_of(root)
    # Not a hook of the module: torch.compile would keep it in its graph.
    for name, param_groups in units.items():
        for each in param_groups:
            each.pre_forward = _announcing(name, each.pre_forward, order, group)
    try:
        yield order
        if units:
            _require_same_unit(_END, group)
    finally:
        for param_groups in units.values():
            for each in param_groups:
                del each.pre_forward


def _announcing(
    name: str, gather: Callable[..., Any], order: list[str], group: collectives.Group
) -> Callable[..., Any]:
    def pre_forward(*arguments: Any) -> Any:
        _require_same_unit(name, group)
        order.append(name)
        return gather(*arguments)

    return pre_forward


def _require_same_unit(name: str, group: collectives.Group) -> None:
    names = collectives.all_gather_object([collectives.rank(), name], group)
    if len({unit for _, unit in names}) > 1:
        raise unit_order_error("\n".join(f"    rank {rank}: {unit}" for rank, unit in names))


def unit_order_error(by_rank: str) -> LayoutError:
    """`by_rank`: a line for each rank, with the unit that it is about to gather."""
    return LayoutError(
        "different-units",
        f"Ranks are about to gather different parameters:\n{by_rank}",
        why="FSDP gathers a unit from all ranks at once and matches them by order, so every rank must run the same "
        "modules in the same order; otherwise it trains on a mixture of their parameters",
        fix="run these modules on every rank (on an empty or masked part of the batch), name the blocks to shard "
        "without them (blocks: […]), or use strategy: ddp with unused_parameters: allow",
    )
