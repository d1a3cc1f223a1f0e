"""Requires that all ranks run modules with collectives in the same order.

FSDP2 gathers a block when it is called, and a synchronized batch norm gathers statistics. Ranks that call different
modules at the same time (experts chosen by the sample) would exchange weights of different modules, without an error if
their shapes agree.

In the first forward of each kind (training, evaluation, a function of the user), ranks compare every module before it
runs. Later forwards are compared with this order on each rank, which is free. A forward that departs from it
(stochastic depth, for example) is compared with the other ranks again, from its first departure on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from paceline.config.recipe import Config
from paceline.errors import LayoutError
from paceline.parallel.sync_batchnorm import SynchronizedNorm
from paceline.runtime import collectives
from paceline.runtime.mesh import Mesh
from paceline.runtime.method_check import Departures
from paceline.text import by_rank

_END = -1
Hook = Callable[..., Any]


def check_order(step: nn.Module, mesh: Mesh, config: Config) -> None:
    """Watch all modules whose forward is collective. Collective: must be called on every rank.

    The stages of a pipeline run by a schedule, which is the same on every rank.
    """
    if mesh.degrees.world == 1 or mesh.degrees.pipeline > 1:
        return
    modules = [(name, module) for name, module in step.named_modules() if name]
    norms = [each for each in modules if isinstance(each[1], SynchronizedNorm)]
    shards = [each for each in modules if isinstance(each[1], FSDPModule)]
    if shards or norms:
        names = {module: name.removeprefix("model.") for name, module in [*norms, *shards]}
        departures = Departures(config.timeout, torch_dist.get_process_group_ranks(mesh.step_group))
        ModuleOrder(step, names, departures, mesh, norms=len(norms), compiled=bool(config.compile))


class ModuleOrder:
    """Watches the calls of `modules` (and their names) during the forward of `root`.

    The first `norms` of them are batch norms, which are collective in training mode only. `compiled`: keep the hooks
    out of torch.compile's graphs.
    """

    def __init__(
        self,
        root: nn.Module,
        modules: Mapping[nn.Module, str],
        departures: Departures,
        mesh: Mesh,
        *,
        norms: int,
        compiled: bool,
    ) -> None:
        self._names, self._departures, self._mesh, self._norms = [*modules.values()], departures, mesh, norms
        self._known: dict[tuple[bool, bool, str], list[int]] = {}  # the order of each kind of forward
        self._kind = (True, True, "")
        self._expected: list[int] = []
        self._seen: list[int] = []
        self._position = 0
        self._running = self._compares = False
        outside_graph: Callable[[Hook], Hook] = torch.compiler.disable if compiled else lambda hook: hook
        root.register_forward_pre_hook(outside_graph(self._begin), prepend=True, with_kwargs=True)
        root.register_forward_hook(outside_graph(self._end))
        for number, module in enumerate(modules):
            # Before the hook in which FSDP2 gathers the module.
            module.register_forward_pre_hook(outside_graph(partial(self._before, number)), prepend=True)

    def _begin(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running = root.training or len(self._names) > self._norms
        function = args[1] if len(args) > 1 else kwargs.get("function")
        name = getattr(function, "__qualname__", type(function).__name__)
        self._kind = (root.training, torch.is_grad_enabled(), name)
        expected = self._known.get(self._kind)
        self._position, self._compares = 0, expected is None
        self._expected, self._seen = expected or [], []

    def _before(self, number: int, module: nn.Module, args: Any) -> None:
        # Not running: recomputed in the backward. A batch norm in evaluation mode gathers nothing.
        if not self._running or (self._norms and number < self._norms and not module.training):
            return
        if self._compares:
            self._compare(number)
        elif self._expected[self._position : self._position + 1] != [number]:
            self._depart(number)
        self._position += 1

    def _end(self, root: nn.Module, args: Any, output: Any) -> None:
        if self._running:
            if self._compares:
                self._compare(_END)
                self._known.setdefault(self._kind, self._seen)
            elif self._position != len(self._expected):
                self._depart(_END)
        self._running = False

    def _compare(self, number: int) -> None:
        """Compare with the other ranks, which are all about to do the same."""
        pair, group = torch.tensor([number, -number], device=self._mesh.device), self._mesh.step_group
        torch_dist.all_reduce(pair, op=torch_dist.ReduceOp.MAX, group=group)
        highest, lowest = pair.tolist()
        if highest != -lowest:
            calls = collectives.all_gather_object(self._name(number), group)
            table = by_rank(calls, ranks=torch_dist.get_process_group_ranks(group))
            raise _error(f"In the same place of the forward, ranks called different modules:\n{table}")
        if number != _END:
            self._seen.append(number)

    def _depart(self, number: int) -> None:
        """Ask the other ranks whether they depart from the order as well; they may wait in the usual collective."""
        agreed, ranks = self._departures.joined_by(f"{self._position}/{number}"), len(self._departures.members)
        if agreed < ranks:
            place = self._position
            usual = self._name(self._expected[place] if place < len(self._expected) else _END)
            raise _error(
                f"This rank called {self._name(number)} after {place} other modules, where the first forward called "
                f"{usual}; {agreed} of {ranks} ranks did the same."
            )
        self._compares = True

    def _name(self, number: int) -> str:
        return "no further module" if number == _END else self._names[number]


def _error(what: str) -> LayoutError:
    return LayoutError("different-modules", what)
