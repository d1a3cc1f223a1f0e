"""Measures the peak memory of saved activations over a forward and a backward pass."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.models.gpt import GPT


class Saved(TorchDispatchMode):
    """Bytes that forwards make, the second ones of recomputed blocks too, for as long as somebody holds them. What a
    backward makes does not count: it runs without recording gradients, by which it is told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled():
            given = {tensor.untyped_storage()._cdata for tensor in tree_leaves(args) if isinstance(tensor, Tensor)}
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                    self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self._now += size
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._now -= size


def measure(model: nn.Module, tokens: Tensor) -> int:
    with Saved() as saved:
        loss = model(tokens, tokens)["loss"]
        loss.backward()
    model.zero_grad(set_to_none=True)
    return saved.peak


# Of a gpt's block without dropout, in units of its input: the input itself, both norms' outputs, query, key and value,
# attention's output, the sum behind it, and the feed-forward layer's four before and after its GELU.
BLOCK = 1 + 2 + 3 + 1 + 1 + 4 + 4
# What `selective` keeps: the input, and results of all four matrix products and of attention.
SELECTIVE = 1 + (3 + 1 + 4 + 1) + 1


def formula(model: GPT, tokens: Tensor, kind: str) -> float:
    """Kept of all blocks plus what the head needs; or kept of the first k plus all of block k, computed again."""
    width, vocabulary = model.tokens.weight.shape[1], model.tokens.weight.shape[0]
    unit = tokens.numel() * width * 4
    every = int(kind.removeprefix("every-")) if kind.startswith("every-") else 1
    kept, again = [], []
    for number in range(len(model.blocks)):
        changed = kind != "off" and number % every == 0
        kept.append(BLOCK if not changed else SELECTIVE if kind == "selective" else 1)
        # Results of the projections back into the residual are kept by `selective`, and needed by nobody.
        again.append(0 if not changed else BLOCK - SELECTIVE + 2 if kind == "selective" else BLOCK - 1)
    head = 2 + 2 * vocabulary / width
    return unit * max(sum(kept) + head, *(sum(kept[: k + 1]) + again[k] for k in range(len(kept))))
