"""`nonfinite`: what happens in a step with a non-finite loss or gradient, and where such a value comes from.

Nothing synchronizes with the GPU, except `skip` and `stop` without a fused optimizer: losses are read at log points.
Until then, under `raise`, the rank with a non-finite loss makes no further updates, so that the step can be repeated
with the same parameters: `report` names the rank, the module and the samples. Gradients are checked where their norm is
computed: with clip_norm, and under `skip` and `stop`. With the loss scale of fp16, the scaler skips steps itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.batches import tensors_in
from paceline.data.loader import MicroBatch
from paceline.errors import TrainError
from paceline.optim.clip import StepGradients
from paceline.optim.fused import is_fused
from paceline.parallel.fsdp import reshard_all
from paceline.parallel.shards import local_shard
from paceline.run.user_frame import place_of
from paceline.runtime import collectives
from paceline.runtime.noise import NoiseContext
from paceline.train.checks import snapshot
from paceline.train.features.context import FeatureContext
from paceline.train.hooks import Hooks

Record = dict[str, Any]  # of a step
_SHOWN = 16
_LARGE = 1e6
_IN_DATA, _OWN_OPERATION = "the data is not finite", "own operations"
_TOO_LARGE = "earlier updates made weights as large as"
_FIXES = {  # part of the reason → what to do
    _IN_DATA: "mend or remove this sample",
    _TOO_LARGE: "lower the learning rate, or set clip_norm",
    _OWN_OPERATION: "keep the arguments of log, sqrt and divisions in it away from zero: clamp them, or add an eps",
}


def build(context: FeatureContext) -> Hooks | None:
    config, optimizer = context.config, context.bound.optimizer
    if config.nonfinite != "raise" and context.world.device.type != "cpu" and not is_fused(optimizer):
        text = f"nonfinite: {config.nonfinite} synchronizes with the GPU at every step (optimizer not fused)"
        context.log.info(text)
    if context.bound.scaler.is_enabled():
        return None
    if config.nonfinite == "skip":
        skip = SkipBadSteps(optimizer, on_device=next(context.parts.module.parameters()).device.type != "cpu")
        return Hooks(name="nonfinite", on_gradients=skip.check_norm, vetoes=skip.once)
    stops = config.nonfinite == "stop"
    guard = NonfiniteGuard(optimizer, context.world.device, may_wait=stops)
    return Hooks(
        name="nonfinite",
        # One rank may block its updates; `stop` relies on the norm, which all ranks know.
        on_losses=None if stops else guard.check_losses,
        on_gradients=guard.check_norm if stops or config.clip_norm is not None else None,
        vetoes=partial(getattr, guard, "tripped"),  # in every step, without a call of Python code
        reset=guard.reset,
    )


def build_buffers(context: FeatureContext) -> Hooks | None:
    """Under `skip` and `stop`, buffers keep their last finite values: a forward with NaN changes the running statistics
    of batch norm even if its step is skipped."""
    raises = context.config.nonfinite == "raise"
    kept = [(each, each.clone()) for each in context.parts.module.buffers() if each.is_floating_point() and not raises]
    if not kept:
        return None

    @torch.no_grad()
    def restore(step: int, stepped: bool) -> None:
        for buffer, before in kept:
            buffer.copy_(torch.where(torch.isfinite(buffer), buffer, before))
            before.copy_(buffer)

    @torch.no_grad()
    def keep() -> None:
        """Take the current values, which were just loaded, as valid."""
        for buffer, before in kept:
            before.copy_(buffer)

    return Hooks(name="finite_buffers", after_update=restore, reset=keep)


class NonfiniteGuard:
    """Checks losses and norms, and after a non-finite one blocks updates until `reset`.

    On the CPU the value is read directly. On a GPU one kernel per step sets a flag on the device, which a fused
    optimizer reads. Other optimizers on a GPU continue to update, so for them nothing is checked here.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, *, may_wait: bool = False) -> None:
        self.tripped = False  # known on the host
        self._on_host = device.type == "cpu" or (may_wait and not is_fused(optimizer))
        self._flag: Tensor | None = None
        if not self._on_host and is_fused(optimizer):
            self._flag, self._one = torch.zeros((), device=device), torch.ones((), device=device)
            optimizer.found_inf = self._flag  # type: ignore[attr-defined]

    def check_losses(self, losses: Iterable[tuple[Tensor, Any]]) -> None:
        """Check the losses of this rank in a step, after their backwards."""
        if self._on_host:
            for loss, _ in losses:
                if not isfinite(loss.item()):
                    self.tripped = True
        elif self._flag is not None:
            self._set_flag([loss for loss, _ in losses], self._flag)

    def check_norm(self, gradients: StepGradients) -> None:
        """Check the norm of the reduced gradient, equal on every rank."""
        norm = gradients.norm()
        if self._on_host:
            if not isfinite(norm.item()):
                self.tripped = True
        elif self._flag is not None:
            self._set_flag([norm], self._flag)

    def _set_flag(self, values: list[Tensor], flag: Tensor) -> None:
        """The kernel of GradScaler, which divides by a loss scale of one. It writes to its arguments, the same values:
        `data` hides that from autograd."""
        torch._amp_foreach_non_finite_check_and_unscale_([value.data for value in values], flag, self._one)

    def reset(self) -> None:
        """Allow updates again."""
        self.tripped = False
        if self._flag is not None:
            self._flag.zero_()


