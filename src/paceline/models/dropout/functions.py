"""Replacements of torch's dropout, attention and uniform random numbers, with masks by sample.

They are installed in torch's namespaces while a step runs, so that a model needs no change: `nn.Dropout` calls
`torch.nn.functional.dropout`, which is looked up at each call. A function mode would see every operation of the model,
at a few microseconds each.

A call that cannot be computed by sample runs torch's function, and is noted. Each block of a model begins a scope:

    context = NoiseContext(seed, keys=by_sample(model, names, seed, device))

The blocks are the detected ones on every layout, whatever `blocks` in the recipe says: a mask depends on them.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter, functional

from paceline.models.dropout.mask import arrange, hash_elements, reading_of, threshold
from paceline.runtime import noise
from paceline.runtime.rng import Replacements
from paceline.runtime.sample_keys import VISIT, SampleKeys, Scope, active

_ALPHA = -1.7580993408473766  # what SELU returns for negative infinity
_attention = functional.scaled_dot_product_attention


def _active(training: bool, p: float) -> SampleKeys | None:
    """The keys to use; None: outside of a step, or nothing is dropped."""
    keys = active.keys
    if keys is None or not training or not 0.0 < p < 1.0:
        return None
    return keys if keys.samples or keys.wake() else None


def _mask(keys: SampleKeys, like: Tensor, shape: tuple[int, ...], p: float, what: str) -> Tensor | None:
    """A mask of `shape`, True for elements to keep; None if it cannot be computed by sample."""
    numbers = _numbers(keys, shape, like.device) if _is_plain(like) else None
    if numbers is None:
        keys.note(what, shape)
        return None
    return numbers >= threshold(p)


def _numbers(keys: SampleKeys, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
    """Uniform int32 numbers; None if no dim is certain to hold the samples in the model."""
    keys.used = True
    own = keys.own()
    reading = reading_of(keys, shape)
    if own is None or reading is None:
        return None
    call, batched = keys.calls, reading.shape
    keys.calls = call + 1
    return arrange(hash_elements(own.to(device), call, batched, keys.offsets_of(batched)), reading, shape)


def _is_plain(like: Tensor) -> bool:
    """Whether the shape of an activation is that of its elements: not so for those of vmap and of nested tensors."""
    if isinstance(like, (DTensor, Parameter)):
        return False
    return torch.compiler.is_compiling() or not (like.is_nested or torch._C._functorch.is_batchedtensor(like))


@cache
def _triton_kernel() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    from paceline.models.dropout import triton_kernel

    return triton_kernel


def _scaled_mask(keys: SampleKeys, like: Tensor, shape: tuple[int, ...], p: float, what: str) -> Tensor | None:
    """1 / (1 - p) for elements to keep and 0 for the others, in the dtype of `like`; None as above."""
    on_gpu = like.is_cuda and not torch.compiler.is_compiling() and _is_plain(like)
    kernel = _triton_kernel() if on_gpu else None
    mask: Tensor | None = None if kernel is None else kernel.scaled_mask(keys, like, shape, p)
    if mask is not None:
        return mask
    keep = _mask(keys, like, shape, p, what)
    return None if keep is None else keep.to(like.dtype) * (1.0 / (1.0 - p))


def _channels(input: Tensor) -> tuple[int, ...]:
    """The shape of a mask for whole channels."""
    return (*input.shape[:2], *[1] * (input.dim() - 2))


def _replace_dropout(original: Callable[..., Tensor], dims: int | None = None) -> Callable[..., Tensor]:
    """`dims`: those of a batch, if whole channels are dropped; an input without a batch dim is torch's."""

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        keys = _active(training, p)
        if keys is None or input.is_nested:
            return original(input, p, training, inplace)
        if dims not in (None, input.dim()):
            keys.note(original.__name__, tuple(input.shape))
            return original(input, p, training, inplace)
        shape = tuple(input.shape) if dims is None else _channels(input)
        mask = _scaled_mask(keys, input, shape, p, original.__name__)
        if mask is None:
            return original(input, p, training, inplace)
        return input.mul_(mask) if inplace else input * mask

    return dropout


