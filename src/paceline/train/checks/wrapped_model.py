"""Takes over models that arrive in a wrapper of torch, or refuses them.

| wrapper                     | what happens                                                                         |
|-----------------------------|--------------------------------------------------------------------------------------|
| DataParallel                | removed; one process with `strategy: auto` uses the GPUs it asks for                 |
| DistributedDataParallel     | removed; its arguments become settings, those without a setting are refused, and its |
|                             | communication hook is registered again                                               |
| torch.compile               | removed, as it renames parameters; its graph is kept (`compile: model`)              |
| FSDP, fully_shard, DTensors | refused: their parameters are already shards                                         |
| an engine of DeepSpeed      | refused: it owns the optimizer and the backward                                      |

Communication hooks that can't reduce the gradients of a run are refused: `Trainer(comm_hook=…)`, or one that is
registered on such a DDP wrapper.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch.distributed as torch_dist
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from paceline.config.recipe import Config
from paceline.errors import LayoutError, TrainError
from paceline.log import Log
from paceline.parallel.data_parallel import CommHook, gpus
from paceline.plan.layout import Degrees
from paceline.plan.passes import passes_for

_MB = 1 << 20
_SHARDING = {
    ShardingStrategy.FULL_SHARD: 'strategy="fsdp"',
    ShardingStrategy.SHARD_GRAD_OP: 'strategy="fsdp" and fsdp={"reshard": False}',
    ShardingStrategy.HYBRID_SHARD: 'strategy="hsdp"',
    ShardingStrategy._HYBRID_SHARD_ZERO2: 'strategy="hsdp" and fsdp={"reshard": False}',
    ShardingStrategy.NO_SHARD: 'strategy="ddp"',
}
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


def unwrap_model(model: nn.Module, config: Config, ranks: int, log: Log) -> tuple[nn.Module, Config, CommHook | None]:
    """The model without its wrappers, the recipe with what they ask for, and the communication hook of DDP."""
    hook: CommHook | None = None
    while isinstance(model, (nn.DataParallel, DistributedDataParallel, OptimizedModule)):
        name = type(model).__name__
        changes: dict[str, Any] = {}
        if isinstance(model, DistributedDataParallel):
            changes, hook = _ddp_settings(model, config), hook_of(model)
            inner: nn.Module = model.module
        elif isinstance(model, nn.DataParallel):
            changes = _data_parallel_settings(model, config, ranks, log)
            inner = model.module
        else:
            inner, name = model._orig_mod, "torch.compile"
            _compile_in_place(inner, model)
            changes = {} if config.compile else {"compile": "model"}
        taken = "".join(f"; {key}: {value}" for key, value in changes.items())
        log.info(f"model: unwrapped from {name}; the Trainer wraps it itself if the layout requires it{taken}")
        model, config = inner, config.model_copy(update=changes)
    for what, why, fix in _obstacles(model, ranks):
        raise LayoutError(
            "wrapped-model", f"The model is already wrapped: {what}.", why=why, fix=f"pass the plain model, and {fix}"
        )
    return model, config, hook


def _compile_in_place(model: nn.Module, wrapper: OptimizedModule) -> None:
    """As Module.compile(), with the backend and mode of the wrapper."""

    def call(*args: Any, **kwargs: Any) -> Any:  # torch does not compile frames of its own modules, as of nn.Sequential
        return model._call_impl(*args, **kwargs)

    model._compiled_call_impl = wrapper.dynamo_ctx(call)


def _data_parallel_settings(model: nn.DataParallel[Any], config: Config, ranks: int, log: Log) -> dict[str, Any]:
    wanted = list(model.device_ids)
    if len(wanted) < 2 or ranks > 1 or config.strategy == "dp":
        return {}
    if config.strategy == "auto" and config.layout is None and len(wanted) == len(gpus()):
        return {"strategy": "dp"}
    log.warning(
        f'the model is wrapped in DataParallel over {len(wanted)} GPUs, but this run uses one: set strategy="dp" (all '
        "visible GPUs; see CUDA_VISIBLE_DEVICES), or start one rank per GPU with paceline launch"
    )
    return {}


def _ddp_settings(ddp: DistributedDataParallel, config: Config) -> dict[str, Any]:
    """Settings for the arguments that differ from torch's defaults. `gradient_as_bucket_view` is on anyway."""
    _require_supported(ddp)
    section: dict[str, Any] = {}
    if ddp.static_graph:
        section["static_graph"] = True
    if not getattr(ddp, "forward_sync_buffers", getattr(ddp, "broadcast_buffers", True)):  # renamed in torch 2.13
        section["broadcast_buffers"] = False
    if not ddp.bucket_bytes_cap_default and config.ddp.bucket_mb is None:
        section["bucket_mb"] = ddp.bucket_bytes_cap / _MB
    changes: dict[str, Any] = {"ddp": config.ddp.model_copy(update=section)} if section else {}
    if ddp.find_unused_parameters:
        changes["unused_parameters"] = "allow"
    return changes


