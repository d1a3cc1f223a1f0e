"""Gradients and norms of sharded parameters: over all ranks, or with local steps over those of a replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from paceline.guard.preflight import unused_parameters_error
from paceline.optim.clip import total_norm
from paceline.parallel.optimizer_binding import assign_shard_gradients
from paceline.parallel.shards import is_primary_shard
from paceline.runtime.mesh import Mesh


class ShardedParams:
    """The model's sharded parameters, mapped to the tensors that the optimizer holds for them."""

    def __init__(
        self,
        model: nn.Module,
        held: Mapping[Tensor, Tensor],
        mesh: Mesh,
        copies: frozenset[str],
        *,
        allow_unused: bool = True,
        used: set[nn.Parameter] | None = None,
    ) -> None:
        self._model, self._held, self._device, self._group = model, held, mesh.device, mesh.step_group
        self._allow_unused = allow_unused
        self._used = used  # in the backwards since the last step; None: gradients of unused parameters are None
        self._counted = {
            held.get(parameter, parameter)
            for name, parameter in model.named_parameters()
            if name not in copies and is_primary_shard(parameter, mesh)
        }

    def held_of(self, parameter: Tensor) -> Tensor:
        """The tensor that the optimizer holds for `parameter`."""
        return self._held.get(parameter, parameter)

    def assign_gradients(self) -> None:
        """A parameter that is unused on this rank only is an error: FSDP2 would silently reduce the gradients of
        different parameters into each other."""
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
