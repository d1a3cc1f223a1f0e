"""`paceline.dist`: rank facts and collectives, the same calls on one rank and on many.

    from paceline import dist

    dist.all_reduce(tensor, op="mean")     # in place, as torch's are
    settings = dist.broadcast_object(settings)

In a world of one each gives what its definition gives for one rank, without a process group. In a larger one the
group opens at the first collective if nobody opened it. `dist.debug(True)`, or PACELINE_DEBUG=1, makes every call
first compare operation, shape and dtype between the ranks and name those that differ.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch.distributed as torch_dist
from torch import Tensor

from paceline.errors import WorldError
from paceline.runtime import consistency, environment, objects, process_group

Op = Literal["sum", "mean", "max", "min", "product"]
Group = torch_dist.ProcessGroup | None

_OPS = {
    "sum": torch_dist.ReduceOp.SUM,
    "mean": torch_dist.ReduceOp.SUM,  # divided afterwards: gloo has no average
    "max": torch_dist.ReduceOp.MAX,
    "min": torch_dist.ReduceOp.MIN,
    "product": torch_dist.ReduceOp.PRODUCT,
}

_debug: bool | None = None


class Work:
    """What an asynchronous call returns: `wait()` until the result is there."""

    def __init__(self, handle: Any = None, finish: Any = None) -> None:
        self._handle = handle
        self._finish = finish

    def wait(self) -> None:
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
        if self._finish is not None:
            self._finish()
            self._finish = None

    def is_completed(self) -> bool:
        return self._handle is None or bool(self._handle.is_completed())


def rank() -> int:
    # An open group knows, and asking it is a tenth of the cost of reading the environment.
    return torch_dist.get_rank() if torch_dist.is_initialized() else process_group.current_place().rank


def world() -> int:
    return torch_dist.get_world_size() if torch_dist.is_initialized() else process_group.current_place().world


def local_rank() -> int:
    return process_group.current_place().local_rank


def is_main() -> bool:
    return rank() == 0


def is_initialized() -> bool:
    """Whether a process group is open."""
    return torch_dist.is_initialized()


def debug(on: bool) -> None:
    """Switch the comparison of calls between ranks on or off, on every rank alike."""
    global _debug
    _debug = on


def _debugging() -> bool:
    return environment.debug_enabled() if _debug is None else _debug


def barrier(group: Group = None, async_op: bool = False) -> Work | None:
    """Wait until every rank is here."""
    if not _several(group):
        return _done(async_op)
    _compare("barrier", None, "", group)
    return _finish(torch_dist.barrier(group=group, async_op=async_op), async_op)


def all_reduce(tensor: Tensor, op: Op = "sum", group: Group = None, async_op: bool = False) -> Work | None:
    """Combine `tensor` over the ranks, in place; every rank gets the result."""
    reduce_op = _reduce_op(op, tensor)
    if not _several(group):
        return _done(async_op)
    _compare("all_reduce", tensor, op, group)
    handle = torch_dist.all_reduce(tensor, reduce_op, group=group, async_op=async_op)
    objects.keep(tensor)
    return _finish(handle, async_op, _division(op, tensor, group))


def reduce(tensor: Tensor, dst: int = 0, op: Op = "sum", group: Group = None, async_op: bool = False) -> Work | None:
    """Combine `tensor` over the ranks into rank `dst`'s tensor; the others' is undefined afterwards."""
    reduce_op = _reduce_op(op, tensor)
    if not _several(group, peer=dst):
        return _done(async_op)
    _compare("reduce", tensor, f"{op} dst={dst}", group)
    handle = torch_dist.reduce(tensor, dst, reduce_op, group=group, async_op=async_op)
    return _finish(handle, async_op, _division(op, tensor, group) if rank() == dst else None)


def broadcast(tensor: Tensor, src: int = 0, group: Group = None, async_op: bool = False) -> Work | None:
    """Fill `tensor` on every rank with rank `src`'s."""
    if not _several(group, peer=src):
        return _done(async_op)
    _compare("broadcast", tensor, f"src={src}", group)
    objects.keep(tensor)
    return _finish(torch_dist.broadcast(tensor, src, group=group, async_op=async_op), async_op)


