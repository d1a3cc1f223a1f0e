"""A loss or gradient that is no finite number: which step, which rank, which module, which samples.

Nothing waits for the GPU to find it: losses are looked at when they are read for a log point. Until then, under
`nonfinite: raise`, the rank that produced it takes no further update (on the CPU the loop looks at each loss, which is
free there; on a GPU the flag rides on the fused optimizer), so the step can be run again with the weights that it had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.batches import tensors_in
from paceline.data.loader import Micro
from paceline.errors import TrainError
from paceline.runtime import collectives
from paceline.runtime.noise import drawing
from paceline.train.history import Record
from paceline.train.step import LossModule

_SHOWN = 16


def report(
    record: Record, module: LossModule, micros: Iterable[Micro] | None, draw: drawing, tainted: bool
) -> TrainError:
    """Run the step again on every rank (its collectives need all of them) and say where it went wrong."""
    found: dict[str, Any] = {"tainted": tainted, "where": None, "samples": []}
    if micros is not None:
        found |= _look(module, list(micros), draw)
    ranks = collectives.all_gather_object(found)
    guilty = [rank for rank, facts in enumerate(ranks) if facts["tainted"]] or [
        rank for rank, facts in enumerate(ranks) if facts["where"]
    ]
    rank = guilty[0] if guilty else None
    what = "loss" if not _finite_number(record["loss"]) else "gradient"
    return TrainError(
        "nonfinite",
        f"The {what} of step {record['step']} is no finite number{_who(rank, ranks)}.",
        why=_why(None if rank is None else ranks[rank], read_again=micros is not None),
        fix="look at these samples; lower the learning rate or set clip_norm; "
        "nonfinite: skip leaves such steps out, nonfinite: stop ends training with the weights before it",
    )


def _finite_number(value: Any) -> bool:
    return bool(torch.isfinite(torch.tensor(value)))


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


def _look(module: LossModule, micros: list[Micro], draw: drawing) -> dict[str, Any]:
    """The first of: the data itself, a weight, a module's output, a module's gradient."""
    where: str | None = None
    samples: list[Any] = []
    for micro in micros:
        here = _in_data(micro) or _in_weights(module.model)
        with _first_bad_output(module.model) as outputs:
            draw.here, draw.calls = micro, 0
            module(micro.batch)
        here = here or (outputs[0] if outputs else None)
        with _first_bad_gradient(module.model) as gradients:
            draw.calls = 0
            module(micro.batch)[0].backward()
        draw.here = None
        here = here or (gradients[0] if gradients else None)
        if here and where is None and micro.samples:
            where, samples = here, [_plain(index) for index in micro.indices]
    module.zero_grad(set_to_none=True)
    return {"where": where, "samples": samples}


def _plain(index: Any) -> Any:
    return index if isinstance(index, str) else int(index)


def _in_data(micro: Micro) -> str | None:
    for tensor in tensors_in(micro.batch):
        if not _finite(tensor):
            rows = [row for row in range(len(tensor)) if not _finite(tensor[row])] if tensor.dim() else []
            which = [micro.indices[row] for row in rows if row < len(micro.indices)]
            return f"the data itself is not finite{f': sample {which[0]}' if which else ''}"
    return None


def _in_weights(model: nn.Module) -> str | None:
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
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
