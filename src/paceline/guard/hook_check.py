"""Refuses communication hooks that can't reduce the gradients of a run: `Trainer(comm_hook=…)`, or one that is
registered on a DDP wrapper that is passed to the Trainer."""

from __future__ import annotations

import inspect
from contextlib import suppress
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from paceline.config.recipe import Config
from paceline.errors import LayoutError, TrainError
from paceline.log import Log
from paceline.parallel.comm_hook import CommHook
from paceline.plan.layout import Degrees
from paceline.plan.passes import passes_for

# Modules of torch, and why their hooks are refused.
_REFUSED = {
    "optimizer_overlap_hooks": (
        "it steps an optimizer inside the backward, where gradients are neither weighted nor clipped",
        "pass the optimizer to the Trainer, which steps it",
    ),
    "post_localSGD_hook": (
        "after some steps it reduces gradients within each node only, and nothing averages the weights between nodes",
        "use local SGD of paceline: sync={'every': 8}",
    ),
}
_BUILT_IN = {"ALLREDUCE": allreduce_hook, "FP16_COMPRESS": fp16_compress_hook}  # the same arithmetic in Python


def check_comm_hook(function: Any, state: Any) -> CommHook | None:
    """The arguments of the Trainer."""
    if function is None:
        if state is not None:
            raise _unusable(
                "The Trainer got comm_state without comm_hook.", fix="pass comm_hook=fn as well, a hook(state, bucket)"
            )
        return None
    if not callable(function):
        raise _unusable(f"comm_hook is {type(function).__name__}, expected a function hook(state, bucket).")
    try:
        with suppress(ValueError):  # a function in C has no signature
            inspect.signature(function).bind(state, None)
    except TypeError as error:
        raise _unusable(f"comm_hook can't be called as hook(state, bucket): {error}.") from None
    hook = CommHook(function, state)
    _require_supported(hook)
    return hook


def hook_of(ddp: DistributedDataParallel) -> CommHook | None:
    """The hook that is registered on a wrapper."""
    if ddp._comm_hooks:
        [(function, state)] = ddp._comm_hooks
        hook = CommHook(function, state)
        _require_supported(hook)
        return hook
    # Hooks in C++ leave a trace in the logging data only: "BuiltinCommHookType.FP16_COMPRESS".
    name = ddp._get_ddp_logging_data().get("comm_hook", "").rpartition(".")[2]
    if not name:
        return None
    if name not in _BUILT_IN:
        raise _unusable(f"The model is wrapped in DistributedDataParallel with the built-in hook {name}.")
    return CommHook(_BUILT_IN[name])


def _require_supported(hook: CommHook) -> None:
    function = hook.reduce.func if isinstance(hook.reduce, partial) else hook.reduce
    module = getattr(function, "__module__", "").rpartition(".")
    if module[0] == "torch.distributed.algorithms.ddp_comm_hooks" and module[2] in _REFUSED:
        why, fix = _REFUSED[module[2]]
        raise _unusable(f"The communication hook {hook.name} is not supported.", why=why, fix=fix)


def _unusable(what: str, why: str = "", fix: str = "") -> TrainError:
    fix = fix or "pass a function as torch's DistributedDataParallel.register_comm_hook takes it, comm_state beside it"
    return TrainError("comm-hook", what, why=why, fix=fix)


def choose_hook(given: CommHook | None, taken: CommHook | None, config: Config) -> CommHook | None:
    """`given` to the Trainer, or `taken` from the wrapper of its model."""
    if given is not None and taken is not None:
        raise _unusable(
            f"The Trainer got comm_hook={given.name}, and the model is wrapped in DistributedDataParallel with the "
            f"hook {taken.name}.",
            why="gradients are reduced once",
            fix="pass the model without the wrapper, or leave out comm_hook",
        )
    hook = given or taken
    if hook is not None and config.sync is not None:
        raise _unusable(
            f"The Trainer got the communication hook {hook.name} together with `sync`.",
            why="both replace the reduction of gradients",
            fix="leave out one of them",
        )
    return hook


def require_ddp(hook: CommHook, config: Config, degrees: Degrees, log: Log) -> None:
    """Raise unless DDP reduces the gradients, or there is one rank."""
    if "ddp" in [each.name for each in passes_for(config, degrees)]:
        log.info(f"comm_hook: {hook.name} reduces the gradients{_saved(hook)}")
        if hook.state is not None and not isinstance(hook.state, ProcessGroup) and not is_saved(hook):
            log.warning(
                f"comm_hook: the state of {hook.name} ({type(hook.state).__name__}) is not saved in checkpoints: it "
                "has no state_dict and load_state_dict; a resumed run starts with the state that is passed to it"
            )
        return
    if degrees.world == 1 and config.strategy not in ("dp", "split"):
        log.info(f"comm_hook: {hook.name} is not used, there is one rank")
        return
    raise LayoutError(
        "comm-hook-and-layout",
        f"The communication hook {hook.name} can't be used with this layout ({degrees}).",
        why="hooks are called by DDP, and here gradients are reduced without it",
        fix='use strategy="ddp"; under FSDP, fsdp={"reduce_dtype": "bf16"} halves the bytes of a reduction',
    )


def is_saved(hook: CommHook) -> bool:
    """Whether the state of the hook can be saved in checkpoints."""
    return all(callable(getattr(hook.state, name, None)) for name in ("state_dict", "load_state_dict"))


def _saved(hook: CommHook) -> str:
    return "; its state is saved in checkpoints" if is_saved(hook) else ""