def _require_supported(ddp: DistributedDataParallel) -> None:
    group = ddp.process_group
    found = {
        "mixed_precision": (ddp.mixed_precision, 'set precision="bf16" (or fp16) instead'),
        "ignored parameters": (ddp.parameters_to_ignore, "freeze them with requires_grad_(False)"),
        f"a process_group of {group.size()} of {torch_dist.get_world_size()} ranks": (
            group.size() != torch_dist.get_world_size(),
            "launch as many ranks as train this model, or describe them with layout: {replicate: …}",
        ),
    }
    for what, (present, fix) in found.items():
        if present:
            raise LayoutError(
                "wrapped-model",
                f"The model is wrapped in DistributedDataParallel with {what}.",
                fix=f"pass the model without the wrapper; {fix}",
            )


def _obstacles(model: nn.Module, ranks: int) -> Iterator[tuple[str, str, str]]:
    shards = "its parameters are shards already, which the Trainer would shard or broadcast again"
    modules = list(model.named_modules())
    if type(model).__module__.partition(".")[0] == "deepspeed":
        why, fix = (
            "an engine runs backward and optimizer itself",
            'set strategy="fsdp" (ZeRO-3), or fsdp={"offload": True}',
        )
        yield f"it is a {type(model).__name__} of DeepSpeed", why, fix
    for name, part in modules:
        if isinstance(part, FullyShardedDataParallel):
            settings = _SHARDING.get(part.sharding_strategy, 'strategy="fsdp"')
            yield f"{_place(name)} is in FullyShardedDataParallel", shards, f"set {settings}"
    sharded = [name for name, part in modules if isinstance(part, FSDPModule)]
    if sharded:
        names = [name for name in sharded if name][:4]
        blocks = f", and blocks={names} (or a pattern) for the modules to gather" if names else ""
        yield f"fully_shard was applied to {_place(sharded[0])}", shards, f'set strategy="fsdp"{blocks}'
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            plan = 'set strategy="tp", and tensor={"plan": …} or a ModelSpec with its tensor_plan'
            yield f"parameter {name} is a DTensor (parallelize_module)", shards, plan
    for name, part in modules:
        if isinstance(part, DistributedDataParallel) and ranks > 1:
            why = "DDP reduces the gradients of this part, and the Trainer would reduce them again"
            yield f"its module {name} is in DistributedDataParallel", why, 'set strategy="ddp"'


def _place(name: str) -> str:
    return f"its module {name}" if name else "it"


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
    _require_usable(hook)
    return hook


def hook_of(ddp: DistributedDataParallel) -> CommHook | None:
    """The hook that is registered on a wrapper."""
    if ddp._comm_hooks:
        [(function, state)] = ddp._comm_hooks
        hook = CommHook(function, state)
        _require_usable(hook)
        return hook
    # Hooks in C++ leave a trace in the logging data only: "BuiltinCommHookType.FP16_COMPRESS".
    name = ddp._get_ddp_logging_data().get("comm_hook", "").rpartition(".")[2]
    if not name:
        return None
    if name not in _BUILT_IN:
        raise _unusable(f"The model is wrapped in DistributedDataParallel with the built-in hook {name}.")
    return CommHook(_BUILT_IN[name])


def _require_usable(hook: CommHook) -> None:
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
        saved = "; its state is saved in checkpoints" if is_saved(hook) else ""
        log.info(f"comm_hook: {hook.name} reduces the gradients{saved}")
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
        "comm-hook-and-layout", f"The communication hook {hook.name} can't be used with this layout ({degrees})."
    )


def is_saved(hook: CommHook) -> bool:
    """Whether the state of the hook can be saved in checkpoints."""
    return all(callable(getattr(hook.state, name, None)) for name in ("state_dict", "load_state_dict"))
