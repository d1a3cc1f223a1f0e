"""`strategy: split`: one process, a model's layers over its devices. For a model that is too large for one of them.

Layers are taken in the order in which they stand in the model: what comes before the blocks, the blocks, what comes
after. A device begins at a block (or behind the last one): before a layer runs, hooks move what it is given to its
device. What the last layer gives comes back to the first device, where the batch lies and the loss is computed; so
does what an nn.Sequential inside the model gives, since the model's own code goes on with it. A weight that two layers
share stays where the first of them is, and the other one computes there.

With `split.microbatches: m` a micro-batch goes through in m parts, one after the other, so that the first device works
on the next part while the second is busy with this one. GPUs do so because they work on their own once they were told
what to do; layers on the CPU are computed by the process itself, which tells nobody anything meanwhile: there it saves
no time. Parts are weighed as the loss contract says, so the gradient is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.config.sections import SplitSection
from paceline.data.batches import apply, rows_of, samples_in
from paceline.data.slicing import cut
from paceline.errors import LayoutError, did_you_mean
from paceline.models.blocks import find_blocks
from paceline.parallel.loss_parts import LossPart, combine_losses, combine_metrics
from paceline.plan.partition import BalanceError, UnknownLayerError, balanced_partition, parse_balance
from paceline.runtime import noise
from paceline.text import format_bytes

Named = tuple[str, nn.Module]
Place = tuple[Named, int]  # a layer, and the number of its device


def devices_of(settings: SplitSection) -> list[torch.device]:
    """Those that are named, else all GPUs."""
    names = settings.devices or [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if len(names) < 2:
        raise LayoutError(
            "one-device",
            f"strategy: split has {len(names) or 'no'} device to place layers on.",
            fix="name at least two: split: {devices: [cuda:0, cpu]}, or use strategy: single",
        )
    return [_existing(name) for name in names]


def _existing(name: str) -> torch.device:
    count = torch.cuda.device_count()
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "cuda" and (number := device.index or 0) < count:
        return torch.device("cuda", number)
    available = ", ".join(["cpu", *(f"cuda:{index}" for index in range(count))])
    raise LayoutError(
        "no-such-device",
        f"split.devices names {name!r}, which this machine does not have: there is {available}.",
        fix="name devices that are there, or check CUDA_VISIBLE_DEVICES",
    )


def split(model: nn.Module, settings: SplitSection, wanted: Sequence[str] | None = None) -> str:
    """Place the model's layers, in place; says where they went."""
    devices = devices_of(settings)
    _refuse_parts_of_statistics(model, settings)
    before, blocks, after = _layers(model, wanted)
    lengths = _partition(blocks, _sizes(before, blocks, after), len(devices), settings.balance)
    numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
    places = [
        *((layer, 0) for layer in before),
        *zip(blocks, numbers, strict=True),
        *((layer, len(devices) - 1) for layer in after),
    ]
    places = _with_shared_weights(places)
    _place(model, places, devices)
    return "split: " + "; ".join(
        f"{device} has {lengths[number]} of {len(blocks)} layers, {format_bytes(_bytes_on(places, number))}"
        for number, device in enumerate(devices)
    )


def _refuse_parts_of_statistics(model: nn.Module, settings: SplitSection) -> None:
    norms = [name for name, part in model.named_modules() if isinstance(part, _BatchNorm)]
    if settings.microbatches > 1 and norms:
        raise LayoutError(
            "microbatches-and-batchnorm",
            f"split.microbatches is {settings.microbatches}, and the model has batch norms: {', '.join(norms[:3])}.",
            why="each would normalise with a part of the micro-batch, and train another model",
            fix="set split.microbatches: 1, or use a norm that looks at one sample (GroupNorm)",
        )


def _layers(model: nn.Module, wanted: Sequence[str] | None) -> tuple[list[Named], list[Named], list[Named]]:
    """Layers before the blocks, the blocks, layers after them, as they stand in the model."""
    names = {name for name, _ in find_blocks(model, wanted)}
    found = list(_walk("", model, names))
    numbers = [number for number, (name, _) in enumerate(found) if name in names]
    if not numbers:  # no blocks: every layer counts as one
        return [], found, []
    # What stands between blocks (a GELU between linear layers) goes with the block before it.
    first, last = numbers[0], numbers[-1]
    return found[:first], found[first : last + 1], found[last + 1 :]


def _walk(name: str, module: nn.Module, blocks: set[str]) -> Iterable[Named]:
    inside = any(block.startswith(f"{name}." if name else "") for block in blocks)
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    if name in blocks or not (inside or is_list or not name):
        yield name, module
        return
    for key, child in module.named_children():
        yield from _walk(f"{name}.{key}" if name else key, child, blocks)


def _sizes(before: list[Named], blocks: list[Named], after: list[Named]) -> list[int]:
    """Bytes of the parameters of each block, those before the first and after the last added to it."""
    seen: set[int] = set()

    def size(layers: list[Named]) -> int:
        own = [p for _, layer in layers for p in layer.parameters() if id(p) not in seen and not seen.add(id(p))]  # type: ignore[func-returns-value]
        return sum(parameter.numel() * parameter.element_size() for parameter in own)

    first = size(before)
    sizes = [size([block]) for block in blocks]
    sizes[0] += first
    return [*sizes[:-1], sizes[-1] + size(after)]


