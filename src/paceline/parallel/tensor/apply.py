"""Tensor parallel: every layer is sharded over ranks, which compute their shards of it on the same data.

A model declares how its layers are sharded (`models/tensor_plan.py` has the words). Parameters become DTensors, so that
whatever comes after (sharding, norms, checkpoints) knows their layout. A layer itself computes on plain tensors, this
rank's shards, with torch's own kernels (`layers.py`); ranks communicate only here (`comm_ops.py`):

    column     full inputs   → some outputs       backward: all-reduce of the inputs' gradients
    row        some inputs   → full outputs       forward: all-reduce of the partial outputs
    sequence   between a row and the next column, each rank keeps its slice of the tokens: reduce-scatter behind the
               row, all-gather in front of the column. The traffic is the same, and it saves memory.

torch's ready styles (`ColwiseParallel` …) are not used: they run every operation through DTensor's Python, leave
gradients of norms unsummed (Partial) where no FSDP comes after them, and have no place for a layer outside the plan.
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
from paceline.models.spec import spec_of
from paceline.models.tensor_plan import plan_of, words_of_modules
from paceline.parallel.shards import shard_of, tied_parameters
from paceline.parallel.tensor.comm_ops import gather_from_group
from paceline.parallel.tensor.layers import prepare
from paceline.runtime.mesh import Mesh
from paceline.text import plural

_SHARD_DIM = {"column": 0, "gathered": 0, "vocabulary": 0, "row": 1}  # of a weight


def check_plan(model: nn.Module, settings: Settings, degree: int) -> None:
    """What can be known to be wrong from the shapes of the full model, also of one on the meta device."""
    words = words_of_modules(model, plan_of(model, settings.plan))
    for name, heads in spec_of(model).heads.items():
        if heads % degree:
            raise LayoutError(
                "heads-not-divisible",
                f"{type(model).__name__}'s {name} is {heads}, which the tensor degree {degree} does not divide.",
                why="a rank computes whole attention heads",
                fix=f"choose a tensor degree that divides {heads}, or another number of heads",
            )
    for name, word in words.items():
        _require_divisible(name, word, model.get_submodule(name), degree)
    _require_ties_sharded_alike(model, words)
    if _is_sequence_parallel(words, settings):
        _require_complete(model, words)


def _require_divisible(name: str, word: str, module: nn.Module, degree: int) -> None:
    if word not in _SHARD_DIM:
        return
    size = module.get_parameter("weight").shape[_SHARD_DIM[word]]
    if size % degree == 0:
        return
    if word == "vocabulary":
        raise LayoutError(
            "vocabulary-not-divisible",
            f"The vocabulary of {size} ({name}) is not divisible by the tensor degree {degree}.",
            why="each rank holds the same number of tokens",
            fix=f"pad the vocabulary to {-(-size // degree) * degree}, or choose another tensor degree",
        )
    raise LayoutError(
        "layer-not-divisible",
        f"{name} is cut over its {size} {'inputs' if word == 'row' else 'outputs'}, which the tensor degree {degree} "
        "does not divide.",
        fix="choose another tensor degree or width, or leave the layer out of the plan",
    )


def _require_ties_sharded_alike(model: nn.Module, words: Mapping[str, str]) -> None:
    for names in tied_parameters(model):
        modules = [name.rpartition(".")[0] for name in names]
        keys = [name.rpartition(".")[2] for name in names]
        if len({_placement(words.get(module), key) for module, key in zip(modules, keys, strict=True)}) > 1:
            raise LayoutError(
                "tied-and-cut-apart",
                f"{' and '.join(names)} are one tensor, which the tensor plan cuts in different ways.",
                fix="give both layers the same word (vocabulary, for an embedding and its head)",
            )


def _require_complete(model: nn.Module, words: Mapping[str, str]) -> None:
    """Where ranks hold different tokens, a layer that the plan forgot would quietly get a part of its gradient."""
    forgotten = [name or "the model itself" for name, module in _owners(model) if name not in words]
    if forgotten:
        raise LayoutError(
            "incomplete-tensor-plan",
            f"The tensor plan has layers that work on a share of the tokens (sequence), and does not name "
            f"{', '.join(forgotten[:4])}.",
            why="the gradient of a layer that sees some of the tokens has to be added up over ranks",
            fix="name every layer that has parameters (norms are sequence), or set tensor.sequence: false",
        )


def is_sequence_parallel(model: nn.Module, settings: Settings) -> bool:
    """Whether ranks of the tensor axis hold different tokens between layers, so that dropout has to differ there."""
    return _is_sequence_parallel(words_of_modules(model, plan_of(model, settings.plan), full=False), settings)


def _is_sequence_parallel(words: Mapping[str, str], settings: Settings) -> bool:
    return settings.sequence and "sequence" in words.values()


def apply_tensor_parallel(model: nn.Module, mesh: Mesh, settings: Settings) -> str:
    """Shard the model in place, on whatever device it is; weights are the same on all ranks. Returns a line on it."""
    axis = mesh.axis("tensor")
    assert axis is not None
    is_full = mesh.degrees.pipeline == 1
    if is_full:
        check_plan(model, settings, axis.size())
    words = words_of_modules(model, plan_of(model, settings.plan), full=is_full)
    sequence_parallel = _is_sequence_parallel(words, settings)
    _shard_parameters(model, words, axis, mesh.device)
    for name, module in _owners(model):
        prepare(module, words.get(name, "replicated"), axis, sequence_parallel)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[key] = buffer.to(mesh.device)
    model.register_forward_hook(_full_outputs)
    sharded = sum(word in _SHARD_DIM for word in words.values())
    tokens = ", tokens cut between them" if sequence_parallel else ""
    return f"tensor: {plural(sharded, 'layer')} cut over {axis.size()} ranks{tokens}"


def _owners(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that have parameters of their own."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if any(parameter is not None for parameter in module._parameters.values())
    ]


def _shard_parameters(model: nn.Module, words: Mapping[str, str], axis: DeviceMesh, device: torch.device) -> None:
    """Every parameter becomes a DTensor, replicated where no word shards it; tied ones stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in _owners(model):
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            placement = _placement(words.get(name), key)
            if parameter not in made:
                made[parameter] = _distribute(parameter, axis, placement, device)
            module._parameters[key] = made[parameter]


