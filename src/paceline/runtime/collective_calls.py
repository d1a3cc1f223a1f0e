"""What the collectives of `paceline.dist` share: arguments, handles, and the check that all ranks make the same call.

The first calls in each process group check that operation, shape, dtype and root are the same on all ranks, and name
the ranks and lines that differ (call_check.py). With `dist.debug(True)` or PACELINE_DEBUG=1 every collective of the
process does, also those of torch.distributed, DDP and FSDP2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch.distributed as torch_dist
from torch import Tensor

from paceline.errors import WorldError
from paceline.runtime import call_check, collective_hook, environment, process_group

Op = Literal["sum", "mean", "max", "min", "product"] | torch_dist.ReduceOp.RedOpType
Group = torch_dist.ProcessGroup | None
TensorLists = Sequence[Sequence[Tensor] | None]  # each must have one tensor per rank

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
    """A handle to an asynchronous collective: the result is valid after `wait()`.

    Args:
        handles: those of torch that it waits for
        finish: called when they have ended

    Example:
        >>> total = torch.ones(1)
        >>> work = dist.all_reduce(total, async_op=True)
    """

    def __init__(self, *handles: Any, finish: Callable[[], object] | None = None) -> None:
        self._handles, self._finish = handles, finish

    def wait(self) -> None:
        """Wait for the result.

        Example:
            >>> work.wait()
            >>> total.item() == dist.world()
            True
        """
        for handle in self._handles:
            handle.wait()
        if self._finish is not None:
            self._finish()
        self._handles, self._finish = (), None

    def is_completed(self) -> bool:
        """Whether the collective has ended.

        Returns:
            False while other ranks have not joined it, or data is on its way.

        Example:
            >>> work.wait()
            >>> work.is_completed()
            True
        """
        return all(handle.is_completed() for handle in self._handles)


def rank() -> int:
    """The rank of this process.

    Returns:
        0 without a launcher.

    Example:
        >>> 0 <= dist.rank() < dist.world()
        True
    """
    # Asking an initialized group costs a tenth of reading the environment.
    return torch_dist.get_rank() if torch_dist.is_initialized() else process_group.current_rank_info().rank


def world() -> int:
    """The number of ranks.

    Returns:
        1 without a launcher.

    Example:
        >>> dist.world() >= 1
        True
    """
    return torch_dist.get_world_size() if torch_dist.is_initialized() else process_group.current_rank_info().world


def local_rank() -> int:
    """The rank of this process on its node.

    Returns:
        0 without a launcher.

    Example:
        >>> 0 <= dist.local_rank() < dist.world()
        True
    """
    return process_group.current_rank_info().local_rank


def is_main() -> bool:
    """Whether this is rank 0.

    Returns:
        True on one rank only; also without a launcher.

    Example:
        >>> dist.is_main() == (dist.rank() == 0)
        True
    """
    return rank() == 0


def is_initialized() -> bool:
    """Whether the default process group is initialized.

    Returns:
        False in a world of one rank, which needs none.

    Example:
        >>> dist.is_initialized() or dist.world() == 1
        True
    """
    return torch_dist.is_initialized()


def debug(on: bool) -> None:
    """Check all collectives of this process, or only the first ones of this module.

    Every collective is then preceded by a comparison of operation, shape, dtype and line, also those of
    torch.distributed, DDP and FSDP2. PACELINE_DEBUG=1 switches it on from the start. Call it on every rank, after the
    same collective.

    Args:
        on: whether to check all of them

    Example:
        >>> dist.debug(True)
        >>> dist.barrier()
        >>> dist.debug(False)
    """
    global _debug
    _debug = on
    if on:
        collective_hook.install()
    else:
        collective_hook.remove()


def begin(
    operation: str,
    tensor: Tensor | None,
    detail: str,
    group: Group,
    *,
    peer: int | None = None,
    lists: TensorLists = (),
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


def end(async_op: bool, *handles: Any, finish: Callable[[], object] | None = None) -> Work | None:
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


def reduce_op(op: Op, tensor: Tensor) -> tuple[str, Any]:
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


def division(op: str, tensor: Tensor, group: Group) -> Callable[[], object] | None:
    return functools.partial(tensor.div_, torch_dist.get_world_size(group)) if op == "mean" else None
