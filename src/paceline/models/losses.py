"""A loss is a sum and a weight.

The gradient of a step is Σsum / Σweight over every rank and micro-batch, so any split of the same batch gives the same
step. A model may return a plain mean, from which the sum is made with the number of samples; where samples weigh
differently (padding tokens), it returns a `Loss`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Loss(NamedTuple):
    """The sum of a loss over what it was computed on, and how much that weighs (samples, tokens, …)."""

    sum: Tensor
    weight: Tensor | float
