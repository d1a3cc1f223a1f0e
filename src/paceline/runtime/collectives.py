"""`paceline.dist`: rank, world size and collectives. The same calls work on one rank and on many.

    from paceline import dist

    dist.all_reduce(tensor, op="mean")     # or ReduceOp.AVG; in place, as torch's are
    settings = dist.broadcast_object(settings)

With one rank no process group is needed. With several, the first collective initializes it if the user has not.

The first calls in each process group check that operation, shape, dtype and root are the same on all ranks, and name
the ranks and lines that differ (call_check.py). With `dist.debug(True)` or PACELINE_DEBUG=1 every collective of the
process does, also those of torch.distributed, DDP and FSDP2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch.distributed as torch_dist
from torch import Tensor

from paceline.errors import WorldError
from paceline.runtime import call_check, collective_hook, environment, objects, process_group

__all__ = [
    "Work", "all_gather", "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast", "broadcast_object",
    "debug", "gather", "is_initialized", "is_main", "local_rank", "main_first", "rank", "reduce", "reduce_scatter",
    "scatter", "world",
]  # fmt: skip

Op = Literal["sum", "mean", "max", "min", "product"] | torch_dist.ReduceOp.RedOpType
Group = torch_dist.ProcessGroup | None
_Lists = Sequence[Sequence[Tensor] | None]  # each must have one tensor per rank

_OPS = {
    "sum": torch_dist.ReduceOp.SUM,
    "mean": torch_dist.ReduceOp.SUM,  # divided afterwards: gloo has no AVG
    "max": torch_dist.ReduceOp.MAX,
    "min": torch_dist.ReduceOp.MIN,
    "product": torch_dist.ReduceOp.PRODUCT,
}
_debug: bool | None = None
_CHECKED = 32  # calls in each process group, without debug mode
_PATIENCE = 1.0  # seconds for which these wait: the collective then starts, and a hang in it is seen by the launcher
_calls: dict[str, int] = {}  # that were checked without debug mode, by the name of the group


class Work:
    """A handle to an asynchronous collective: the result is valid after `wait()`."""

    def __init__(self, *handles: Any, finish: Callable[[], object] | None = None) -> None:
        self._handles, self._finish = handles, finish

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
        if self._finish is not None:
            self._finish()
        self._handles, self._finish = (), None

    def is_completed(self) -> bool:
        return all(handle.is_completed() for handle in self._handles)


def rank() -> int:
    """The rank of this process; 0 without a launcher."""
    # Asking an initialized group costs a tenth of reading the environment.
    return torch_dist.get_rank() if torch_dist.is_initialized() else process_group.current_rank_info().rank


def world() -> int:
    """The number of ranks; 1 without a launcher."""
    return torch_dist.get_world_size() if torch_dist.is_initialized() else process_group.current_rank_info().world


def local_rank() -> int:
    """The rank of this process on its node."""
    return process_group.current_rank_info().local_rank


def is_main() -> bool:
    """Whether this is rank 0."""
    return rank() == 0


def is_initialized() -> bool:
    """Whether the default process group is initialized."""
    return torch_dist.is_initialized()


def debug(on: bool) -> None:
    """Check all collectives of this process, or only the first ones of this module. Call it on every rank, after the
    same collective."""
    global _debug
    _debug = on
    if on:
        collective_hook.install()
    else:
        collective_hook.remove()


def barrier(group: Group = None, async_op: bool = False) -> Work | None:
    """Wait until every rank has called it."""
    if not _begin("barrier", None, "", group):
        return _end(async_op)
    return _end(async_op, torch_dist.barrier(group=group, async_op=async_op))


def all_reduce(tensor: Tensor, op: Op = "sum", group: Group = None, async_op: bool = False) -> Work | None:
    """Reduce `tensor` across all ranks, in place; every rank receives the result."""
    name, reduce_op = _reduce_op(op, tensor)
    if not _begin("all_reduce", tensor, name, group):
        return _end(async_op)
    handle = torch_dist.all_reduce(tensor, reduce_op, group=group, async_op=async_op)
    objects.keep(tensor)
    return _end(async_op, handle, finish=_division(name, tensor, group))


def reduce(tensor: Tensor, dst: int = 0, op: Op = "sum", group: Group = None, async_op: bool = False) -> Work | None:
    """Reduce `tensor` into the tensor of rank `dst`; that of other ranks is undefined afterwards."""
    name, reduce_op = _reduce_op(op, tensor)
    if not _begin("reduce", tensor, f"{name} dst={dst}", group, peer=dst):
        return _end(async_op)
    handle = torch_dist.reduce(tensor, dst, reduce_op, group=group, async_op=async_op)
    return _end(async_op, handle, finish=_division(name, tensor, group) if rank() == dst else None)


def broadcast(tensor: Tensor, src: int = 0, group: Group = None, async_op: bool = False) -> Work | None:
    """Copy the tensor of rank `src` to `tensor` on every rank."""
    if not _begin("broadcast", tensor, f"src={src}", group, peer=src):
        return _end(async_op)
    objects.keep(tensor)
    return _end(async_op, torch_dist.broadcast(tensor, src, group=group, async_op=async_op))


def all_gather(tensors: list[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False) -> Work | None:
    """Gather `tensor` of rank r in `tensors[r]`, on every rank."""
    if not _begin("all_gather", tensor, "", group, lists=[tensors]):
        tensors[0].copy_(tensor)
        return _end(async_op)
    objects.keep(tensor, *tensors)
    return _end(async_op, torch_dist.all_gather(tensors, tensor, group=group, async_op=async_op))


def gather(
    tensor: Tensor, tensors: list[Tensor] | None = None, dst: int = 0, group: Group = None, async_op: bool = False
) -> Work | None:
    """Gather `tensor` of rank r in `tensors[r]` on rank `dst`; other ranks pass no list."""
    gathered = tensors if rank() == dst else None
    if not _begin("gather", tensor, f"dst={dst}", group, peer=dst, lists=[tensors] if rank() == dst else []):
        assert gathered is not None
        gathered[0].copy_(tensor)
        return _end(async_op)
    return _end(async_op, torch_dist.gather(tensor, gathered, dst, group=group, async_op=async_op))


def scatter(
    tensor: Tensor, tensors: list[Tensor] | None = None, src: int = 0, group: Group = None, async_op: bool = False
) -> Work | None:
    """Copy `tensors[r]` of rank `src` to `tensor` on rank r; other ranks pass no list."""
    scattered = tensors if rank() == src else None
    if not _begin("scatter", tensor, f"src={src}", group, peer=src, lists=[tensors] if rank() == src else []):
        assert scattered is not None
        tensor.copy_(scattered[0])
        return _end(async_op)
    return _end(async_op, torch_dist.scatter(tensor, scattered, src, group=group, async_op=async_op))


def reduce_scatter(
    tensor: Tensor, tensors: list[Tensor], op: Op = "sum", group: Group = None, async_op: bool = False
) -> Work | None:
    """Reduce `tensors[r]` of every rank into `tensor` on rank r."""
    name, reduce_op = _reduce_op(op, tensor)
    if not _begin("reduce_scatter", tensor, name, group, lists=[tensors]):
        tensor.copy_(tensors[0])
        return _end(async_op)
    handle = torch_dist.reduce_scatter(tensor, tensors, reduce_op, group=group, async_op=async_op)
    return _end(async_op, handle, finish=_division(name, tensor, group))


def all_to_all(received: list[Tensor], sent: list[Tensor], group: Group = None, async_op: bool = False) -> Work | None:
    """Send `sent[r]` to rank r, and receive in `received[r]` what rank r sent to this rank."""
    if not _begin("all_to_all", None, "", group, lists=[sent, received]):
        received[0].copy_(sent[0])
        return _end(async_op)
    if torch_dist.get_backend(group) != "gloo":
        return _end(async_op, torch_dist.all_to_all(received, sent, group=group, async_op=async_op))
    # gloo does not support lists here, so exchange them point to point.
    this = torch_dist.get_rank(group)
    received[this].copy_(sent[this])
    peers = [peer for peer in range(len(sent)) if peer != this]
    handles = [torch_dist.irecv(received[peer], group=group, group_src=peer) for peer in peers]
    handles += [torch_dist.isend(sent[peer], group=group, group_dst=peer) for peer in peers]
    return _end(async_op, *handles)


def broadcast_object(value: Any, src: int = 0, group: Group = None) -> Any:
    """The value of rank `src`, on every rank. It is sent as JSON: numbers, strings, lists, dicts."""
    if not _begin("broadcast_object", None, f"src={src}", group, peer=src):
        return objects.decode(objects.encode(value))
    return objects.broadcast(value, src, group)


def all_gather_object(value: Any, group: Group = None) -> list[Any]:
    """The values of all ranks, in rank order, sent as JSON."""
    if not _begin("all_gather_object", None, "", group):
        return [objects.decode(objects.encode(value))]
    return objects.all_gather(value, group)


@contextmanager
def main_first() -> Iterator[None]:
    """Run the body on rank 0 first. If it fails there, other ranks raise `world.main-failed` instead of running it."""
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
        raise WorldError(
            "main-failed",
            f"Rank 0 failed inside main_first(), so rank {rank()} skipped its body.",
            fix="see the error of rank 0",
        )


def _begin(
    operation: str, tensor: Tensor | None, detail: str, group: Group, *, peer: int | None = None, lists: _Lists = ()
) -> bool:
    """Validate the arguments; whether there are other ranks. Initializes the process group on first use."""
    if not 0 <= (peer or 0) < world():
        raise WorldError("bad-rank", f"Invalid rank {peer}: the world size is {world()}.")
    if group is not None:
        _require_members([rank()] if peer is None else [rank(), peer], group)
    size = torch_dist.get_world_size(group) if torch_dist.is_initialized() else world()
    if size > 1 and not torch_dist.is_initialized():
        process_group.init_world()
    for tensors in lists:
        if tensors is None or len(tensors) != size:
            got = "no list" if tensors is None else f"a list of {len(tensors)}"
            raise WorldError("bad-list", f"{operation} expected a list of {size} tensors, one per rank, got {got}.")
    if size > 1:
        _check(operation, tensor, detail, group)
    return size > 1


def _check(operation: str, tensor: Tensor | None, detail: str, group: Group) -> None:
    if _debug is None:
        debug(environment.debug_enabled())
    if _debug:
        patience = None
    else:
        name = "" if group is None or group is torch_dist.group.WORLD else group.group_name
        if _calls.get(name, 0) == _CHECKED:
            return
        _calls[name] = _calls.get(name, 0) + 1
        patience = _PATIENCE
    call = call_check.describe(operation, [] if tensor is None else [tensor], detail)
    call_check.require_same_call(call, group, patience)


def _end(async_op: bool, *handles: Any, finish: Callable[[], object] | None = None) -> Work | None:
    work = Work(*(handle for handle in handles if handle is not None), finish=finish)
    if async_op:
        return work
    work.wait()
    return None


def _require_members(ranks: Sequence[int], group: Any) -> None:
    """For ranks outside a new group, torch returns a placeholder instead of a group."""
    members = torch_dist.get_process_group_ranks(group) if isinstance(group, torch_dist.ProcessGroup) else []
    for each in ranks:
        if each not in members:
            raise WorldError(
                "not-in-group",
                f"Rank {each} is not in the process group{f' of ranks {members}' if members else ''}.",
                fix="call it on members of the group only; src and dst are global ranks of members",
            )


def _reduce_op(op: Op, tensor: Tensor) -> tuple[str, Any]:
    if not isinstance(tensor, Tensor):
        raise WorldError(
            "not-a-tensor",
            f"Expected a tensor, got {type(tensor).__name__}.",
            fix="pass a tensor; for objects use broadcast_object or all_gather_object",
        )
    name = op if isinstance(op, str) else {"AVG": "mean"}.get(op.name, op.name.lower())
    if name not in _OPS:
        raise WorldError("bad-op", f"Unknown reduce op {op!r}.", fix=f"use one of {', '.join(_OPS)}")
    if name == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise WorldError(
            "mean-of-integers",
            f'op="mean" does not support {tensor.dtype}.',
            why="the mean of integers is not an integer and would be rounded silently",
            fix='use op="sum" and divide, or pass a floating-point tensor',
        )
    return name, _OPS[name]


def _division(op: str, tensor: Tensor, group: Group) -> Callable[[], object] | None:
    return functools.partial(tensor.div_, torch_dist.get_world_size(group)) if op == "mean" else None