def _replace_alpha_dropout(original: Callable[..., Tensor], *, channels: bool) -> Callable[..., Tensor]:
    def alpha_dropout(input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        keys = _active(training, p)
        if keys is None:
            return original(input, p, training, inplace)
        keep = _mask(keys, input, _channels(input) if channels else tuple(input.shape), p, original.__name__)
        if keep is None:
            return original(input, p, training, inplace)
        scale = 1.0 / math.sqrt((_ALPHA * _ALPHA * p + 1.0) * (1.0 - p))
        dropped = (~keep).to(input.dtype) * (_ALPHA * scale) - _ALPHA * scale * p
        kept = keep.to(input.dtype) * scale
        return input.mul_(kept).add_(dropped) if inplace else input * kept + dropped

    return alpha_dropout


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Fused kernels draw their own masks, so the probabilities are materialized, as torch does on a CPU."""
    keys = _active(True, dropout_p)
    takes_mask = not query.is_nested and not (is_causal and attn_mask is not None)  # the latter is an error
    if keys is not None and takes_mask and (keys.exact_attention or query.device.type == "cpu"):
        shape = (*query.shape[:-1], key.shape[-2])
        mask = _scaled_mask(keys, query, shape, dropout_p, "scaled_dot_product_attention")
        if mask is not None:
            if enable_gqa:
                key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
            scores = _scores(query, key, attn_mask, is_causal, scale)
            # Rows that are masked out entirely have weights of zero, as in torch.
            weights = scores.softmax(-1) if attn_mask is None else torch.ops.aten._safe_softmax(scores, -1)
            return (weights * mask).to(value.dtype) @ value
    elif keys is not None:
        keys.used, keys.fused_attention = True, True
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    return _attention(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask


# Stochastic depth: one number per sample, which models draw themselves.

_DIGITS = {torch.bfloat16: 8, torch.float16: 11}  # binary, as in torch.rand: more would be rounded up to 1


def _uniform(shape: tuple[int, ...], what: str, device: Any = None, dtype: Any = None) -> Tensor | None:
    """Numbers in [0, 1) by sample; None outside of a step, or if the first dim is not the samples in the model."""
    keys = active.keys
    if keys is None or noise.current() is None or not (keys.samples or keys.wake()):  # another thread reads data
        return None
    device = torch.get_default_device() if device is None else torch.device(device)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    fits = shape[:1] == (keys.samples,) and dtype.is_floating_point
    numbers = _numbers(keys, shape, device) if fits else None
    if numbers is None:
        keys.note(what, shape)
        return None
    digits = _DIGITS.get(dtype, 24)
    return ((numbers >> (32 - digits)).bitwise_and_((1 << digits) - 1).to(torch.float64) * 2.0**-digits).to(dtype)


def _replace_rand(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rand(*size: Any, **options: Any) -> Tensor:
        shape = options.get("size", size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size)
        drawn = None
        if not options.keys() - {"size", "device", "dtype"}:
            drawn = _uniform(tuple(shape), "torch.rand", options.get("device"), options.get("dtype"))
        return original(*size, **options) if drawn is None else drawn

    return rand


def _replace_rand_like(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rand_like(input: Tensor, **options: Any) -> Tensor:
        drawn = None if options else _uniform(tuple(input.shape), "torch.rand_like", input.device, input.dtype)
        return original(input, **options) if drawn is None else drawn

    return rand_like


def _replace_bernoulli(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def bernoulli(input: Tensor, *args: Any, **options: Any) -> Tensor:
        drawn = None
        if not args and not options and input.is_floating_point():
            drawn = _uniform(tuple(input.shape), "torch.bernoulli", input.device, torch.float64)
        return original(input, *args, **options) if drawn is None else (drawn < input).to(input.dtype)

    return bernoulli


def _replace_bernoulli_(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def bernoulli_(self: Tensor, p: Any = 0.5, **options: Any) -> Tensor:
        drawn = None
        if not options and (isinstance(p, Tensor) or 0.0 <= p <= 1.0):
            drawn = _uniform(tuple(self.shape), "Tensor.bernoulli_", self.device, torch.float64)
        return original(self, p, **options) if drawn is None else self.copy_(drawn < p)

    return bernoulli_


class Replaced(Replacements):
    """While entered, torch's functions are replaced by those of this module."""

    def __init__(self) -> None:
        super().__init__()
        f = functional
        self.add(f, "dropout", _replace_dropout(f.dropout))
        for name, dims in (("dropout1d", 3), ("dropout2d", 4), ("dropout3d", 5)):
            self.add(f, name, _replace_dropout(getattr(f, name), dims))
        self.add(f, "alpha_dropout", _replace_alpha_dropout(f.alpha_dropout, channels=False))
        self.add(f, "feature_alpha_dropout", _replace_alpha_dropout(f.feature_alpha_dropout, channels=True))
        self.add(f, "scaled_dot_product_attention", attention)
        self.add(torch, "rand", _replace_rand(torch.rand))
        self.add(torch, "rand_like", _replace_rand_like(torch.rand_like))
        self.add(torch, "bernoulli", _replace_bernoulli(torch.bernoulli))
        self.add(Tensor, "bernoulli_", _replace_bernoulli_(Tensor.bernoulli_))


replaced = Replaced()

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
