"""Tensor parallelism: layers are sharded across ranks, which process the same data.

The tensor plan of a model assigns a style to each layer (`models/spec.py`). Parameters become DTensors, so that
FSDP, gradient norms and checkpoints know their placement. Layers compute on local shards as plain tensors
and these collectives (`layers.py`):

    column     full inputs → sharded outputs       backward: all-reduce of the input gradients
    row        sharded inputs → full outputs       forward: all-reduce of the partial outputs
    sequence   activations between a row and the next column layer are sharded over tokens: reduce-scatter after the
               row layer, all-gather before the column layer. Same traffic, less memory.

torch's styles (`ColwiseParallel` …) are not used: they dispatch every operation through DTensor, leave gradients of
norms unreduced (Partial) without FSDP, and do not support layers outside the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from paceline.config.sections import TensorSection as Settings
from paceline.errors import LayoutError
from paceline.models.spec import plan_of, spec_of, styles_of_modules
from paceline.parallel.model_parts import ModelParts, PassContext
from paceline.parallel.shards import shard_of, tied_parameters
from paceline.parallel.tensor.layers import gather_from_group, parallelize_layer
from paceline.text import plural

_SHARD_DIM = {"column": 0, "gathered": 0, "vocabulary": 0, "row": 1}  # of a weight


def check_plan(model: nn.Module, settings: Settings, degree: int) -> None:
    """Validate the plan against the shapes of the full model, which may be on the meta device."""
    styles = styles_of_modules(model, plan_of(model, settings.plan))
    for name, heads in spec_of(model).heads.items():
        if heads % degree:
            raise LayoutError(
                "heads-not-divisible",
                f"{name} of {type(model).__name__} ({heads}) is not divisible by the tensor degree {degree}.",
                fix=f"use a tensor degree that divides {heads}, or another number of heads",
            )
    for name, style in styles.items():
        _require_divisible(name, style, model.get_submodule(name), degree)
    _require_ties_sharded_alike(model, styles)
    if _is_sequence_parallel(styles, settings):
        _require_complete(model, styles)


def _require_divisible(name: str, style: str, module: nn.Module, degree: int) -> None:
    if style not in _SHARD_DIM:
        return
    size = module.get_parameter("weight").shape[_SHARD_DIM[style]]
    if size % degree == 0:
        return
    if style == "vocabulary":
        raise LayoutError(
            "vocabulary-not-divisible",
            f"The vocabulary size {size} ({name}) is not divisible by the tensor degree {degree}.",
            fix=f"pad the vocabulary to {-(-size // degree) * degree}, or use another tensor degree",
        )
    raise LayoutError(
        "layer-not-divisible",
        f"{name} has {size} {'inputs' if style == 'row' else 'outputs'}, not divisible by the tensor degree {degree}.",
    )


def _require_ties_sharded_alike(model: nn.Module, styles: Mapping[str, str]) -> None:
    for names in tied_parameters(model):
        modules = [name.rpartition(".")[0] for name in names]
        keys = [name.rpartition(".")[2] for name in names]
        if len({_placement(styles.get(module), key) for module, key in zip(modules, keys, strict=True)}) > 1:
            raise LayoutError(
                "tied-and-cut-apart", f"{' and '.join(names)} are tied, but the tensor plan shards them differently."
            )


def _require_complete(model: nn.Module, styles: Mapping[str, str]) -> None:
    """With sequence parallelism, a layer missing from the plan would silently get the gradient of some tokens only."""
    missing = [name or "the model itself" for name, module in _owners(model) if name not in styles]
    if missing:
        raise LayoutError(
            "incomplete-tensor-plan",
            f"The tensor plan uses sequence parallelism, but does not include {', '.join(missing[:4])}.",
        )


def is_sequence_parallel(model: nn.Module, settings: Settings) -> bool:
    """Whether activations between layers are sharded over tokens, so that dropout must differ between ranks."""
    return _is_sequence_parallel(styles_of_modules(model, plan_of(model, settings.plan), full=False), settings)


def _is_sequence_parallel(styles: Mapping[str, str], settings: Settings) -> bool:
    return settings.sequence and "sequence" in styles.values()


def apply_tensor(parts: ModelParts, context: PassContext) -> str:
    """Shard the model in place. Weights must be equal on all ranks."""
    model, mesh, settings = parts.model, context.mesh, context.config.tensor
    axis = mesh.axis("tensor")
    assert axis is not None
    is_full = mesh.degrees.pipeline == 1
    if is_full:
        check_plan(model, settings, axis.size())
    styles = styles_of_modules(model, plan_of(model, settings.plan), full=is_full)
    sequence_parallel = _is_sequence_parallel(styles, settings)
    _shard_parameters(model, styles, axis, mesh.device)
    for name, module in _owners(model):
        parallelize_layer(module, styles.get(name, "replicated"), axis, sequence_parallel)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[key] = buffer.to(mesh.device)
    model.register_forward_hook(_full_outputs)
    sharded = sum(style in _SHARD_DIM for style in styles.values())
    suffix = ", sequence parallel" if sequence_parallel else ""
    return f"tensor: {plural(sharded, 'layer')} sharded across {axis.size()} ranks{suffix}"


def _owners(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that own parameters directly."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if any(parameter is not None for parameter in module._parameters.values())
    ]


def _shard_parameters(model: nn.Module, styles: Mapping[str, str], axis: DeviceMesh, device: torch.device) -> None:
    """Turn every parameter into a DTensor, replicated unless its style shards it. Tied parameters stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in _owners(model):
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            placement = _placement(styles.get(name), key)
            if parameter not in made:
                made[parameter] = _distribute(parameter, axis, placement, device)
            module._parameters[key] = made[parameter]


def _placement(style: str | None, key: str) -> Placement:
    if style not in _SHARD_DIM or (style == "row" and key == "bias"):
        return Replicate()
    return Shard(_SHARD_DIM[style])


@torch.no_grad()
def _distribute(parameter: nn.Parameter, axis: DeviceMesh, placement: Placement, device: torch.device) -> nn.Parameter:
    """Move only the local shard to the device. A parameter on the meta device is initialized later."""
    layout: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
    on_meta = DTensor.from_local(torch.empty_like(parameter, device="meta"), axis, [placement], **layout)
    own = shard_of(parameter.detach(), on_meta)
    if isinstance(placement, Shard):
        own = own.clone(memory_format=torch.contiguous_format)  # a view would keep the full tensor alive
    if not parameter.is_meta:
        own = own.to(device)
    return nn.Parameter(DTensor.from_local(own, axis, [placement], **layout), requires_grad=parameter.requires_grad)


def _full_outputs(model: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Return full logits from a direct call of the model."""
    if isinstance(outputs, DTensor):
        return full_logits(outputs)
    if type(outputs) is dict:
        return {key: full_logits(value) for key, value in outputs.items()}
    return None


def full_logits(logits: Any) -> Any:
    """Gather logits that are sharded over the vocabulary; others are returned unchanged."""
    if not isinstance(logits, DTensor):
        return logits
    return gather_from_group(logits.to_local(), logits.dim() - 1, logits.device_mesh.get_group())
