"""Checks every collective of this process in debug mode: also those of DDP, FSDP2 and DTensor, which are called from
C++.

All of them pass through torch's dispatcher as operators of `c10d`, above the kernels of CPU and CUDA. A Python kernel
is registered there, which makes the check and calls the kernel below. Without debug mode it is not registered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_dist

from paceline.runtime import call_check
from paceline.runtime.call_check import describe

_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_library: torch.library.Library | None = None


def install() -> None:
    """Check collectives from now on. Must be called on every rank, after the same collective."""
    global _library
    if _library is None:
        _library = torch.library.Library("c10d", "IMPL")
        for name, describe_call in _CALLS.items():
            kernel = _kernel(getattr(torch.ops.c10d, name).default, describe_call)
            _library.impl(name, kernel, "BackendSelect", with_keyset=True)


def remove() -> None:
    global _library
    if _library is not None:
        _library._destroy()
        _library = None


def _kernel(operator: Any, describe_call: Callable[..., str]) -> Callable[..., Any]:
    position = [argument.name for argument in operator._schema.arguments].index("process_group")

    def checked(keyset: Any, *arguments: Any) -> Any:
        group = torch_dist.ProcessGroup.unbox(arguments[position])
        if group.size() > 1 and torch_dist.is_initialized():
            call_check.require_same_call(describe_call(group, *arguments), group)
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
