"""Gradient clipping without device synchronization.

Every element is first clamped to ±`value`, then all gradients are scaled so that their norm is at most `norm`. The
results match torch's clip_grad_value_ and clip_grad_norm_ up to rounding, at a fraction of their cost on small models:
few multi-tensor calls, and gradients are grouped by device and dtype only if these differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

TINY = 1e-6  # avoids division by zero; the value that torch uses


@torch.no_grad()
def clip(
    gradients: list[Tensor],
    norm: float | None,
    value: float | None,
    known_norm: Tensor | None = None,
    norm_of: Callable[[list[Tensor]], Tensor] | None = None,
) -> Tensor | None:
    """Clip in place. Returns the norm before clipping, if known.

    `known_norm` is the norm of the gradients, if the caller already has it. Clipping by value invalidates it, so it is
    recomputed if `norm` is set. `norm_of` computes the norm of sharded gradients.
    """
    groups = _by_kind(gradients)
    if value is not None:
        for group in groups:
            torch._foreach_clamp_min_(group, -value)
            torch._foreach_clamp_max_(group, value)
    if norm is None:
        return known_norm
    if known_norm is not None and value is None:
        total = known_norm
    else:
        total = _norm(groups) if norm_of is None else norm_of(gradients)
    # norm / (total + TINY), at most 1; in place, because operators take twice the time.
    factor = (total + TINY).reciprocal_().mul_(norm).clamp_(max=1.0)
    for group in groups:
        torch._foreach_mul_(group, factor if len(groups) == 1 else factor.to(group[0].device))
    return total


@torch.no_grad()
def total_norm(gradients: list[Tensor]) -> Tensor:
    """The 2-norm of all gradients as a single vector, on the device of the first one."""
    return _norm(_by_kind(gradients))


def _norm(groups: list[list[Tensor]]) -> Tensor:
    """In at least float32: the sum of squares of a large half-precision gradient overflows."""
    if not groups:
        return torch.zeros(())
    norms: list[Tensor] = []
    for group in groups:
        dtype = torch.float32 if group[0].dtype.itemsize < 4 else None
        norms.extend(torch._foreach_norm(group, 2.0, dtype))
    if len(groups) > 1:
        device = groups[0][0].device
        norms = [norm.to(device) for norm in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _by_kind(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Group by device and dtype, as torch's multi-tensor kernels require."""
    kinds = dict.fromkeys((gradient.device, gradient.dtype) for gradient in gradients)
    if len(kinds) == 1:
        return [gradients]
    return [[gradient for gradient in gradients if (gradient.device, gradient.dtype) == kind] for kind in kinds]
