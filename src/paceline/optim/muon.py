"""Muon for hidden matrices and AdamW for all the rest, as one optimizer.

Muon replaces the momentum of a matrix by the nearest orthogonal matrix, which makes sense for weights that map hidden
vectors to hidden vectors. Embeddings, the output layer, norms, biases and convolutions stay with AdamW. Muon's step is
scaled to the size that AdamW's usually has (`match_rms_adamw`), so one learning rate and one weight decay fit both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class MuonAdamW(torch.optim.Optimizer):
    """Looks like one optimizer: `param_groups` are the very groups of both parts, and so is the state.

    Groups are fixed at construction: `add_param_group` could not know which part a parameter belongs to.
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
        """Let the parts work on this optimizer's groups and state; the first group is Muon's."""
        for part, groups in zip(self._parts, (self.param_groups[:1], self.param_groups[1:]), strict=False):
            part.param_groups, part.state = groups, self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # makes new groups and a new state
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
    """The trainable 2-D parameters that are neither an embedding (or tied to one) nor the output layer."""
    outside = [module.weight for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    head = _output_layer(model)
    if head is not None:
        outside.append(head.weight)
    excluded = {id(weight) for weight in outside}
    return [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dim() == 2 and id(parameter) not in excluded
    ]


def _output_layer(model: nn.Module) -> nn.Linear | None:
    """The last linear layer, unless it lies in a block of an `nn.ModuleList`.

    Then the model has no output layer of its own: its output is a tied embedding, or hidden vectors.
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
