"""How a layer of a tensor-parallel model runs: on plain tensors, with this rank's shards of its weights.

`comm_ops.py` has the collectives before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from paceline.errors import LayoutError
from paceline.parallel.tensor.comm_ops import (
    all_gather_sequence,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_sequence,
)


def prepare(module: nn.Module, word: str, axis: DeviceMesh, sequence_parallel: bool) -> None:
    """Give the module a forward that computes on this rank's shards. (Instead of hooks: the parts belong together.)"""
    run = partial(_run, module, module.forward, axis)
    forward: Callable[..., Any]
    if word in ("column", "gathered") or (word == "vocabulary" and isinstance(module, nn.Linear)):
        forward = partial(_column, run, axis, word, sequence_parallel)
    elif word == "row":
        forward = partial(_row, module, run, axis, sequence_parallel)
    elif word == "vocabulary" and isinstance(module, nn.Embedding):
        forward = partial(_lookup, module, run, axis, sequence_parallel)
    elif word == "sequence" and sequence_parallel and isinstance(module, nn.Embedding):
        forward = partial(_own_tokens, run, axis, set(module._parameters))
    else:
        sums = word == "summed" or (word == "sequence" and sequence_parallel)
        forward = partial(run, summed=set(module._parameters) if sums else ())
    module.forward = wraps(module.forward)(forward)


def _run(
    module: nn.Module,
    inner: Callable[..., Any],
    axis: DeviceMesh,
    *inputs: Any,
    summed: Collection[str] = (),
    instead: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The module's own forward, which for once finds plain tensors under its parameters' names.

    An entry in an object's `__dict__` stands in front of what nn.Module looks up in `_parameters`, where wrappers such
    as FSDP put the weights of the moment.
    """
    seen = module.__dict__
    local = {
        key: _own(parameter, axis, key in summed)
        for key, parameter in module._parameters.items()
        if parameter is not None
    } | dict(instead or {})
    before = {key: seen[key] for key in local if key in seen}
    seen.update(local)
    try:
        return inner(*inputs, **options)
    finally:
        for key in local:
            del seen[key]
        seen.update(before)


def _own(parameter: Tensor, axis: DeviceMesh, summed: bool = False) -> Tensor:
    """This rank's shard of a parameter, differentiable. `summed`: ranks use it on different values."""
    assert isinstance(parameter, DTensor)
    own = parameter.to_local(grad_placements=parameter.placements)
    return copy_to_group(own, axis.get_group()) if summed else own


def _column(run: Callable[..., Tensor], axis: DeviceMesh, word: str, sequence_parallel: bool, inputs: Tensor) -> Tensor:
    group = axis.get_group()
    own = run(
        all_gather_sequence(inputs, _token_dim(inputs), group) if sequence_parallel else copy_to_group(inputs, group)
    )
    if word == "vocabulary":
        return DTensor.from_local(own, axis, [Shard(own.dim() - 1)], run_check=False)
    return own if word == "column" else gather_from_group(own, own.dim() - 1, group)


def _row(
    module: nn.Module, run: Callable[..., Tensor], axis: DeviceMesh, sequence_parallel: bool, inputs: Tensor
) -> Tensor:
    """The bias is added once, to the sum."""
    total = _reduce(run(inputs, instead={"bias": None}), axis, sequence_parallel)
    bias = module._parameters["bias"]
    return total if bias is None else total + _own(bias, axis, summed=sequence_parallel).to(total.dtype)


def _lookup(
    module: nn.Embedding, run: Callable[..., Tensor], axis: DeviceMesh, sequence_parallel: bool, tokens: Tensor
) -> Tensor:
    """Tokens that another rank holds count zero here."""
    rows = module.num_embeddings // axis.size()
    first = axis.get_local_rank() * rows
    own = tokens - first
    elsewhere = (own < 0) | (own >= rows)
    padding = module.padding_idx
    if padding is not None:
        padding = padding - first if first <= padding < first + rows else None
    values = run(own.masked_fill(elsewhere, 0), instead={"padding_idx": padding})
    return _reduce(values.masked_fill(elsewhere[..., None], 0.0), axis, sequence_parallel)


def _own_tokens(run: Callable[..., Tensor], axis: DeviceMesh, parameters: Collection[str], tokens: Tensor) -> Tensor:
    """An embedding of numbers that every rank has: this rank looks up its slice of them."""
    _require_even(tokens.shape[-1], axis)
    return run(tokens.chunk(axis.size(), -1)[axis.get_local_rank()], summed=parameters)


def _reduce(own: Tensor, axis: DeviceMesh, sequence_parallel: bool) -> Tensor:
    """The sum over the ranks: full, or this rank's slice of the tokens."""
    if not sequence_parallel:
        return reduce_from_group(own, axis.get_group())
    dim = _token_dim(own)
    _require_even(own.shape[dim], axis)
    return reduce_scatter_sequence(own, dim, axis.get_group())


def _token_dim(hidden: Tensor) -> int:
    """Of values (…, tokens, width)."""
    return hidden.dim() - 2


def _require_even(tokens: int, axis: DeviceMesh) -> None:
    if tokens % axis.size():
        raise LayoutError(
            "tokens-not-divisible",
            f"A sample has {tokens} tokens, which the tensor degree {axis.size()} does not divide.",
            why="between layers, each rank keeps the same number of tokens (sequence parallel)",
            fix="pad samples to a multiple of the tensor degree, or set tensor.sequence: false",
        )