def all_gather(tensors: list[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False) -> Work | None:
    """Fill `tensors[r]` with rank r's `tensor`, on every rank."""
    several = _several(group)
    _require_length("all_gather", tensors, group)
    if not several:
        tensors[0].copy_(tensor)
        return _done(async_op)
    _compare("all_gather", tensor, "", group)
    objects.keep(tensor, *tensors)
    return _finish(torch_dist.all_gather(tensors, tensor, group=group, async_op=async_op), async_op)


def gather(
    tensor: Tensor,
    tensors: list[Tensor] | None = None,
    dst: int = 0,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Fill rank `dst`'s `tensors[r]` with rank r's `tensor`; the others give no list."""
    several = _several(group, peer=dst)
    if rank() == dst:
        _require_length("gather", tensors, group)
    if not several:
        assert tensors is not None
        tensors[0].copy_(tensor)
        return _done(async_op)
    _compare("gather", tensor, f"dst={dst}", group)
    handle = torch_dist.gather(tensor, tensors if rank() == dst else None, dst, group=group, async_op=async_op)
    return _finish(handle, async_op)


def scatter(
    tensor: Tensor,
    tensors: list[Tensor] | None = None,
    src: int = 0,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Fill `tensor` on rank r with rank `src`'s `tensors[r]`; the others give no list."""
    several = _several(group, peer=src)
    if rank() == src:
        _require_length("scatter", tensors, group)
    if not several:
        assert tensors is not None
        tensor.copy_(tensors[0])
        return _done(async_op)
    _compare("scatter", tensor, f"src={src}", group)
    handle = torch_dist.scatter(tensor, tensors if rank() == src else None, src, group=group, async_op=async_op)
    return _finish(handle, async_op)


def reduce_scatter(
    tensor: Tensor, tensors: list[Tensor], op: Op = "sum", group: Group = None, async_op: bool = False
) -> Work | None:
    """Combine every rank's `tensors[r]` into rank r's `tensor`."""
    reduce_op, several = _reduce_op(op, tensor), _several(group)
    _require_length("reduce_scatter", tensors, group)
    if not several:
        tensor.copy_(tensors[0])
        return _done(async_op)
    _compare("reduce_scatter", tensor, op, group)
    handle = torch_dist.reduce_scatter(tensor, tensors, reduce_op, group=group, async_op=async_op)
    return _finish(handle, async_op, _division(op, tensor, group))


def all_to_all(received: list[Tensor], sent: list[Tensor], group: Group = None, async_op: bool = False) -> Work | None:
    """Fill `received[r]` with what rank r had in its `sent` for this rank."""
    several = _several(group)
    _require_length("all_to_all", sent, group)
    _require_length("all_to_all", received, group)
    if not several:
        received[0].copy_(sent[0])
        return _done(async_op)
    _compare("all_to_all", None, "", group)
    if torch_dist.get_backend(group) != "gloo":
        return _finish(torch_dist.all_to_all(received, sent, group=group, async_op=async_op), async_op)
    # gloo has no list form of it: the same exchange as one receive and one send a peer.
    me = torch_dist.get_rank(group)
    received[me].copy_(sent[me])
    peers = [peer for peer in range(len(sent)) if peer != me]
    works = [torch_dist.irecv(received[peer], group=group, group_src=peer) for peer in peers]
    works += [torch_dist.isend(sent[peer], group=group, group_dst=peer) for peer in peers]
    return _finish(_All(works), async_op)


class _All:
    """Several handles as one."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()

    def is_completed(self) -> bool:
        return all(handle.is_completed() for handle in self._handles)


def broadcast_object(value: Any, src: int = 0, group: Group = None) -> Any:
    """Rank `src`'s value on every rank. It travels as JSON: numbers, strings, lists, dicts."""
    if not _several(group, peer=src):
        return objects.decode(objects.encode(value))
    _compare("broadcast_object", None, f"src={src}", group)
    return objects.broadcast(value, src, group)


def all_gather_object(value: Any, group: Group = None) -> list[Any]:
    """Every rank's value, in the order of ranks, as JSON."""
    if not _several(group):
        return [objects.decode(objects.encode(value))]
    _compare("all_gather_object", None, "", group)
    return objects.all_gather(value, group)


@contextmanager
def main_first() -> Iterator[None]:
    """Rank 0 runs the body before the others: to download or prepare something once.

    An error on rank 0 passes through; the others then do not run the body but end with an error that says so.
    """
    if not is_main():
        if not broadcast_object(None):
            raise WorldError(
                "main-failed",
                f"Rank 0 failed inside main_first(), so rank {rank()} did not go on.",
                fix="rank 0's own error says what happened",
            )
        yield
        return
    try:
        yield
    except BaseException:
        broadcast_object(False)
        raise
    broadcast_object(True)


def _several(group_: Group, peer: int | None = None) -> bool:
    """Whether there is anyone to talk to; opens the launcher's group at the first call."""
    if not 0 <= (peer or 0) < world():
        raise WorldError("bad-rank", f"There is no rank {peer} in a world of {world()}.")
    if group_ is not None:
        _require_member(rank(), group_)
        if peer is not None:
            _require_member(peer, group_)
    if _size(group_) == 1:
        return False
    if not torch_dist.is_initialized():
        process_group.init_world()
    return True


def _require_member(rank_: int, group_: Any) -> None:
    """torch gives ranks outside a new group a marker instead of a group."""
    members = torch_dist.get_process_group_ranks(group_) if isinstance(group_, torch_dist.ProcessGroup) else []
    if rank_ not in members:
        raise WorldError(
            "not-in-group",
            f"Rank {rank_} is not in the group of this call{f', ranks {members}' if members else ''}.",
            fix="call it on the group's members only, with src and dst among them, as ranks of the world",
        )


def _size(group_: Group) -> int:
    return torch_dist.get_world_size(group_) if torch_dist.is_initialized() else world()


def _reduce_op(op: str, tensor: Tensor) -> Any:
    if not isinstance(tensor, Tensor):
        raise WorldError(
            "not-a-tensor",
            f"A collective got a {type(tensor).__name__}.",
            fix="give a tensor; objects go through broadcast_object",
        )
    if op not in _OPS:
        raise WorldError("bad-op", f"{op!r} is no reduction.", fix=f"one of {', '.join(_OPS)}")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise WorldError(
            "mean-of-integers",
            f'op="mean" of a tensor of {tensor.dtype}.',
            why="the mean of whole numbers is no whole number, and would be rounded in silence",
            fix='use op="sum" and divide, or give a floating-point tensor',
        )
    return _OPS[op]


def _division(op: str, tensor: Tensor, group_: Group) -> Any:
    if op != "mean":
        return None
    return functools.partial(tensor.div_, torch_dist.get_world_size(group_))


def _require_length(operation: str, tensors: Sequence[Tensor] | None, group_: Group) -> None:
    size = _size(group_)
    if tensors is None or len(tensors) != size:
        given = "no list" if tensors is None else f"a list of {len(tensors)}"
        raise WorldError("bad-list", f"{operation} got {given} for {size} ranks.", fix="give one tensor for each rank")


def _compare(operation: str, tensor: Tensor | None, detail: str, group_: Group) -> None:
    if _debugging():
        consistency.require_same_call(operation, tensor, detail, group_)


def _finish(handle: Any, async_op: bool, finish: Any = None) -> Work | None:
    work = Work(handle, finish)
    if async_op:
        return work
    work.wait()
    return None


def _done(async_op: bool) -> Work | None:
    return Work() if async_op else None
