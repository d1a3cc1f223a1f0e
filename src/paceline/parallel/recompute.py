"""Recomputation: a block's activations are dropped after its forward and computed again in the backward.

| kind      | what is kept of a block                                                                   |
|-----------|-------------------------------------------------------------------------------------------|
| full      | its input                                                                                 |
| every-N   | its input, for every Nth block (from the first); all of the others                        |
| selective | results of matrix products, convolutions and attention; the cheap rest is computed again  |

It is torch's checkpoint around a block's forward, in place: no module is put around a block, so names stay. The second
forward gives the same bits as the first: dropout and `paceline.noise` draw again what they drew, and batch norms
leave their running statistics alone.

A block that is compiled as well runs compiled both times. Under `compile: model`, and where a `selective` block is
compiled, the compiler does it inside its graph, where nothing of Python can step in: a block that draws
`paceline.noise` has no place there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from paceline.errors import LayoutError
from paceline.models import huggingface
from paceline.models.blocks import find_blocks
from paceline.runtime import noise

_ATEN = torch.ops.aten
# What costs much to compute for the memory it takes.
_KEPT = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.baddbmm.default,
    _ATEN.convolution.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
}

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class Recomputed:
    """Stands in for a block's forward. `forward` is what it stands for."""

    def __init__(self, forward: Callable[..., Any], block: nn.Module, *, selective: bool) -> None:
        self.forward, self.selective = forward, selective
        self._norms = [part for part in block.modules() if isinstance(part, _NormBase)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if not torch.compiler.is_compiling():
            kwargs["context_fn"] = self._contexts
        elif self.selective:
            kwargs["context_fn"] = _selective
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)

    def _contexts(self) -> Contexts:
        """For the forward, and for the second one, which has to find the world as the first one did."""
        first, second = _selective() if self.selective else (nullcontext(), nullcontext())
        draw, modes = noise.current(), _get_current_function_mode_stack()
        return first, _again(None if draw is None else draw.copy(), modes, self._norms, second)


def recompute(model: nn.Module, kind: str, wanted: list[str] | None = None) -> str:
    """Change the model's blocks in place, to `kind` from whatever it was; says what was done."""
    blocks = find_blocks(model, wanted)
    if wanted == []:
        return f"recompute: {kind}, no blocks on this rank"
    if not blocks:
        raise LayoutError(
            "no-blocks",
            f"recompute is {kind}, but no blocks were found in the model {type(model).__name__}.",
            why="it goes by blocks: like layers in a list, of which each is computed again on its own",
            fix="name the modules: blocks: [encoder.layers.*], or leave recompute off",
        )
    every = _every(kind)
    count = 0
    for number, (_, block) in enumerate(blocks):
        _restore(block)
        if every and number % every == 0:
            block.forward = Recomputed(block.forward, block, selective=kind == "selective")
            count += 1
    summary = f"recompute: {kind}, {count} of {len(blocks)} blocks"
    cached = count > 0 and huggingface.disable_cache(model)
    return f"{summary}; the model's use_cache is off" if cached else summary


def _every(kind: str) -> int:
    """Of how many blocks one is recomputed; 0: none."""
    found = re.fullmatch(r"every-(\d+)", kind)
    return int(found.group(1)) if found else int(kind != "off")


def _restore(block: nn.Module) -> None:
    if isinstance(block.forward, Recomputed):
        original = block.forward.forward
        del block.forward  # an attribute of this block, before its class's own
        if original != block.forward:
            block.forward = original


def _keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


_selective = partial(create_selective_checkpoint_contexts, _keep)


@contextmanager
def _again(
    draw: noise.NoiseContext | None,
    modes: Sequence[TorchFunctionMode],
    norms: Sequence[nn.Module],
    inner: AbstractContextManager[Any],
) -> Iterator[None]:
    """The backward runs when the forward's contexts were left, on a GPU in a thread that never saw them. (Autocast is
    looked after by torch.)"""
    with ExitStack() as stack:
        if draw is not None:
            stack.enter_context(draw)
        active = _get_current_function_mode_stack()
        for mode in modes:
            if mode not in active:
                stack.enter_context(mode)
        stack.enter_context(_untracked(norms))
        stack.enter_context(inner)
        yield


@contextmanager
def _untracked(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Batch norms track into copies of their running statistics: the forward has counted these samples already."""
    kept = [(norm, dict(norm._buffers)) for norm in norms]
    for norm, buffers in kept:
        norm._buffers.update({key: None if buffer is None else buffer.clone() for key, buffer in buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in kept:
            norm._buffers.update(buffers)
