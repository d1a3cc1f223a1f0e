"""Activation checkpointing: activations of a block are dropped after its forward and recomputed in the backward.

| kind      | saved activations of a block                                                      |
|-----------|-----------------------------------------------------------------------------------|
| full      | its input                                                                         |
| every-N   | its input, for every Nth block, starting with the first; everything of the others |
| selective | outputs of matrix products, convolutions and attention                            |

Blocks that are single layers would save nothing: a layer's input is all that it keeps. In an nn.Sequential, groups of
layers are recomputed instead, with the activations between them; elsewhere paceline warns.

The forward of each block is wrapped in torch's checkpoint, in place, so module names are unchanged. The second forward
is bitwise identical to the first: dropout and `paceline.noise` draw the same numbers, and running statistics of batch
norms are not updated again.

A compiled block runs compiled both times. With `compile: model`, and for compiled `selective` blocks, recomputation
happens inside the graph, where `paceline.noise` is not supported.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from math import isqrt
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from paceline.errors import LayoutError
from paceline.models import huggingface
from paceline.models.spec import find_blocks
from paceline.models.weights import PowerIterations
from paceline.parallel.model_parts import ModelParts, PassContext

_ATEN = torch.ops.aten
# Expensive to recompute relative to the memory of their outputs.
_SAVED_OPS = {
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

# They keep their input for the backward, and nothing else that recomputing them would free.
_SINGLE = (nn.Linear, nn.Bilinear, nn.Embedding, nn.PReLU, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _ConvNd, _NormBase)
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class RecomputedForward:
    """Replaces the forward of a block, which is kept as `forward`."""

    def __init__(self, forward: Callable[..., Any], block: nn.Module, *, selective: bool) -> None:
        self.forward, self.selective = forward, selective
        self._norms = [part for part in block.modules() if isinstance(part, _NormBase)]
        self._power = PowerIterations(block)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if not torch.compiler.is_compiling():
            kwargs["context_fn"] = self._contexts
        elif self.selective:
            kwargs["context_fn"] = _selective
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)

    def _contexts(self) -> Contexts:
        """Contexts of the first and the second forward; the second restores the state that the first one saw."""
        first, cached = _selective() if self.selective else (nullcontext(), None)
        return first, _Again(self._norms, self._power, cached)


class GroupedForward:
    """Replaces the forward of an nn.Sequential whose children are recomputed in groups."""

    def __init__(self, groups: list[nn.Sequential]) -> None:
        self.groups = groups

    def __call__(self, input: Any) -> Any:
        for group in self.groups:
            input = group.forward(input)  # of the children only: the hooks are those of the whole
        return input


class _Again:
    """Context of the forward in a backward. A double backward (gradient penalty) enters it more than once.

    The backward runs outside the contexts of the forward, on a GPU in another thread. torch restores autocast.
    """

    def __init__(
        self, norms: Sequence[nn.Module], power: PowerIterations, cached: AbstractContextManager[Any] | None
    ) -> None:
        self._modes = _get_current_function_mode_stack()
        self._norms, self._power, self._cached = norms, power, cached
        self._entered: list[ExitStack] = []
        self._count = 0

    def __enter__(self) -> None:
        self._count += 1
        if self._cached is not None and self._count > 1:
            raise LayoutError(
                "selective-double-backward",
                'recompute="selective" recomputes a block once, but a second backward went through it.',
            )
        with ExitStack() as stack:
            active = _get_current_function_mode_stack()
            for mode in self._modes:
                if mode not in active:
                    stack.enter_context(mode)
            stack.enter_context(_without_tracking(self._norms))
            if self._power:
                stack.enter_context(_with_estimate(self._power))
            if self._cached is not None:
                stack.enter_context(self._cached)
            self._entered.append(stack.pop_all())

    def __exit__(self, *raised: Any) -> bool | None:
        return self._entered.pop().__exit__(*raised)


def apply_recompute(parts: ModelParts, context: PassContext) -> str:
    return recompute(parts.model, context.config.recompute, parts.blocks, context.log.warning)


def recompute(
    model: nn.Module, kind: str, names: list[str] | None = None, warn: Callable[[str], None] = warnings.warn
) -> str:
    """Set the kind of recomputation of the blocks, in place. Returns a summary for the log."""
    blocks = find_blocks(model, names)
    if names == []:
        return f"recompute: {kind}, no blocks on this rank"
    if not blocks:
        raise LayoutError("no-blocks", f"recompute is {kind}, but {type(model).__name__} has no blocks.")
    for module in model.modules():
        _restore(module)
    single = [(name, block) for name, block in blocks if isinstance(block, _SINGLE)]
    every = _every(kind)
    # FSDP2 gathers layers inside of a group, which torch's selective checkpoints do not expect.
    can_group = every and names is None and kind != "selective" and single == blocks
    groups = _group_layers(model, single) if can_group else []
    chosen = (groups or [block for _, block in blocks])[::every] if every else []
    for block in chosen:
        block.forward = RecomputedForward(block.forward, block, selective=kind == "selective")
    count = len(chosen)
    summary = f"recompute: {kind}, {count} of {len(groups or blocks)} {'groups of layers' if groups else 'blocks'}"
    if chosen and single == blocks and not groups:
        name, block = blocks[0]
        error = LayoutError(
            "recompute-saves-nothing",
            f"recompute is {kind}, but each block is a single layer: {name} is {type(block).__name__}.",
        )
        warn(str(error))
    cached = count > 0 and huggingface.disable_cache(model)
    return f"{summary}; disabled use_cache" if cached else summary


def _group_layers(model: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> list[nn.Module]:
    """Let each nn.Sequential with such layers run its children in groups: about as many as a group has layers, so that
    the inputs of all groups and the activations within one take the least memory. None if a layer is elsewhere."""
    modules, parents = dict(model.named_modules()), {name.rpartition(".")[0] for name, _ in layers}
    if any(type(modules[name]).forward is not nn.Sequential.forward for name in parents):
        return []
    found: list[nn.Module] = []
    for name, sequential in modules.items():  # in the order of the model, alike on every rank
        is_inside = any(name != outer and (not outer or name.startswith(f"{outer}.")) for outer in parents)
        if name not in parents or is_inside:
            continue
        children = list(sequential.children())
        starts = [at for at, child in enumerate(children) if any(True for _ in child.parameters())]
        each = -(-len(starts) // isqrt(len(starts)))
        edges = [0, *starts[each::each], len(children)]
        groups = [nn.Sequential(*children[start:end]) for start, end in pairwise(edges)]
        sequential.forward = GroupedForward(groups)
        found += [group for group in groups if len(group) > 1]
    return found


def _every(kind: str) -> int:
    """N, if every Nth block is recomputed; 0 if none is."""
    found = re.fullmatch(r"every-(\d+)", kind)
    return int(found.group(1)) if found else int(kind != "off")


def _restore(block: nn.Module) -> None:
    if isinstance(block.forward, GroupedForward):
        del block.forward
    if isinstance(block.forward, RecomputedForward):
        original = block.forward.forward
        del block.forward  # the attribute of the instance, which shadows that of the class
        if original != block.forward:
            block.forward = original


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE


_selective = partial(create_selective_checkpoint_contexts, _policy)


@contextmanager
def _with_estimate(power: PowerIterations) -> Iterator[None]:
    """Let spectral norms use the estimate of the first forward."""
    allowed = power.allowed
    power.allow(False)
    try:
        yield
    finally:
        power.allow(allowed)


@contextmanager
def _without_tracking(norms: Sequence[nn.Module]) -> Iterator[None]:
    """Let batch norms update copies of their running statistics: the first forward already counted these samples."""
    kept = [(norm, dict(norm._buffers)) for norm in norms]
    for norm, buffers in kept:
        norm._buffers.update({key: None if buffer is None else buffer.clone() for key, buffer in buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in kept:
            norm._buffers.update(buffers)
