"""Power iterations of spectral norms, once per step.

A spectral norm improves its estimate in every forward. In a step of several micro-batches only the first one may do so,
or the weights would depend on their number.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm


class PowerIterations:
    """The spectral norms of a model, of both kinds: `torch.nn.utils.spectral_norm` and that of `parametrizations`."""

    def __init__(self, model: nn.Module) -> None:
        self._norms: list[tuple[Any, int]] = []
        self._owners: list[tuple[nn.Module, tuple[str, str]]] = []  # with the names of the buffers of the estimate
        for module in model.modules():
            for hook in module._forward_pre_hooks.values():
                if isinstance(hook, SpectralNorm):
                    self._norms.append((hook, hook.n_power_iterations))
                    self._owners.append((module, (f"{hook.name}_u", f"{hook.name}_v")))
            if isinstance(module, _SpectralNorm):
                self._norms.append((module, module.n_power_iterations))
                self._owners.append((module, ("_u", "_v")))

    def __bool__(self) -> bool:
        return bool(self._norms)

    def buffers(self) -> list[Tensor]:
        """The estimates."""
        found = [module._buffers.get(name) for module, names in self._owners for name in names]
        return [buffer for buffer in found if buffer is not None]

    @property
    def allowed(self) -> bool:
        return any(norm.n_power_iterations for norm, _ in self._norms)

    def allow(self, allowed: bool) -> None:
        """Whether the next forwards iterate. Without iterations they use the current estimate."""
        for norm, iterations in self._norms:
            norm.n_power_iterations = iterations if allowed else 0
