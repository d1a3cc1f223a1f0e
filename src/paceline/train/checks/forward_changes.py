"""Finds what a forward changes besides its outputs: parameters, buffers such as running statistics, and plain
attributes that it keeps for the next one (a hidden state, a counter, an annealed temperature).

Like buffers, such attributes are each rank's own and change once per micro-batch. Most attributes that a forward sets
are only caches. If any change, two more forwards on the same batch are compared: the second sees what the first kept.

On several ranks each rank changes its own copy, from its own samples. Changed parameters are refused, unless all ranks
change them equally (a momentum encoder). Changed buffers are reported before the first step: those of the layers that
paceline synchronizes (batch norm, instance norm) are exempt, and spectral norms, which change once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import isclose, isnan
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from paceline.errors import LayoutError, TrainError
from paceline.models.model_call import read_loss
from paceline.models.weights import PowerIterations, checksum
from paceline.parallel.compile import uncompiled
from paceline.parallel.fsdp import reshard_all
from paceline.parallel.shards import local_shard
from paceline.runtime import collectives
from paceline.runtime.mesh import Mesh
from paceline.runtime.rng import preserve_rng_state
from paceline.text import listed
from paceline.train.checks import snapshot
from paceline.train.checks.split_invariance import LossTrial, not_checked

TOLERANCE = 1e-6  # above the rounding of kernels that are not deterministic
_OF_MODULES = frozenset(vars(nn.Module()))
Checksums = dict[str, int]
Changes = dict[str, Checksums]  # "parameters", "buffers", "attributes": the new checksums of those that changed


def _require_no_max_norm(model: nn.Module, mesh: Mesh) -> None:
    """`max_norm` changes the rows of the weight that a rank looks up, when their norm is too large."""
    if mesh.degrees.pipeline == mesh.degrees.world:  # one rank looks up all rows
        return
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise _error(f"{type(module).__name__} {name} has max_norm={module.max_norm:g}, which changes its weight")


@contextmanager
def watched(model: nn.Module, mesh: Mesh, *, compiled: bool, criteria: Sequence[nn.Module] = ()) -> Iterator[Changes]:
    """Compare parameters, and buffers and attributes of the model and criteria, before and after this context."""
    _require_no_max_norm(model, mesh)
    sharded = not mesh.degrees.is_replicated
    changes: Changes = {"parameters": {}, "buffers": {}}
    buffers, kept = _checksums(_watched_buffers(model, criteria)), attributes(model, criteria)
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
    changes["attributes"] = dict(attributes(model, criteria).items() - kept.items())  # those that are new, too


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
        return {(key, type(p.data)): _content(p) for key, p in parameters if not is_lazy(p)}

    def begin(*call: Any) -> None:
        before.update(now())

    def end(*call: Any) -> None:
        found.update({key[0]: value for key, value in now().items() if before.get(key, value) != value})

    # Inside the hooks of FSDP2, which gathers before and frees afterwards.
    later(module.register_forward_pre_hook(begin).remove)
    later(module.register_forward_hook(end, prepend=True).remove)


def _content(parameter: Tensor) -> int:
    """A teacher may begin equal to what it follows: then writing changes no number."""
    shard = local_shard(parameter)
    if parameter.requires_grad:
        return checksum(shard)
    return hash((checksum(shard), shard.data_ptr(), shard._version, parameter._version))


def changed_buffers(ranks: Sequence[Changes], mesh: Mesh) -> tuple[list[str], list[str]]:
    """The buffers that the forward changes: those with different values on different ranks, and the others. Changed
    parameters are refused. `ranks`: what it changed on each rank."""
    names = sorted({name for changes in ranks for name in changes["parameters"]})
    equal = all(changes["parameters"] == ranks[0]["parameters"] for changes in ranks)
    if names and not (equal and mesh.degrees.is_replicated):
        raise _error(f"The forward changes {listed(names)}")
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
            f"the forward computes {listed(own)} from the samples of one rank: values differ between ranks, those of "
            "rank 0 are evaluated and saved, and results depend on the number of ranks; average what is added with "
            "paceline.dist.all_reduce, or use BatchNorm, which is synchronized"
        )
    if counted and several:
        warn(
            f"the forward changes {listed(counted)} once per micro-batch, so results depend on accumulate and on the "
            "micro-batches of a pipeline; change them once per step, in a callback"
        )


def _error(what: str) -> TrainError:
    return TrainError("forward-changes-parameters", f"{what} in place.")


def find(trial: LossTrial) -> tuple[list[str], list[str], str | None]:
    """The attributes that the forward changes and that the next one reads: those with different values on different
    ranks, and the others; and a warning if a forward failed. Collective. Notes those that are in no checkpoint."""
    module, failed = trial.module, list[str]()
    before = attributes(module.model, module.loss_state).items()
    with _repeated(trial):
        first = trial_loss(trial, failed)
        ranks = collectives.all_gather_object(dict(attributes(module.model, module.loss_state).items() - before))
        second = trial_loss(trial, failed) if any(ranks) else first
    reshard_all(module)
    buffers = instance_statistics(module.model) if collectives.world() == 1 else []  # else the pre-flight finds them
    error = next((text for texts in collectives.all_gather_object(failed) for text in texts), None)
    error = error and not_checked("whether the forward keeps something for the next one", error)
    if not any(ranks) or not any(collectives.all_gather_object(not isclose(first, second, rel_tol=TOLERANCE))):
        return [], buffers, error
    names = sorted({name for values in ranks for name in values})
    own = [name for name in names if any(values.get(name) != ranks[0].get(name) for values in ranks)]
    saved = {*module.model.state_dict(keep_vars=True)}
    saved |= {f"criterion.{name}" for criterion in module.loss_state for name in criterion.state_dict(keep_vars=True)}
    saved |= {key.removesuffix("_extra_state") for key in saved}
    module.unsaved = [name for name in names if saved.isdisjoint((name, name[: name.rfind(".") + 1]))]
    return own, buffers + [name for name in names if name not in own], error


@contextmanager
def _repeated(trial: LossTrial) -> Iterator[None]:
    """With gradients, without which a forward may leave its state alone; a sharded model would wait for a backward."""
    with (
        snapshot.preserved(trial.module.model, *trial.user_code),
        torch.set_grad_enabled(not isinstance(trial.module, FSDPModule)),
        uncompiled(),
    ):
        yield


def moved_parameters(trial: LossTrial) -> list[str]:
    """The parameters that every forward changes: those of a teacher, which follows the trained ones. It may begin equal
    to them, so they are moved a little. Looked for where some parameters are frozen, of models that are not sharded."""
    named = {name: each for name, each in trial.module.model.named_parameters() if not is_lazy(each)}
    small = sum(each.nbytes for each in named.values()) <= snapshot.PARAMETER_BYTES  # these are restored
    if all(each.requires_grad for each in named.values()):
        return []
    states: list[dict[str, int]] = []
    with _repeated(trial):
        for each in named.values() if small else ():
            if each.requires_grad and each.is_floating_point():
                each.detach().mul_(1 + 2**-8)
        for _ in range(2):
            trial_loss(trial, [])  # a failure is noted where slices are compared
            states.append({name: checksum(each.detach()) if small else each._version for name, each in named.items()})
    return [name for name in named if states[0][name] != states[1][name]]


def attributes(model: nn.Module, criteria: Sequence[nn.Module] = ()) -> dict[str, int]:
    """Digests of numbers and tensors in the attributes of modules that are not torch's own."""
    found = {}
    inside = [each for criterion in criteria for each in criterion.named_modules(prefix="criterion")]
    for name, module in (*model.named_modules(), *inside):
        if not type(module).__module__.startswith("torch."):
            buffers = module._buffers if collectives.world() == 1 else {}  # else the pre-flight compares them
            for key, value in (vars(module) | buffers).items():
                plain = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
                if key not in _OF_MODULES and (isinstance(value, (bool, int, float)) or (plain and not is_lazy(value))):
                    digest = checksum(value.detach()) if isinstance(value, Tensor) else hash(value)
                    found[f"{name}.{key}".removeprefix(".")] = digest
    return found


def trial_loss(trial: LossTrial, failed: list[str]) -> float:
    """The loss of a micro-batch; zero if it fails, with the exception in `failed`."""
    with preserve_rng_state():
        trial.draw.begin(trial.micro)
        try:
            value = float(read_loss(trial.run(snapshot.copied(trial.micro.batch)))[0].detach())
            return 0.0 if isnan(value) else value
        except LayoutError:  # as in split_invariance
            raise
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}")
            return 0.0
        finally:
            trial.draw.end()
