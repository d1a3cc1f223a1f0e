"""Finds plain attributes that a forward keeps for the next one: a hidden state, a counter, an annealed temperature.

Like buffers, they are each rank's own and change once per micro-batch. Most attributes that a forward sets are only
caches, so two forwards on the same batch are compared: the second sees what the first one kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isclose, isnan
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parameter import is_lazy

from paceline.data.loader import MicroBatch
from paceline.errors import LayoutError
from paceline.guard import snapshot
from paceline.guard.forward_state import instance_statistics
from paceline.guard.loss_halves import not_checked
from paceline.models.loss_module import LossModule
from paceline.models.model_call import read_loss
from paceline.models.weights import checksum
from paceline.parallel.fsdp import reshard_all
from paceline.runtime import collectives
from paceline.runtime.noise import NoiseContext
from paceline.runtime.rng import preserve_rng_state

TOLERANCE = 1e-6  # above the rounding of kernels that are not deterministic
_OF_MODULES = frozenset(vars(nn.Module()))


def find(
    module: LossModule, run: Callable[[Any], Any], micro: MicroBatch, draw: NoiseContext, user_code: Sequence[Any]
) -> tuple[list[str], list[str], str | None]:
    """The attributes that the forward changes and that the next one reads: those with different values on different
    ranks, and the others; and a warning if a forward failed. Collective. `run` computes the loss of a batch."""
    failed: list[str] = []
    before = _attributes(module.model, module.loss_state)
    with _trial(module, user_code):
        first = trial_loss(run, micro, draw, failed)
        after = _attributes(module.model, module.loss_state)
        changed = {name: value for name, value in after.items() if before.get(name) != value}
        ranks = collectives.all_gather_object(changed)
        second = trial_loss(run, micro, draw, failed) if any(ranks) else first
    reshard_all(module)
    buffers = instance_statistics(module.model) if collectives.world() == 1 else []  # else the pre-flight finds them
    error = next((text for texts in collectives.all_gather_object(failed) for text in texts), None)
    error = error and not_checked("whether the forward keeps something for the next one", error)
    if not any(ranks) or not any(collectives.all_gather_object(not isclose(first, second, rel_tol=TOLERANCE))):
        return [], buffers, error
    names = sorted({name for values in ranks for name in values})
    own = [name for name in names if any(values.get(name) != ranks[0].get(name) for values in ranks)]
    return own, buffers + [name for name in names if name not in own], error


@contextmanager
def _trial(module: LossModule, user_code: Sequence[Any]) -> Iterator[None]:
    """With gradients, without which a forward may leave its state alone; a sharded model would wait for a backward."""
    with (
        snapshot.preserved(module.model, *user_code),
        torch.set_grad_enabled(not isinstance(module, FSDPModule)),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


def moved_parameters(
    module: LossModule, run: Callable[[Any], Any], micro: MicroBatch, draw: NoiseContext, user_code: Sequence[Any]
) -> list[str]:
    """The parameters that every forward changes: those of a teacher, which follows the trained ones. It may begin equal
    to them, so they are moved a little. Looked for where some parameters are frozen, of models that are not sharded."""
    named = {name: each for name, each in module.model.named_parameters() if not is_lazy(each)}
    small = sum(each.nbytes for each in named.values()) <= snapshot.PARAMETER_BYTES  # these are restored
    if all(each.requires_grad for each in named.values()):
        return []
    states: list[dict[str, int]] = []
    with _trial(module, user_code):
        for each in named.values() if small else ():
            if each.requires_grad and each.is_floating_point():
                each.detach().mul_(1 + 2**-8)
        for _ in range(2):
            trial_loss(run, micro, draw, [])  # a failure has been noted by `find`
            states.append({name: checksum(each.detach()) if small else each._version for name, each in named.items()})
    return [name for name in named if states[0][name] != states[1][name]]


def _attributes(model: nn.Module, criteria: Sequence[nn.Module] = ()) -> dict[str, int]:
    """Digests of numbers and tensors in the attributes of modules that are not torch's own."""
    found = {}
    inside = [each for criterion in criteria for each in criterion.named_modules(prefix="criterion")]
    for name, module in (*model.named_modules(), *inside):
        if not type(module).__module__.startswith("torch."):
            buffers = module._buffers if collectives.world() == 1 else {}  # else the pre-flight compares them
            for key, value in (vars(module) | buffers).items():
                if key not in _OF_MODULES and isinstance(value, (bool, int, float, Tensor)):
                    digest = checksum(value.detach()) if isinstance(value, Tensor) else hash(value)
                    found[f"{name}.{key}".removeprefix(".")] = digest
    return found


def trial_loss(run: Callable[[Any], Any], micro: MicroBatch, draw: NoiseContext, failed: list[str]) -> float:
    """The loss of a micro-batch; zero if it fails, with the exception in `failed`."""
    with preserve_rng_state():
        draw.begin(micro)
        try:
            value = float(read_loss(run(snapshot.copied(micro.batch)))[0].detach())
            return 0.0 if isnan(value) else value
        except LayoutError:  # as in loss_halves
            raise
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}")
            return 0.0
        finally:
            draw.end()
