"""A loss or gradient that is no finite number: which step, which rank, which module, which samples.

Nothing waits for the GPU to find it: losses are looked at when they are read for a log point. Until then, under
`nonfinite: raise`, the rank that produced it takes no further update, so the step can be run again with the weights
that it had. Gradients are looked at where their norm is worked out: with clip_norm, and under `skip` and `stop`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.batches import tensors_in
from paceline.data.loader import MicroBatch
from paceline.errors import TrainError
from paceline.parallel.fsdp import reshard_all
from paceline.parallel.shards import local_shard
from paceline.runtime import collectives
from paceline.runtime.noise import NoiseContext
from paceline.train.history import Record

_SHOWN = 16


class NonfiniteGuard:
    """Looks at losses and norms, and once one was not finite keeps the weights as they are until somebody has looked.

    On the CPU the number is there anyway. On a GPU nobody waits for it: a flag goes up on the device and stays up, and
    the fused optimizer reads it. Other optimizers on a GPU go on, and the report says what can still be said.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, *, may_wait: bool = False) -> None:
        self.tripped = False  # as far as the host knows
        self._on_host = device.type == "cpu" or (may_wait and not is_fused(optimizer))
        self._flag = torch.zeros((), device=device)
        self._step = torch.full((), -1, device=device)  # of this rank's first bad loss
        if not self._on_host and is_fused(optimizer):
            optimizer.found_inf = self._flag  # type: ignore[attr-defined]

    def look_at_loss(self, loss: Tensor, step: int) -> None:
        """This rank's own; the others may be finite."""
        if self._on_host:
            if not isfinite(loss.item()) and not self.tripped:
                self.tripped = True
                self._step.fill_(step)
        else:
            bad = ~torch.isfinite(loss)
            self._step = torch.where(bad & (self._flag == 0), step, self._step)
            torch.maximum(self._flag, bad.float(), out=self._flag)

    def look_at_norm(self, norm: Tensor) -> None:
        """The reduced gradient's, equal on every rank."""
        if self._on_host:
            if not isfinite(norm.item()):
                self.tripped = True
        else:
            torch.maximum(self._flag, (~torch.isfinite(norm)).float(), out=self._flag)

    def saw_loss_of(self, step: int) -> bool:
        """Whether this rank's loss was the bad one in that step, counted from 0; waits for the device."""
        return int(self._step) == step

    def reset(self) -> None:
        """Somebody has looked: updates may go on."""
        self.tripped = False
        self._flag.zero_()
        self._step.fill_(-1)


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


def judge(policy: str, *, scaled: bool) -> Callable[[Record], bool]:
    """Whether a step's record is one that the policy acts on.

    fp16's scaler makes gradients infinite on purpose, now and then, and skips those steps; a loss never.
    """

    def is_bad(record: Record) -> bool:
        if isfinite(record["loss"]) and isfinite(record.get("grad_norm", 0.0)):
            return False
        expected = scaled and record.get("skipped") and isfinite(record["loss"])
        return policy != "skip" and not expected

    return is_bad


def report(
    record: Record, module: Any, micros: Iterable[MicroBatch] | None, draw: NoiseContext, watch: NonfiniteGuard | None
) -> TrainError:
    """Run the step again on every rank (its collectives need all of them) and say where it went wrong."""
    seen = watch is not None and watch.saw_loss_of(record["step"] - 1)
    found: dict[str, Any] = {"seen": seen, "where": None, "samples": []}
    if micros is not None:
        found |= _look(module, list(micros), draw)
    ranks = collectives.all_gather_object(found)
    if watch is not None:
        watch.reset()
    guilty = [rank for rank, facts in enumerate(ranks) if facts["seen"]] or [
        rank for rank, facts in enumerate(ranks) if facts["where"]
    ]
    rank = guilty[0] if guilty else None
    what = "gradient" if isfinite(record["loss"]) else "loss"
    return TrainError(
        "nonfinite",
        f"The {what} of step {record['step']} is no finite number{_who(rank, ranks)}.",
        why=_why(None if rank is None else ranks[rank], read_again=micros is not None),
        fix="look at these samples; lower the learning rate or set clip_norm; "
        "nonfinite: skip leaves such steps out, nonfinite: stop ends training with the weights before it",
    )


def _who(rank: int | None, ranks: list[dict[str, Any]]) -> str:
    if rank is None:
        return ""
    samples = ranks[rank]["samples"]
    shown = ", ".join(map(str, samples[:_SHOWN])) + (", …" if len(samples) > _SHOWN else "")
    return f"; it came from rank {rank}" + (f", samples {shown}" if samples else "")


def _why(facts: dict[str, Any] | None, *, read_again: bool) -> str:
    if not read_again:
        return "this data can't be read a second time, so the step could not be run again to find the module"
    if facts is None or not facts["where"]:
        return "run again, the step was finite: noise (dropout) or weights that have changed since make the difference"
    return str(facts["where"])


def _look(module: Any, micros: list[MicroBatch], draw: NoiseContext) -> dict[str, Any]:
    """The first of: the data itself, a weight, a module's output, a module's gradient."""
    where: str | None = None
    samples: list[Any] = []
    for micro in micros:
        here = _in_data(micro) or _in_weights(module.model)
        with _first_bad_output(module.model) as outputs:
            draw.samples, draw.draws = micro, 0
            value, _ = module(micro.batch)
        here = here or (outputs[0] if outputs else None)
        if value is not None and not _finite(value):  # None: of a pipeline, another stage has it
            here = here or "every module's output is finite, but the loss made from them is not"
        with _first_bad_gradient(module.model) as gradients:
            draw.draws = 0
            if value is not None and value.requires_grad:  # a pipeline's forward alone has no backward
                module(micro.batch)[0].backward()
        draw.samples = None
        here = here or (gradients[0] if gradients else None)
        if here and where is None and micro.samples:
            where, samples = here, [_plain(index) for index in micro.indices]
    module.zero_grad(set_to_none=True)
    reshard_all(module)
    return {"where": where, "samples": samples}


def _plain(index: Any) -> Any:
    return index if isinstance(index, str) else int(index)


def _in_data(micro: MicroBatch) -> str | None:
    for tensor in tensors_in(micro.batch):
        if not _finite(tensor):
            rows = [row for row in range(len(tensor)) if not _finite(tensor[row])] if tensor.dim() else []
            which = [micro.indices[row] for row in rows if row < len(micro.indices)]
            return f"the data itself is not finite{f': sample {which[0]}' if which else ''}"
    return None


def _in_weights(model: nn.Module) -> str | None:
    for name, parameter in model.named_parameters():
        if not _finite(local_shard(parameter)):
            return f"the weight {name} is not finite: an earlier update made it so"
    return None


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


@contextmanager
def _first_bad_output(model: nn.Module) -> Iterator[list[str]]:
    found: list[str] = []

    def look(name: str, module: nn.Module) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not found and not all(map(_finite, tensors_in(output))):
                found.append(f"the first module with such an output is {name or 'the model'} ({type(module).__name__})")

        return module.register_forward_hook(hook)

    handles = [look(name, module) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _first_bad_gradient(model: nn.Module) -> Iterator[list[str]]:
    """In backward's order, so the module nearest to the loss. Leaves only: torch's hook on a container lies."""
    found: list[str] = []

    def look(name: str, parameter: nn.Parameter) -> Any:
        def hook(gradient: Tensor) -> None:
            if not found and not _finite(gradient):
                found.append(f"the first parameter with such a gradient is {name}")

        return parameter.register_hook(hook)

    handles = [look(name, p) for name, p in model.named_parameters() if p.requires_grad]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
