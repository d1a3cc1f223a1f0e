"""The optimizer of a run, and the tensors that it holds: parameters, or `HeldParams` in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from paceline.config.components import OPTIMIZERS, PRECISIONS
from paceline.config.recipe import Config
from paceline.errors import TrainError
from paceline.log import Log
from paceline.models.weights import convert_state
from paceline.optim.clip import total_norm
from paceline.optim.optimizers import build_optimizer, fill_momentum
from paceline.parallel.fsdp import reduced_check, track_used
from paceline.parallel.model_parts import ModelParts
from paceline.parallel.optimizer_binding import assign_shard_gradients, bind, names_of
from paceline.parallel.shards import is_primary_shard
from paceline.plan.layout import Degrees
from paceline.plan.passes import is_sharded
from paceline.precision import policies
from paceline.precision.policies import Scaler
from paceline.runtime import collectives
from paceline.runtime.mesh import Mesh
from paceline.train.checks import unsupported
from paceline.train.checks.preflight import unused_parameters_error


@dataclass
class BoundOptimizer:
    optimizer: Optimizer
    names: list[list[str]]  # of its parameters, by group
    is_users: bool
    held: HeldParams | None  # None: it holds the parameters of the model
    scaler: Scaler  # of the loss

    def adopt_groups(self, parts: ModelParts, log: Log) -> None:
        """Take over parameter groups that were added to the optimizer."""
        if self.held is not None:
            raise TrainError(
                "param-group-added",
                f"{type(self.optimizer).__name__}.add_param_group() was called after the Trainer was created.",
            )
        named = parts.named_parameters()
        unsupported.check_parameters(named, self.optimizer, log)
        self.names = _names_by_group(self.optimizer, names_of(named))
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        fill_momentum(self.optimizer)


def optimizer_of_stages(config: Config, model: nn.Module, degrees: Degrees) -> Optimizer | None:
    """The recipe's optimizer in a pipeline: parameter groups are formed from the full model, before this rank keeps
    only its stages."""
    return build_optimizer(model, config.optimizer, config.optimizer.lr) if degrees.pipeline > 1 else None


def bind_optimizer(
    parts: ModelParts, given: Optimizer | None, config: Config, mesh: Mesh, log: Log, *, is_users: bool
) -> BoundOptimizer:
    """The optimizer of the recipe, or one that was `given` the parameters of the full model, for the parameters that
    the layout has left on this rank."""
    optimizer = given or build_optimizer(parts.model, config.optimizer, config.optimizer.lr)
    facts = None if is_users else OPTIMIZERS.facts(config.optimizer.name)
    policies.prepare_optimizer(optimizer, config.precision)
    if config.channels_last:
        convert_state(optimizer)
    names = parts.names if given is not None else names_of(parts.named_parameters())
    if given is None and parts.stateful_loss is not None:
        unsupported.check_parameters(parts.named_parameters(), optimizer, log)
    held, by_group = None, _names_by_group(optimizer, names)  # before other tensors replace parameters
    if mesh.degrees.pipeline > 1:
        unsupported.require_separable(optimizer, facts, log)
    if is_sharded(config, mesh.degrees):
        local_names = {key: parts.aliases.get(name, name) for key, name in names.items()}
        tensors = bind(optimizer, local_names, parts.model, facts)
        several = mesh.degrees.world > 1
        allow_unused = config.unused_parameters == "allow" or not several
        used = track_used(parts.module) if allow_unused and several and isinstance(parts.module, FSDPModule) else None
        held = HeldParams(parts, tensors, mesh, allow_unused=allow_unused, used=used)
    fill_momentum(optimizer)
    # Ranks that see shards of the gradients agree on overflows.
    reduce_max = None if held is None else partial(collectives.all_reduce, op="max", group=mesh.step_group)
    scales = PRECISIONS.facts(config.precision).loss_scaling
    scaler = Scaler(mesh.device, config.scaler, enabled=scales, reduce_max=reduce_max)
    return BoundOptimizer(optimizer, by_group, is_users, held, scaler)


def _names_by_group(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    groups: list[Any] = optimizer.param_groups
    return [[names[id(parameter)] for parameter in group["params"]] for group in groups]


class HeldParams:
    """Parameters of the model, mapped to the tensors that the optimizer holds for them: local shards."""

    def __init__(
        self,
        parts: ModelParts,
        held: Mapping[Tensor, Tensor],
        mesh: Mesh,
        *,
        allow_unused: bool = True,
        used: set[nn.Parameter] | None = None,
    ) -> None:
        self._model, self._held, self._device, self._group = parts.model, held, mesh.device, mesh.step_group
        self._allow_unused = allow_unused
        self._require_reduced = reduced_check(parts.model)
        self._used = used  # in the backwards since the last step; None: gradients of unused parameters are None
        self._counted = {
            held.get(parameter, parameter)
            for name, parameter in parts.model.named_parameters()
            if name not in parts.tied_copies and is_primary_shard(parameter, mesh)
        }

    def held_of(self, parameter: Tensor) -> Tensor:
        """The tensor that the optimizer holds for `parameter`."""
        return self._held.get(parameter, parameter)

    def assign_gradients(self) -> None:
        """A parameter that is unused on this rank only is an error: FSDP2 would silently reduce the gradients of
        different parameters into each other."""
        self._require_reduced()
        if self._used is not None:
            self._drop_unused(self._used)
        if not assign_shard_gradients(self._held) and not self._allow_unused:
            names = [n for n, p in self._model.named_parameters() if p in self._held and p.requires_grad]
            raise unused_parameters_error(self._model, [n for n in names if self._model.get_parameter(n).grad is None])

    def _drop_unused(self, used: set[nn.Parameter]) -> None:
        """Remove the gradients of parameters that no rank has used, as on one rank."""
        parameters = list(self._model.parameters())
        flags = torch.tensor([parameter in used for parameter in parameters], dtype=torch.uint8, device=self._device)
        torch_dist.all_reduce(flags, op=torch_dist.ReduceOp.MAX, group=self._group)
        for parameter, flag in zip(parameters, flags.tolist(), strict=True):
            if not flag:
                parameter.grad = None
        used.clear()

    def norm_of(self, parameters: list[Tensor]) -> Callable[[list[Tensor]], Tensor]:
        """Return a function that computes the global norm of gradients of `parameters`, counting each shard once."""
        counted = [parameter in self._counted for parameter in parameters]

        def norm(gradients: list[Tensor]) -> Tensor:
            local = total_norm([gradient for gradient, counts in zip(gradients, counted, strict=True) if counts])
            square = local.to(self._device, torch.float64).square()
            torch_dist.all_reduce(square, group=self._group)
            # Not the local norm's dtype: a rank that counts no shard must get the same bits as the others.
            dtypes = [gradient.dtype for gradient in gradients]
            return square.sqrt().to(torch.float64 if torch.float64 in dtypes else torch.float32)

        return norm