class SkipBadSteps:
    """Skips steps with non-finite gradients on the host; a fused optimizer on a GPU skips them itself."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, on_device: bool) -> None:
        self._optimizer, self._on_device, self._skips = optimizer, on_device and is_fused(optimizer), False

    def check_norm(self, gradients: StepGradients) -> None:
        norm = gradients.norm()
        if self._on_device:
            gradients.skipped = (~torch.isfinite(norm)).float()
            self._optimizer.found_inf = gradients.skipped  # type: ignore[attr-defined]
        else:
            self._skips = not isfinite(norm.item())
            gradients.skipped = float(self._skips)

    def once(self) -> bool:
        """Whether to skip the update of this step."""
        skips, self._skips = self._skips, False
        return skips


def bad_step_test(policy: str, *, scaled: bool) -> Callable[[Record], bool]:
    """Return a test whether the policy acts on the record of a step.

    Infinite gradients are expected from fp16 loss scaling, which skips those steps; a non-finite loss is not.
    """

    def is_bad(record: Record) -> bool:
        if isfinite(record["loss"]) and isfinite(record.get("grad_norm", 0.0)):
            return False
        expected = scaled and record.get("skipped") and isfinite(record["loss"])
        return policy != "skip" and not expected

    return is_bad


def report(
    record: Record, module: Any, micros: Iterable[MicroBatch] | None, draw: NoiseContext, *, seen: bool
) -> TrainError:
    """Repeat the step and locate the non-finite value. `seen`: the loss of this rank was not finite. Collective: must
    be called on every rank."""
    facts: dict[str, Any] = {"seen": seen, "where": None, "samples": []}
    if micros is not None:
        with snapshot.preserved(module.model):  # `stop` keeps the model as it was before the step
            facts |= _locate(module, micros, draw)
    ranks = collectives.all_gather_object(facts)
    sources = [rank for key in ("seen", "where") for rank, facts in enumerate(ranks) if facts[key]]
    rank = sources[0] if sources else None
    blamed = None if rank is None else ranks[rank]
    kind = "gradient" if isfinite(record["loss"]) else "loss"
    return TrainError(
        "nonfinite",
        f"Non-finite {kind} at step {record['step']}{_origin(rank, ranks)}.",
        why=_why(blamed, repeated=micros is not None),
        fix=f'{_fix(blamed)}; nonfinite="skip" skips such steps, '
        'nonfinite="stop" ends training with the parameters before the step',
    )


def _origin(rank: int | None, ranks: list[dict[str, Any]]) -> str:
    if rank is None:
        return ""
    samples = ranks[rank]["samples"]
    shown = ", ".join(map(str, samples[:_SHOWN])) + (", …" if len(samples) > _SHOWN else "")
    return f" on rank {rank}" + (f", samples {shown}" if samples else "")


def _why(facts: dict[str, Any] | None, *, repeated: bool) -> str:
    if not repeated:
        return "unknown: this data can't be read again, so the step could not be repeated to find the module"
    if facts is None or not facts["where"]:
        return "unknown: the repeated step was finite; dropout noise or the parameters differ"
    return str(facts["where"])


def _fix(facts: dict[str, Any] | None) -> str:
    where = str(facts["where"]) if facts else ""
    return next((fix for sign, fix in _FIXES.items() if sign in where), "lower the learning rate or set clip_norm")


def _locate(module: Any, micros: Iterable[MicroBatch], draw: NoiseContext) -> dict[str, Any]:
    """Repeat a step and find the first non-finite value: in the data, a parameter, a module's output or a gradient."""
    where: str | None = None
    samples: list[Any] = []
    for micro in micros:
        in_inputs = _in_data(micro) or _in_parameters(module.model)
        with _first_nonfinite(module.model) as found:
            draw.begin(micro)
            value, _ = module(micro.batch)
            if value is not None and not found and not _finite(value):  # None: not the last stage of a pipeline
                found.append("the outputs of all modules are finite, but the loss computed from them is not")
            draw.begin(micro)
            if value is not None and value.requires_grad:  # a pipeline's forward is without gradients
                module(micro.batch)[0].backward()
        draw.end()
        reason = in_inputs or next((f"{text}{_large(module.model)}" for text in found), None)
        if reason and where is None and micro.samples:
            where, samples = reason, [each if isinstance(each, str) else int(each) for each in micro.indices]
        if micro.last:
            break
    module.zero_grad(set_to_none=True)
    reshard_all(module)
    return {"where": where, "samples": samples}


