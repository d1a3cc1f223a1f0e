"""`paceline.dist`: rank, world size and collectives. The same calls work on one rank and on many.

    from paceline import dist

    dist.all_reduce(tensor, op="mean")     # or ReduceOp.AVG; in place, as torch's are
    settings = dist.broadcast_object(settings)

With one rank no process group is needed. With several, the first collective initializes it if the user has not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as torch_dist
from torch import Tensor

from paceline.errors import WorldError
from paceline.runtime import objects
from paceline.runtime.collective_calls import Group as Group
from paceline.runtime.collective_calls import (
    Op,
    Work,
    begin,
    debug,
    division,
    end,
    is_initialized,
    is_main,
    local_rank,
    rank,
    reduce_op,
    world,
)

__all__ = [
    "Work", "all_gather", "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast", "broadcast_object",
    "debug", "gather", "is_initialized", "is_main", "local_rank", "main_first", "rank", "reduce", "reduce_scatter",
    "scatter", "world",
]  # fmt: skip


def barrier(group: Group = None, async_op: bool = False) -> Work | None:
    """Wait until every rank has called it.

    Args:
        group: a process group of torch.distributed; default: all ranks
        async_op: whether to return at once; the result is valid after `wait()` of the returned handle

    Returns:
        A handle with `async_op`, otherwise None.

    Raises:
        WorldError: `world.different-collectives`: another rank calls another collective

    Example:
        >>> dist.barrier()
    """
    if not begin("barrier", None, "", group):
        return end(async_op)
    return end(async_op, torch_dist.barrier(group=group, async_op=async_op))


def all_reduce(tensor: Tensor, op: Op = "sum", group: Group = None, async_op: bool = False) -> Work | None:
    """Reduce `tensor` across all ranks, in place; every rank receives the result.

    Args:
        tensor: of the same shape and dtype on every rank
        op: `"sum"`, `"mean"`, `"max"`, `"min"` or `"product"`; or one of torch's `ReduceOp`
        group: a process group of torch.distributed; default: all ranks
        async_op: whether to return at once; the result is valid after `wait()` of the returned handle

    Returns:
        A handle with `async_op`, otherwise None, as in torch: the result is in `tensor`.

    Raises:
        WorldError: `world.different-collectives`; `world.bad-op`, `world.not-a-tensor`, `world.mean-of-integers`

    Example:
        >>> mean = torch.tensor([float(dist.rank())])
        >>> dist.all_reduce(mean, op="mean")
        >>> mean.item() == (dist.world() - 1) / 2
        True
    """
    name, torch_op = reduce_op(op, tensor)
    if not begin("all_reduce", tensor, name, group):
        return end(async_op)
    handle = torch_dist.all_reduce(tensor, torch_op, group=group, async_op=async_op)
    objects.keep(tensor)
    return end(async_op, handle, finish=division(name, tensor, group))


def reduce(tensor: Tensor, dst: int = 0, op: Op = "sum", group: Group = None, async_op: bool = False) -> Work | None:
    """Reduce `tensor` into the tensor of rank `dst`; that of other ranks is undefined afterwards.

    Args:
        tensor: of the same shape and dtype on every rank
        dst: the rank that receives the result
        op: `"sum"`, `"mean"`, `"max"`, `"min"` or `"product"`; or one of torch's `ReduceOp`
        group: a process group of torch.distributed; default: all ranks
        async_op: whether to return at once; the result is valid after `wait()` of the returned handle

    Returns:
        A handle with `async_op`, otherwise None.

    Raises:
        WorldError: `world.bad-rank`, `world.bad-op`; `world.different-collectives`

    Example:
        >>> ranks = torch.ones(1)
        >>> dist.reduce(ranks, dst=0)
        >>> not dist.is_main() or ranks.item() == dist.world()
        True
    """
    name, torch_op = reduce_op(op, tensor)
    if not begin("reduce", tensor, f"{name} dst={dst}", group, peer=dst):
        return end(async_op)
    handle = torch_dist.reduce(tensor, dst, torch_op, group=group, async_op=async_op)
    return end(async_op, handle, finish=division(name, tensor, group) if rank() == dst else None)


def broadcast(tensor: Tensor, src: int = 0, group: Group = None, async_op: bool = False) -> Work | None:
    """Copy the tensor of rank `src` to `tensor` on every rank.

    Args:
        tensor: of the same shape and dtype on every rank
        src: the rank whose values all receive
        group: a process group of torch.distributed; default: all ranks
        async_op: whether to return at once; the result is valid after `wait()` of the returned handle

    Returns:
        A handle with `async_op`, otherwise None.

    Raises:
        WorldError: `world.bad-rank`; `world.different-collectives`

    Example:
        >>> values = torch.full((2,), float(dist.rank()))
        >>> dist.broadcast(values, src=0)
        >>> values.tolist()
        [0.0, 0.0]
    """
    if not begin("broadcast", tensor, f"src={src}", group, peer=src):
        return end(async_op)
    objects.keep(tensor)
    return end(async_op, torch_dist.broadcast(tensor, src, group=group, async_op=async_op))


def all_gather(tensors: list[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False) -> Work | None:
    """Gather `tensor` of rank r in `tensors[r]`, on every rank.

    Args:
        tensors: one tensor per rank, of the shape of `tensor`
        tensor: of the same shape and dtype on every rank
        group: a process group of torch.distributed; default: all ranks
        async_op: whether to return at once; the result is valid after `wait()` of the returned handle

    Returns:
        A handle with `async_op`, otherwise None.

    Raises:
        WorldError: `world.bad-list`; `world.different-collectives`

    Example:
        >>> gathered = [torch.zeros(1) for _ in range(dist.world())]
        >>> dist.all_gather(gathered, torch.tensor([float(dist.rank())]))
        >>> [each.item() for each in gathered] == list(range(dist.world()))
        True
    """
    if not begin("all_gather", tensor, "", group, lists=[tensors]):
        tensors[0].copy_(tensor)
        return end(async_op)
    objects.keep(tensor, *tensors)
    return end(async_op, torch_dist.all_gather(tensors, tensor, group=group, async_op=async_op))


def gather(
    tensor: Tensor, tensors: list[Tensor] | None = None, dst: int = 0, group: Group = None, async_op: bool = False
) -> Work | None:
    """Gather `tensor` of rank r in `tensors[r]` on rank `dst`; other ranks pass no list.

    Args:
        tensor: of the same shape and dtype on every rank
        tensors: on rank `dst`, one tensor per rank
        dst: the rank that receives all of them
        group: a process group of torch.distributed; default: all ranks
        async_op: whether to return at once; the result is valid after `wait()` of the returned handle

    Returns:
        A handle with `async_op`, otherwise None.

    Raises:
        WorldError: `world.bad-list`, `world.bad-rank`; `world.different-collectives`

    Example:
        >>> gathered = [torch.zeros(1) for _ in range(dist.world())] if dist.is_main() else None
        >>> dist.gather(torch.ones(1), gathered, dst=0)
    """
    gathered = tensors if rank() == dst else None
    if not begin("gather", tensor, f"dst={dst}", group, peer=dst, lists=[tensors] if rank() == dst else []):
        assert gathered is not None
        gathered[0].copy_(tensor)
        return end(async_op)
    return end(async_op, torch_dist.gather(tensor, gathered, dst, group=group, async_op=async_op))


def scatter(
    tensor: Tensor, tensors: list[Tensor] | None = None, src: int = 0, group: Group = None, async_op: bool = False
) -> Work | None:
    """Copy `tensors[r]` of rank `src` to `tensor` on rank r; other ranks pass no list.

    Args:
        tensor: receives the values
        tensors: on rank `src`, one tensor per rank
        src: the rank that sends
        group: a process group of torch.distributed; default: all ranks
        async_op: whether to return at once; the result is valid after `wait()` of the returned handle

    Returns:
        A handle with `async_op`, otherwise None.

    Raises:
        WorldError: `world.bad-list`, `world.bad-rank`; `world.different-collectives`

    Example:
        >>> parts = [torch.tensor([float(rank)]) for rank in range(dist.world())] if dist.is_main() else None
        >>> part = torch.zeros(1)
        >>> dist.scatter(part, parts, src=0)
        >>> part.item() == dist.rank()
        True
    """
    scattered = tensors if rank() == src else None
    if not begin("scatter", tensor, f"src={src}", group, peer=src, lists=[tensors] if rank() == src else []):
        assert scattered is not None
        tensor.copy_(scattered[0])
        return end(async_op)
    return end(async_op, torch_dist.scatter(tensor, scattered, src, group=group, async_op=async_op))


def reduce_scatter(
    tensor: Tensor, tensors: list[Tensor], op: Op = "sum", group: Group = None, async_op: bool = False
) -> Work | None:
    """Reduce `tensors[r]` of every rank into `tensor` on rank r.

    Args:
        tensor: receives the result
        tensors: one tensor per rank
        op: `"sum"`, `"mean"`, `"max"`, `"min"` or `"product"`; or one of torch's `ReduceOp`
        group: a process group of torch.distributed; default: all ranks
        async_op: whether to return at once; the result is valid after `wait()` of the returned handle

    Returns:
        A handle with `async_op`, otherwise None.

    Raises:
        WorldError: `world.bad-list`, `world.bad-op`; `world.different-collectives`

    Example:
        >>> part = torch.zeros(1)
        >>> dist.reduce_scatter(part, [torch.ones(1) for _ in range(dist.world())])
        >>> part.item() == dist.world()
        True
    """
    name, torch_op = reduce_op(op, tensor)
    if not begin("reduce_scatter", tensor, name, group, lists=[tensors]):
        tensor.copy_(tensors[0])
        return end(async_op)
    handle = torch_dist.reduce_scatter(tensor, tensors, torch_op, group=group, async_op=async_op)
    return end(async_op, handle, finish=division(name, tensor, group))


def all_to_all(received: list[Tensor], sent: list[Tensor], group: Group = None, async_op: bool = False) -> Work | None:
    """Send `sent[r]` to rank r, and receive in `received[r]` what rank r sent to this rank.

    Args:
        received: one tensor per rank
        sent: one tensor per rank
        group: a process group of torch.distributed; default: all ranks
        async_op: whether to return at once; the result is valid after `wait()` of the returned handle

    Returns:
        A handle with `async_op`, otherwise None.

    Raises:
        WorldError: `world.bad-list`; `world.different-collectives`

    Example:
        >>> received = [torch.zeros(1) for _ in range(dist.world())]
        >>> dist.all_to_all(received, [torch.tensor([float(dist.rank())]) for _ in range(dist.world())])
        >>> [each.item() for each in received] == list(range(dist.world()))
        True
    """
    if not begin("all_to_all", None, "", group, lists=[sent, received]):
        received[0].copy_(sent[0])
        return end(async_op)
    if torch_dist.get_backend(group) != "gloo":
        return end(async_op, torch_dist.all_to_all(received, sent, group=group, async_op=async_op))
    # gloo does not support lists here, so exchange them point to point.
    this = torch_dist.get_rank(group)
    received[this].copy_(sent[this])
    peers = [peer for peer in range(len(sent)) if peer != this]
    handles = [torch_dist.irecv(received[peer], group=group, group_src=peer) for peer in peers]
    handles += [torch_dist.isend(sent[peer], group=group, group_dst=peer) for peer in peers]
    return end(async_op, *handles)


def broadcast_object(value: Any, src: int = 0, group: Group = None) -> Any:
    """The value of rank `src`, on every rank. It is sent as JSON.

    Args:
        value: numbers, strings, lists and dicts; ignored on other ranks
        src: the rank whose value all receive
        group: a process group of torch.distributed; default: all ranks

    Returns:
        The value, on every rank.

    Raises:
        WorldError: `world.not-json`, `world.bad-rank`

    Example:
        >>> dist.broadcast_object({"lr": 0.1} if dist.is_main() else None)
        {'lr': 0.1}
    """
    if not begin("broadcast_object", None, f"src={src}", group, peer=src):
        return objects.decode(objects.encode(value))
    return objects.broadcast(value, src, group)


def all_gather_object(value: Any, group: Group = None) -> list[Any]:
    """The values of all ranks, in rank order, sent as JSON.

    Args:
        value: numbers, strings, lists and dicts
        group: a process group of torch.distributed; default: all ranks

    Returns:
        A list with the value of each rank.

    Raises:
        WorldError: `world.not-json`

    Example:
        >>> dist.all_gather_object(dist.rank()) == list(range(dist.world()))
        True
    """
    if not begin("all_gather_object", None, "", group):
        return [objects.decode(objects.encode(value))]
    return objects.all_gather(value, group)


@contextmanager
def main_first() -> Iterator[None]:
    """Context manager that runs its body on rank 0 first, and then on the others: to download or preprocess data once.

    Yields:
        Nothing.

    Raises:
        WorldError: `world.main-failed`: the body failed on rank 0, so other ranks did not run it

    Example:
        >>> with dist.main_first():
        ...     folder = "data"
    """
    if is_main():
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            broadcast_object(succeeded)
    elif broadcast_object(None):
        yield
    else:
        raise WorldError("main-failed", f"Rank 0 failed inside main_first(), so rank {rank()} skipped its body.")
