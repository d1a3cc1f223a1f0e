"""Power iterations of spectral norms, once per step.

A spectral norm improves its estimate in every forward. In a step of several micro-batches only the first one may do so,
or the weights would depend on their number.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm


class PowerIterations:
    """The spectral norms of a model, of both kinds: `torch.nn.utils.spectral_norm` and that of `parametrizations`."""

    def __init__(self, model: nn.Module) -> None:
        hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
        norms: list[Any] = [*hooks, *model.modules()]
        kinds = (SpectralNorm, _SpectralNorm)
        self._norms = [(norm, norm.n_power_iterations) for norm in norms if isinstance(norm, kinds)]

    def __bool__(self) -> bool:
        return bool(self._norms)

    @property
    def allowed(self) -> bool:
        return any(norm.n_power_iterations for norm, _ in self._norms)

    def allow(self, allowed: bool) -> None:
        """Whether the next forwards iterate. Without iterations they use the current estimate."""
        for norm, iterations in self._norms:
            norm.n_power_iterations = iterations if allowed else 0
