"""What the collectives of `paceline.dist` share: arguments, handles, and the check that all ranks make the same call.

The first calls in each process group check that operation, shape, dtype and root are the same on all ranks, and name
the ranks and lines that differ (collective_check.py). With `dist.debug(True)` or PACELINE_DEBUG=1 every collective of
the process does, also those of torch.distributed, and those of DDP, FSDP2 and DTensor, which are called from C++. They
pass through torch's dispatcher as operators of `c10d`, above the kernels of CPU and CUDA. A Python kernel is registered
there, which makes the check and calls the kernel below. Without debug mode it is not registered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as torch_dist
from torch import Tensor

from paceline.errors import WorldError
from paceline.runtime import collective_check, environment, process_group
from paceline.runtime.collective_check import describe

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
# Renamed in torch 2.13; the old names are deprecated.
all_gather_single = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor
reduce_scatter_single = getattr(torch_dist, "reduce_scatter_single", None) or torch_dist.reduce_scatter_tensor
_debug: bool | None = None
_CHECKED = 32  # calls in each process group, without debug mode
_PATIENCE = 1.0  # seconds for which these wait: the collective then starts, and a hang in it is seen by the launcher
_calls: dict[str, int] = {}  # that were checked without debug mode, by the name of the group
_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_library: torch.library.Library | None = None


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
        _install()
    else:
        _remove()


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
    call = collective_check.describe(operation, [] if tensor is None else [tensor], detail)
    collective_check.require_same_call(call, group, patience)


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
                "not-in-group", f"Rank {each} is not in the process group{f' of ranks {members}' if members else ''}."
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
        raise WorldError("mean-of-integers", f'op="mean" does not support {tensor.dtype}.')
    return name, _OPS[name]


def division(op: str, tensor: Tensor, group: Group) -> Callable[[], object] | None:
    return functools.partial(tensor.div_, torch_dist.get_world_size(group)) if op == "mean" else None


def _install() -> None:
    """Check collectives from now on. Must be called on every rank, after the same collective."""
    global _library
    if _library is None:
        _library = torch.library.Library("c10d", "IMPL")
        for name, describe_call in _CALLS.items():
            kernel = _kernel(getattr(torch.ops.c10d, name).default, describe_call)
            _library.impl(name, kernel, "BackendSelect", with_keyset=True)


def _remove() -> None:
    global _library
    if _library is not None:
        _library._destroy()
        _library = None


def _kernel(operator: Any, describe_call: Callable[..., str]) -> Callable[..., Any]:
    position = [argument.name for argument in operator._schema.arguments].index("process_group")

    def checked(keyset: Any, *arguments: Any) -> Any:
        group = torch_dist.ProcessGroup.unbox(arguments[position])
        if group.size() > 1 and torch_dist.is_initialized():
            collective_check.require_same_call(describe_call(group, *arguments), group)
        return operator.redispatch(keyset & _BELOW, *arguments)

    return checked


def _root(name: str, group: torch_dist.ProcessGroup, member: int) -> str:
    return f"{name}={torch_dist.get_global_rank(group, member)}"


def _reduction(op: Any) -> str:
    return str(torch_dist.ReduceOp.RedOpType(op.op()).name).lower()


def _one_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor for all of them, if they are alike."""
    alike = all(tensor.shape == tensors[0].shape and tensor.dtype == tensors[0].dtype for tensor in tensors)
    return tensors[:1] if alike else tensors


# Arguments are those of the operators, see torch/csrc/distributed/c10d/Ops.cpp. Tensors that only the root has, and
# the parts of all_to_all, may differ between ranks.
_CALLS: dict[str, Callable[..., str]] = {
    "allreduce_": lambda g, tensors, _, op, *__: describe("all_reduce", tensors, _reduction(op)),
    "allreduce_coalesced_": lambda g, tensors, _, op, *__: describe("all_reduce", tensors, _reduction(op)),
    "broadcast_": lambda g, tensors, _, root, *__: describe("broadcast", tensors, _root("src", g, root)),
    "reduce_": lambda g, tensors, _, op, root, *__: describe(
        "reduce", tensors, f"{_reduction(op)} {_root('dst', g, root)}"
    ),
    "allgather_": lambda g, lists, tensors, *_: describe("all_gather", _one_of([*lists[0]])),
    "allgather_coalesced_": lambda g, lists, tensors, *_: describe("all_gather", tensors),
    "_allgather_base_": lambda g, gathered, tensor, *_: describe("all_gather_into_tensor", [tensor]),
    "allgather_into_tensor_coalesced_": lambda g, gathered, tensors, *_: describe("all_gather_into_tensor", tensors),
    "gather_": lambda g, lists, tensors, _, root, *__: describe("gather", tensors, _root("dst", g, root)),
    "scatter_": lambda g, tensors, lists, _, root, *__: describe("scatter", tensors, _root("src", g, root)),
    "reduce_scatter_": lambda g, tensors, lists, _, op, *__: describe(
        "reduce_scatter", _one_of([*lists[0]]), _reduction(op)
    ),
    "_reduce_scatter_base_": lambda g, reduced, tensor, _, op, *__: describe(
        "reduce_scatter_tensor", [tensor], _reduction(op)
    ),
    "reduce_scatter_tensor_coalesced_": lambda g, reduced, tensors, _, op, *__: describe(
        "reduce_scatter_tensor", tensors, _reduction(op)
    ),
    "alltoall_": lambda g, received, sent, *_: f"all_to_all({str(sent[0].dtype).removeprefix('torch.')})",
    "alltoall_base_": lambda g, received, sent, _, splits, own_splits, *__: (
        f"all_to_all_single({str(sent.dtype).removeprefix('torch.')})"
        if splits or own_splits
        else describe("all_to_all_single", [sent])
    ),
    "barrier": lambda *_: "barrier()",
}