def _partition(blocks: list[Named], sizes: list[int], devices: int, balance: list[int] | list[str] | None) -> list[int]:
    """How many of the blocks each device holds."""
    if len(blocks) < devices:
        raise LayoutError(
            "fewer-layers-than-devices",
            f"The model has {len(blocks)} layers that can be placed, for {devices} devices.",
            fix="name fewer devices in split.devices, or smaller blocks in blocks",
        )
    if balance is None:
        return balanced_partition(sizes, devices)
    known = [name for name, _ in blocks]
    try:
        return parse_balance(balance, known, devices)
    except UnknownLayerError as unknown:
        raise LayoutError(
            "no-such-layer",
            f"split.balance names {unknown.name!r}, at which no device can begin: {did_you_mean(unknown.name, known)}",
            fix=f"use the names of layers, from {known[0]} to {known[-1]}",
        ) from None
    except BalanceError as error:
        given = f"{balance}, which is {sum(error.lengths)} layers on {len(error.lengths)} devices"
        raise _not_adding_up(given if isinstance(balance[0], int) else str(balance), blocks, devices) from None


def _not_adding_up(given: str, blocks: list[Named], devices: int) -> LayoutError:
    return LayoutError(
        "split-balance",
        f"split.balance is {given}; the model has {len(blocks)} layers, from {blocks[0][0]} to {blocks[-1][0]}, for "
        f"{devices} devices.",
        fix="give the number of layers of each device, or the names at which devices begin, in their order",
    )


def _with_shared_weights(places: list[Place]) -> list[Place]:
    """A layer whose weight another one has too goes where that one is."""
    of_weight: dict[int, int] = {}
    changed = []
    for (name, layer), number in places:
        weights = [id(weight) for weight in layer.parameters()]
        number = next((of_weight[weight] for weight in weights if weight in of_weight), number)
        of_weight.update(dict.fromkeys(weights, number))
        changed.append(((name, layer), number))
    return changed


def _place(model: nn.Module, places: list[Place], devices: list[torch.device]) -> None:
    """Move each layer, and have what it is given moved to it. What belongs to no layer lies on the first device."""
    home = devices[0]
    for (_, layer), number in places:
        layer.to(devices[number])
        layer.register_forward_pre_hook(partial(_move_inputs, devices[number]), with_kwargs=True)
    placed = {id(part) for (_, layer), _ in places for part in layer.modules()}
    for part in model.modules():
        if id(part) not in placed:
            _move_own(part, home)
    with_weights = [layer for (_, layer), _ in places if any(True for _ in layer.parameters())]
    ends = [part for part in model.modules() if isinstance(part, nn.Sequential) and id(part) not in placed]
    for end in [*ends, *with_weights[-1:]]:
        end.register_forward_hook(partial(_move_output, home))


def _move_own(module: nn.Module, device: torch.device) -> None:
    for parameter in module._parameters.values():
        if parameter is not None:
            parameter.data = parameter.data.to(device)
    for key, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[key] = buffer.to(device)


def _move_inputs(
    device: torch.device, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    move = partial(_to, device=device)
    return tuple(apply(value, move) for value in args), {key: apply(value, move) for key, value in kwargs.items()}


def _move_output(device: torch.device, layer: nn.Module, args: Any, output: Any) -> Any:
    return apply(output, partial(_to, device=device))


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    # Into a GPU it may arrive later, in the GPU's own order; the CPU has to wait for what it reads.
    return tensor.to(device, non_blocking=device.type == "cuda")


def _bytes_on(places: list[Place], number: int) -> int:
    own = {id(p): p.numel() * p.element_size() for (_, layer), of in places if of == number for p in layer.parameters()}
    return sum(own.values())


def spans_devices(model: nn.Module) -> bool:
    """Whether the model's layers lie on several devices. Where the user put them there, they stay."""
    found = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    return len({device for device in found if device.type != "meta"}) > 1


class MultiContext:
    """Contexts that hold for one kind of device each (autocast), together."""

    def __init__(self, contexts: Sequence[AbstractContextManager[Any] | None]) -> None:
        self._contexts = [context for context in contexts if context is not None]

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)


@dataclass
class MicroBatched:
    """From a batch to (mean or sum, weight or None), computed in `count` parts that follow each other."""

    step: Any  # a LossModule
    count: int

    def __call__(self, batch: Any) -> LossPart:
        total = samples_in(batch)
        parts = min(self.count, total)
        if parts == 1:
            loss: LossPart = self.step.forward(batch)
            return loss
        draw = noise.current()
        results, metrics, samples = [], [], []
        for number in range(parts):
            start, stop = cut(total, parts, number)
            with nullcontext() if draw is None else draw.select(start, stop - start):
                results.append(self.step.forward(rows_of(batch, start, stop)))
            samples.append(stop - start)
            metrics.append(self.step.metrics)
        weights = [count if weight is None else weight for (_, weight), count in zip(results, samples, strict=True)]
        self.step.metrics = combine_metrics(metrics, weights)
        return combine_losses(results, samples)
