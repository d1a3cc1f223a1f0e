"""Installs dropout by sample in a model: torch's functions are replaced, and each block begins a scope.

    context = NoiseContext(seed, keys=by_sample(model, names, seed, device))

The blocks are the detected ones on every layout, whatever `blocks` in the recipe says: a mask depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import nn

from paceline.models.dropout.functions import replaced
from paceline.runtime.sample_keys import VISIT, SampleKeys, Scope

Named = tuple[str, nn.Module]


def by_sample(model: nn.Module, names: Sequence[str], seed: int, device: torch.device) -> SampleKeys:
    """`names`: the blocks of the full model, some of which may be on other ranks."""
    keys = SampleKeys(seed, device, names)
    here = dict(model.named_modules())
    keys.time_major = any(getattr(part, "batch_first", True) is False for part in here.values())  # attention, recurrent
    keys.installed = _Installed(keys, [(name, here[name]) for name in names if name in here])
    return keys


class ScopedForward:
    """Replaces the forward of a block: calls within it belong to its scope."""

    def __init__(self, forward: Callable[..., Any], keys: SampleKeys, inside: Scope, after: Scope) -> None:
        self.forward, self._keys, self._inside, self._after = forward, keys, inside, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        keys, inside = self._keys, self._inside
        first = inside.visits * VISIT
        inside.visits += 1
        keys.current, keys.calls = inside, first
        result = self.forward(*args, **kwargs)
        keys.current, keys.calls = self._after, first
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy of the model, or a file of it, has the forward of the user."""
        return copy, (self.forward,)


class _Installed:
    """Entered while a training loop runs. Afterwards the model is as the user passed it."""

    def __init__(self, keys: SampleKeys, blocks: Sequence[Named]) -> None:
        self._keys, self._blocks = keys, blocks
        self._before: list[Any] = []

    def __enter__(self) -> None:
        keys = self._keys
        replaced.__enter__()
        for name, block in self._blocks:
            self._before.append(block.__dict__.get("forward"))
            block.__dict__["forward"] = ScopedForward(block.forward, keys, keys.inside[name], keys.after[name])

    def __exit__(self, *error: object) -> None:
        replaced.__exit__()
        for (_, block), before in zip(self._blocks, self._before, strict=True):
            if before is None:
                del block.__dict__["forward"]
            else:
                block.__dict__["forward"] = before
        self._before = []
