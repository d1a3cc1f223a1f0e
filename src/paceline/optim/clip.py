"""Gradient clipping without waiting for the device.

The order is written down once: first every entry is clipped to ±`value`, then the whole is scaled down to `norm`. The
results are those of torch's clip_grad_value_ and clip_grad_norm_ to rounding, for a part of their cost on small
models: all gradients go through few calls, and they are sorted by device and dtype only where these differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TINY = 1e-6  # keeps the division finite for a gradient of zero; torch's value


@torch.no_grad()
def clip(
    gradients: list[Tensor],
    norm: float | None,
    value: float | None,
    known_norm: Tensor | None = None,
    norm_of: Callable[[list[Tensor]], Tensor] | None = None,
) -> Tensor | None:
    """Clip in place; returns the norm before it was clipped, where it is known.

    `known_norm` is the gradients' norm, for callers that have it already. After clipping by value it no longer holds
    and is worked out again, if `norm` asks for it, by `norm_of` where these are pieces of gradients.
    """
    alike = _alike(gradients)
    if value is not None:
        for group in alike:
            torch._foreach_clamp_min_(group, -value)
            torch._foreach_clamp_max_(group, value)
    if norm is None:
        return known_norm
    if known_norm is not None and value is None:
        total = known_norm
    else:
        total = _norm(alike) if norm_of is None else norm_of(gradients)
    # norm / (total + TINY), at most 1, spelled in place: the operators cost twice as much.
    factor = (total + TINY).reciprocal_().mul_(norm).clamp_(max=1.0)
    for group in alike:
        torch._foreach_mul_(group, factor if len(alike) == 1 else factor.to(group[0].device))
    return total


@torch.no_grad()
def total_norm(gradients: list[Tensor]) -> Tensor:
    """The 2-norm of all gradients as one vector, on the first one's device."""
    return _norm(_alike(gradients))


def _norm(alike: list[list[Tensor]]) -> Tensor:
    """In float32, or float64 where a gradient is: the sum of squares of a large half-precision gradient overflows."""
    if not alike:
        return torch.zeros(())
    norms: list[Tensor] = []
    for group in alike:
        dtype = torch.float32 if group[0].dtype.itemsize < 4 else None
        norms.extend(torch._foreach_norm(group, 2.0, dtype))
    if len(alike) > 1:
        device = alike[0][0].device
        norms = [norm.to(device) for norm in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _alike(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Lists of one device and dtype each, which is what torch's multi-tensor kernels take; mostly it is one list."""
    kinds = dict.fromkeys((gradient.device, gradient.dtype) for gradient in gradients)
    if len(kinds) == 1:
        return [gradients]
    return [[gradient for gradient in gradients if (gradient.device, gradient.dtype) == kind] for kind in kinds]
