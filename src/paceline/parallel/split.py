"""`strategy: split`: one process, with the layers of a model placed on several devices.

Layers keep the order of the model: modules before the blocks, the blocks, modules after them. Each device holds
consecutive blocks. Hooks move the inputs of a layer to its device, and the output of the last layer back to the first
device, which holds the batch and computes the loss. Outputs of an nn.Sequential inside the model are moved back too, as
custom code may use them. Layers that share a parameter are placed on the device of the first one.

With `split.microbatches: m`, a micro-batch is sliced in m, so that the first device can run the next slice while the
second runs this one. This relies on asynchronous GPU kernels; on a CPU it saves no time. Slices are weighted so that
the gradient is unchanged.
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
from paceline.errors import LayoutError
from paceline.models.divisor import Divisor
from paceline.models.spec import find_blocks
from paceline.parallel.data_parallel import LossPart, combine_losses, combine_metrics
from paceline.parallel.meta_init import is_meta, materialize
from paceline.parallel.model_parts import ModelParts, PassContext
from paceline.plan.partition import balanced_partition, parse_balance
from paceline.plan.slicing import slice_bounds
from paceline.runtime import noise
from paceline.text import format_bytes

Named = tuple[str, nn.Module]
Place = tuple[Named, int]  # a layer and the index of its device
ALREADY_PLACED = "placement: unchanged, the model is already on several devices"


def apply_split(parts: ModelParts, context: PassContext) -> str:
    if is_meta(parts.model):
        materialize(parts.model, parts.model, torch.device("cpu"), context.config.seed)
    if spans_devices(parts.model):
        return ALREADY_PLACED
    return split(parts.model, context.config.split, parts.blocks)


def apply_microbatches(parts: ModelParts, context: PassContext) -> None:
    parts.forward, parts.slices = MicroBatched(parts.module, context.config.split.microbatches), True


def devices_of(settings: SplitSection) -> list[torch.device]:
    """The devices of the recipe, otherwise all GPUs."""
    names = settings.devices or [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if len(names) < 2:
        raise LayoutError("one-device", f'strategy="split" needs at least two devices, got {len(names)}.')
    return [_parse_device(name) for name in names]


def _parse_device(name: str) -> torch.device:
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
    raise LayoutError("no-such-device", f"split.devices: device {name!r} is not available. Available: {available}.")


def split(model: nn.Module, settings: SplitSection, names: Sequence[str] | None = None) -> str:
    """Place the layers of the model on the devices. Returns a summary for the log."""
    devices = devices_of(settings)
    _require_no_batchnorm(model, settings)
    before, blocks, after = _layers(model, names)
    lengths = _partition(blocks, _sizes(before, blocks, after), len(devices), settings.balance)
    numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
    places: list[Place] = [
        *((layer, 0) for layer in before),
        *zip(blocks, numbers, strict=True),
        *((layer, len(devices) - 1) for layer in after),
    ]
    places = _colocate_tied(places)
    _place(model, places, devices)
    return "split: " + "; ".join(
        f"{lengths[number]} of {len(blocks)} layers on {device}, {format_bytes(_bytes_on(places, number))}"
        for number, device in enumerate(devices)
    )


def _require_no_batchnorm(model: nn.Module, settings: SplitSection) -> None:
    norms = [name for name, part in model.named_modules() if isinstance(part, _BatchNorm)]
    if settings.microbatches > 1 and norms:
        raise LayoutError(
            "microbatches-and-batchnorm",
            f"split.microbatches is {settings.microbatches}, but the model has batch norms: {', '.join(norms[:3])}.",
        )


def _layers(model: nn.Module, names: Sequence[str] | None) -> tuple[list[Named], list[Named], list[Named]]:
    """Layers before the blocks, the blocks, and layers after them."""
    blocks = {name for name, _ in find_blocks(model, names)}
    found = list(_walk("", model, blocks))
    numbers = [number for number, (name, _) in enumerate(found) if name in blocks]
    if not numbers:  # no blocks: treat every layer as one
        return [], found, []
    # Layers between blocks (a GELU between linear layers) belong to the block before them.
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
    """Parameter bytes per block; layers before and after the blocks count for the first and last one."""
    seen: set[int] = set()

    def size(layers: list[Named]) -> int:
        own = [p for _, layer in layers for p in layer.parameters() if id(p) not in seen and not seen.add(id(p))]  # type: ignore[func-returns-value]
        return sum(parameter.nbytes for parameter in own)

    first = size(before)
    sizes = [size([block]) for block in blocks]
    sizes[0] += first
    return [*sizes[:-1], sizes[-1] + size(after)]


def _partition(blocks: list[Named], sizes: list[int], devices: int, balance: list[int] | list[str] | None) -> list[int]:
    """Number of blocks per device."""
    if len(blocks) < devices:
        raise LayoutError(
            "fewer-layers-than-devices", f"The model has {len(blocks)} layers to place on {devices} devices."
        )
    if balance is None:
        return balanced_partition(sizes, devices)
    return parse_balance(balance, [name for name, _ in blocks], devices, is_pipeline=False)


def _colocate_tied(places: list[Place]) -> list[Place]:
    """Place layers that share a parameter on the device of the first one."""
    of_weight: dict[int, int] = {}
    changed = []
    for (name, layer), number in places:
        weights = [id(weight) for weight in layer.parameters()]
        number = next((of_weight[weight] for weight in weights if weight in of_weight), number)
        of_weight.update(dict.fromkeys(weights, number))
        changed.append(((name, layer), number))
    return changed


def _place(model: nn.Module, places: list[Place], devices: list[torch.device]) -> None:
    """Move the layers and register hooks that move their inputs. Everything else is placed on the first device."""
    first = devices[0]
    for (_, layer), number in places:
        layer.to(devices[number])
        layer.register_forward_pre_hook(partial(_move, devices[number]), with_kwargs=True)
    placed = {id(part) for (_, layer), _ in places for part in layer.modules()}
    for part in model.modules():
        if id(part) not in placed:
            _move_own(part, first)
    parametrized = [layer for (_, layer), _ in places if any(True for _ in layer.parameters())]
    ends = [part for part in model.modules() if isinstance(part, nn.Sequential) and id(part) not in placed]
    for end in [*ends, *parametrized[-1:]]:
        end.register_forward_hook(lambda layer, args, output: apply(output, partial(_to, device=first)))


def _move_own(module: nn.Module, device: torch.device) -> None:
    for parameter in module._parameters.values():
        if parameter is not None:
            parameter.data = parameter.data.to(device)
    for key, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[key] = buffer.to(device)


def _move(device: torch.device, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return apply((args, kwargs), partial(_to, device=device))


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    # A copy to a GPU is ordered by its stream; a copy to the CPU must be complete before it is read.
    return tensor.to(device, non_blocking=device.type == "cuda")


def _bytes_on(places: list[Place], number: int) -> int:
    return sum({id(p): p.nbytes for (_, layer), of in places if of == number for p in layer.parameters()}.values())


def spans_devices(model: nn.Module) -> bool:
    """Whether the model is on several devices. If the user placed it there, it is not moved."""
    found = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    return len({device for device in found if device.type != "meta"}) > 1


class MultiContext:
    """Enters several contexts at once: autocast applies to a single device type."""

    def __init__(self, contexts: Sequence[AbstractContextManager[Any] | None]) -> None:
        self.contexts: list[AbstractContextManager[Any]] = []
        for context in contexts:
            if context is not None:
                self.contexts += contexts_in(context)

    def __enter__(self) -> None:
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*error)


def contexts_in(context: AbstractContextManager[Any] | None) -> list[AbstractContextManager[Any]]:
    if isinstance(context, MultiContext):
        return context.contexts
    return [] if context is None else [context]


@dataclass
class MicroBatched:
    """Maps a batch to (mean or sum, weight or None), computed in `count` consecutive slices."""

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
            start, stop = slice_bounds(total, parts, number)
            with nullcontext() if draw is None else draw.select(start, stop - start):
                results.append(self.step.forward(rows_of(batch, start, stop)))
            samples.append(stop - start)
            metrics.append(self.step.metrics)
        weights = [
            count if weight is None else weight.weight if isinstance(weight, Divisor) else weight
            for (_, weight), count in zip(results, samples, strict=True)
        ]
        self.step.metrics = combine_metrics(metrics, weights)
        return combine_losses(results, samples)