def _in_data(micro: MicroBatch) -> str | None:
    for tensor in tensors_in(micro.batch):
        if not _finite(tensor):
            rows = [row for row in range(len(tensor)) if not _finite(tensor[row])] if tensor.dim() else []
            which = [micro.indices[row] for row in rows if row < len(micro.indices)]
            return f"{_IN_DATA}{f': sample {which[0]}' if which else ''}"
    return None


def _in_parameters(model: nn.Module) -> str | None:
    for name, parameter in model.named_parameters():
        if not _finite(local_shard(parameter)):
            return f"parameter {name} is not finite after an earlier update"
    return None


def _large(model: nn.Module) -> str:
    for name, parameter in model.named_parameters():
        shard = local_shard(parameter).detach()
        if shard.is_floating_point() and shard.numel() and (largest := float(shard.abs().max())) > _LARGE:
            return f"; {_TOO_LARGE} {largest:.1e} in {name}"
    return ""


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


@contextmanager
def _first_nonfinite(model: nn.Module) -> Iterator[list[str]]:
    """Collect the first non-finite output of a module or gradient of a parameter, in the order of computation.

    Gradients are checked at parameters only: module backward hooks are unreliable.
    """
    found: list[str] = []

    def check(text: str, *values: Any) -> None:  # the last value is the output or the gradient
        if not found and not all(map(_finite, tensors_in(values[-1]))):
            composed = len(values) == 3 and any(True for _ in values[0].children())
            finite = composed and all(map(_finite, tensors_in(values[1])))
            found.append(text + (f", in its {_OWN_OPERATION}: its inputs and submodules are finite" if finite else ""))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            kind, place = type(module).__name__, place_of(module.forward)
            text = f"first module with a non-finite output: {name or 'the model'} ({kind}){place}"
            hooks.callback(module.register_forward_hook(partial(check, text)).remove)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = partial(check, f"first parameter with a non-finite gradient: {name}")
                hooks.callback(parameter.register_hook(hook).remove)
        yield found
