"""Finds what a forward changes besides its outputs: parameters, and buffers such as running statistics.

On several ranks each rank changes its own copy, from its own samples. Changed parameters are refused, unless all ranks
change them equally (a momentum encoder). Changed buffers are reported before the first step: those of the layers that
paceline synchronizes (batch norm, instance norm) are exempt, and spectral norms, which change once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from paceline.errors import TrainError
from paceline.models.weights import PowerIterations, checksum
from paceline.parallel.shards import local_shard
from paceline.runtime.mesh import Mesh

_SHOWN = 4
Checksums = dict[str, int]
Changes = dict[str, Checksums]  # "parameters" and "buffers": the new checksums of those that changed


def _require_no_max_norm(model: nn.Module, mesh: Mesh) -> None:
    """`max_norm` changes the rows of the weight that a rank looks up, when their norm is too large."""
    if mesh.degrees.pipeline == mesh.degrees.world:  # one rank looks up all rows
        return
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise _error(f"{type(module).__name__} {name} has max_norm={module.max_norm:g}, which changes its weight")


@contextmanager
def watched(model: nn.Module, mesh: Mesh, *, compiled: bool, criteria: Sequence[nn.Module] = ()) -> Iterator[Changes]:
    """Compare parameters, and buffers of the model and criteria, before and after this context."""
    _require_no_max_norm(model, mesh)
    sharded = not mesh.degrees.is_replicated
    changes: Changes = {"parameters": {}, "buffers": {}}
    buffers = _checksums(_watched_buffers(model, criteria))
    parameters = {} if sharded else _checksums(model.named_parameters())
    with ExitStack() as stack:
        # A forward sees gathered parameters, not the shards. Hooks would be compiled into graphs.
        for name, module in model.named_modules() if sharded and not compiled else ():
            if not name or any(True for _ in module.parameters(recurse=False)):
                _watch_gathered(name, module, changes["parameters"], stack.callback)
        yield changes
    if parameters:
        changes["parameters"] |= _changed(parameters, _checksums(model.named_parameters()))
    changes["buffers"] |= dict.fromkeys(instance_statistics(model), 0)  # averaged over ranks in every forward
    changes["buffers"] |= _changed(buffers, _checksums(_watched_buffers(model, criteria)))


def instance_statistics(model: nn.Module) -> list[str]:
    """Running statistics of instance norms. Their momentum applies to every micro-batch."""
    norms = [(name, part) for name, part in model.named_modules() if isinstance(part, _InstanceNorm) and part.training]
    return [f"{name}.running_mean" for name, norm in norms if norm.running_mean is not None]


def _checksums(tensors: Iterator[tuple[str, Tensor]]) -> Checksums:
    return {name: checksum(local_shard(tensor)) for name, tensor in tensors if not is_lazy(tensor)}


def _changed(before: Checksums, after: Checksums) -> Checksums:
    return {name: value for name, value in after.items() if before.get(name, value) != value}


def _watched_buffers(model: nn.Module, criteria: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for criterion in criteria:
        yield from ((f"{name} of the criterion", buffer) for name, buffer in criterion.named_buffers())
    estimates = PowerIterations(model).buffers()
    for name, module in model.named_modules():
        if not isinstance(module, _NormBase):
            for key, buffer in module.named_buffers(name, recurse=False):
                if not any(buffer is each for each in estimates):
                    yield key, buffer


def _watch_gathered(name: str, module: nn.Module, found: Checksums, later: Callable[..., Any]) -> None:
    before: dict[tuple[str, type], int] = {}
    recurse = not name  # the model itself: a parameter of the root stays gathered

    def now() -> dict[tuple[str, type], int]:
        """Keyed by type as well: what is a shard before the forward may be gathered after it."""
        parameters = module.named_parameters(name, recurse=recurse)
        return {(key, type(p.data)): checksum(local_shard(p)) for key, p in parameters if not is_lazy(p)}

    def begin(*call: Any) -> None:
        before.update(now())

    def end(*call: Any) -> None:
        found.update({key[0]: value for key, value in now().items() if before.get(key, value) != value})

    # Inside the hooks of FSDP2, which gathers before and frees afterwards.
    later(module.register_forward_pre_hook(begin).remove)
    later(module.register_forward_hook(end, prepend=True).remove)


def changed_buffers(ranks: Sequence[Changes], mesh: Mesh) -> tuple[list[str], list[str]]:
    """The buffers that the forward changes: those with different values on different ranks, and the others. Changed
    parameters are refused. `ranks`: what it changed on each rank."""
    names = sorted({name for changes in ranks for name in changes["parameters"]})
    equal = all(changes["parameters"] == ranks[0]["parameters"] for changes in ranks)
    if names and not (equal and mesh.degrees.is_replicated):
        raise _error(f"The forward changes {_some(names)}")
    values: dict[str, set[int]] = {}
    for changes in ranks:
        for name, value in changes["buffers"].items():
            values.setdefault(name, set()).add(value)
    own = [name for name, found in values.items() if len(found) > 1]
    return own, [name for name in values if name not in own]


def warn_of_buffers(own: list[str], counted: list[str], warn: Callable[[str], object], *, several: bool) -> None:
    """`own` and `counted`: of `changed_buffers`; `several`: a step runs several micro-batches on a rank."""
    if own:
        warn(
            f"the forward computes {_some(own)} from the samples of one rank: values differ between ranks, those of "
            "rank 0 are evaluated and saved, and results depend on the number of ranks; average what is added with "
            "paceline.dist.all_reduce, or use BatchNorm, which is synchronized"
        )
    if counted and several:
        warn(
            f"the forward changes {_some(counted)} once per micro-batch, so results depend on accumulate and on the "
            "micro-batches of a pipeline; change them once per step, in a callback"
        )


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


def _error(what: str) -> TrainError:
    return TrainError(
        "forward-changes-parameters",
        f"{what} in place.",
        why="each rank would change its own copy of the weights, or a gathered copy that is discarded",
        fix="change weights in a callback (on_step), equally on every rank, or compute a changed copy in the forward; "
        "for max_norm: functional.normalize of the looked-up rows",
    )
