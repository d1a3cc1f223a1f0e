"""Muon for hidden matrices and AdamW for all other parameters, as one optimizer.

Muon replaces the momentum of a matrix by the nearest orthogonal matrix, which is intended for weights that map hidden
vectors to hidden vectors. Embeddings, the output layer, norms, biases and convolutions use AdamW. Muon's updates are
scaled to the RMS of AdamW's (`match_rms_adamw`), so both share one learning rate and one weight decay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class MuonAdamW(torch.optim.Optimizer):
    """Both parts share the `param_groups` and the state of this optimizer.

    Groups are fixed at construction, because `add_param_group` cannot tell which part a parameter belongs to.
    """

    def __init__(
        self,
        hidden: dict[str, Any],
        rest: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        fused: bool,
    ) -> None:
        muon = torch.optim.Muon([hidden], lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self._parts: list[torch.optim.Optimizer] = [muon]
        if rest:
            self._parts.append(torch.optim.AdamW(rest, lr=lr, betas=betas, fused=fused))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Share the groups and the state of this optimizer with its parts; the first group is Muon's."""
        for part, groups in zip(self._parts, (self.param_groups[:1], self.param_groups[1:]), strict=False):
            part.param_groups, part.state = groups, self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # replaces the groups and the state
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


def hidden_matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The 2-D parameters that are neither an embedding (or tied to one) nor the output layer."""
    outside = [module.weight for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    head = _output_layer(model)
    if head is not None:
        outside.append(head.weight)
    excluded = {id(weight) for weight in outside}
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.dim() == 2 and id(parameter) not in excluded
    ]


def _output_layer(model: nn.Module) -> nn.Linear | None:
    """The last linear layer, unless it is inside a block of an `nn.ModuleList`.

    Such a model has no separate output layer: its output is a tied embedding, or hidden vectors.
    """
    modules = dict(model.named_modules())
    linears = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    if not linears:
        return None
    blocks = [name for name in modules if isinstance(modules.get(name.rpartition(".")[0]), nn.ModuleList)]
    if any(linears[-1].startswith(f"{block}.") for block in blocks):
        return None
    last = modules[linears[-1]]
    return last if isinstance(last, nn.Linear) else None