def _placement(word: str | None, key: str) -> Placement:
    if word not in _SHARD_DIM or (word == "row" and key == "bias"):
        return Replicate()
    return Shard(_SHARD_DIM[word])


@torch.no_grad()
def _distribute(parameter: nn.Parameter, axis: DeviceMesh, placement: Placement, device: torch.device) -> nn.Parameter:
    """Only this rank's shard goes to the device. A meta parameter stays one; it is filled later."""
    layout: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
    on_meta = DTensor.from_local(torch.empty_like(parameter, device="meta"), axis, [placement], **layout)
    own = shard_of(parameter.detach(), on_meta)
    if isinstance(placement, Shard):
        own = own.clone(memory_format=torch.contiguous_format)  # a view would keep the full tensor alive
    if not parameter.is_meta:
        own = own.to(device)
    return nn.Parameter(DTensor.from_local(own, axis, [placement], **layout), requires_grad=parameter.requires_grad)


def _full_outputs(model: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Whoever calls the model itself gets full logits."""
    if isinstance(outputs, DTensor):
        return full_logits(outputs)
    if type(outputs) is dict:
        return {key: full_logits(value) for key, value in outputs.items()}
    return None


def full_logits(logits: Any) -> Any:
    """Logits that are sharded over the vocabulary, gathered on all ranks of the tensor axis; others as they are."""
    if not isinstance(logits, DTensor):
        return logits
    return gather_from_group(logits.to_local(), logits.dim() - 1, logits.device_mesh.get_group())
