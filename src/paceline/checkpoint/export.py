"""Export a checkpoint's model for other programs.

    export(locate(Path("runs/gpt/checkpoints/step-000120")), "safetensors", Path("gpt.safetensors"))

`safetensors`: one file. Tied weights are stored once, with their other names in the metadata, as in
`safetensors.torch.save_model`.
`torch`: a state dict with every name, for `model.load_state_dict`.
`huggingface`: a folder. A model of transformers is exported for `from_pretrained`, a `gpt` as a GPT-2; any other model
as its weights and the model section of the recipe. GPT-2 is equivalent to `gpt`, but transposes the weights of linear
layers, and stores the queries of all heads, then keys, then values; `gpt` interleaves them by head. The head is tied to
the embedding in both and not exported.
"""

from __future__ import annotations

import inspect
import json
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from paceline.checkpoint.checkpoint_store import Address
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.reader import Checkpoint, open_checkpoint, read_tensors
from paceline.errors import CheckpointError, ModelError
from paceline.models.gpt import GPT
from paceline.run import regular_files

Format = Literal["safetensors", "torch", "huggingface"]
_MODEL, _EMA = "model/", "ema/"
_TOP = {"tokens": "wte", "positions": "wpe", "norm": "ln_f"}
_LINEAR = {"attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
_NORMS = {"norm1": "ln_1", "norm2": "ln_2"}
_SHARED = "head.weight"


def export(at: Address, to: Format, output: Path, *, ema: bool = False) -> int:
    """Export the model of a checkpoint, or its EMA weights with `ema`. Every byte is verified.

    Returns the number of weights.
    """
    checkpoint = open_checkpoint(at)
    sources = _sources(checkpoint, ema)
    _require_free(output)
    weights = _read(checkpoint, sources)
    named = {name: weights[source] for name, source in sources.items()}
    write = {"safetensors": _safetensors, "torch": _torch, "huggingface": _huggingface}[to]
    _atomically(output, lambda partial: write(partial, named, checkpoint.manifest))
    return sum(prod(tensor.shape) for tensor in weights.values())


def is_pretrained(model: nn.Module) -> bool:
    """Whether it is a model of transformers."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)


class PretrainedFiles:
    """What `save_pretrained` writes besides the weights: part of a checkpoint, for its export. The user creates the
    model again, so nothing is loaded."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model

    def state_dict(self) -> dict[str, Any]:
        """Contents by file name."""
        # FSDP replaces the class of the model by a subclass of it.
        kind = next(kind for kind in type(self._model).__mro__ if not issubclass(kind, FSDPModule))
        files = {"config.json": {**json.loads(self._model.config.to_json_string()), "architectures": [kind.__name__]}}
        generation = getattr(self._model, "generation_config", None)
        if generation is not None:
            files["generation_config.json"] = json.loads(generation.to_json_string())
        return files

    def load_state_dict(self, state: Any) -> None:
        pass


def _sources(checkpoint: Checkpoint, ema: bool) -> dict[str, str]:
    """The tensor to read for each name in the model. Tied weights share one."""
    manifest = checkpoint.manifest
    names = [name for name in (*manifest.tensors, *manifest.aliases) if name.startswith(_MODEL)]
    if not names:
        raise CheckpointError("no-weights", f"Checkpoint {checkpoint.at} contains no model.")
    sources = {name.removeprefix(_MODEL): manifest.aliases.get(name, name) for name in names}
    if not ema:
        return sources
    averages = _averages(manifest, sources)
    if not averages:
        raise CheckpointError("no-ema", f"Checkpoint {checkpoint.at} contains no averaged weights.")
    return {name: averages.get(source, source) for name, source in sources.items()}


def _averages(manifest: Manifest, sources: Mapping[str, str]) -> dict[str, str]:
    """The EMA of each tensor. Tied weights have one, under any of their names; buffers have none."""
    averages: dict[str, str] = {}
    for name, source in sources.items():
        average = manifest.aliases.get(_EMA + name, _EMA + name)
        if average in manifest.tensors:
            averages.setdefault(source, average)
    return averages


def _read(checkpoint: Checkpoint, sources: Mapping[str, str]) -> dict[str, Tensor]:
    tensors = checkpoint.manifest.tensors
    return read_tensors(
        checkpoint, {source: torch.empty(tensors[source].shape, device="meta") for source in sources.values()}
    )


def _safetensors(path: Path, named: Mapping[str, Tensor], manifest: Manifest) -> None:
    kept: dict[int, str] = {}
    notes = {"format": "pt", "step": str(manifest.step)}
    for name, tensor in named.items():
        first = kept.setdefault(id(tensor), name)
        if first != name:
            notes[name] = first
    path.touch()
    mode = path.stat().st_mode  # save_file creates files that only the owner can read
    save_file({name: named[name].contiguous() for name in kept.values()}, path, metadata=notes)
    path.chmod(stat.S_IMODE(mode))


def _torch(path: Path, named: Mapping[str, Tensor], manifest: Manifest) -> None:
    torch.save(dict(named), path)


def _huggingface(folder: Path, named: Mapping[str, Tensor], manifest: Manifest) -> None:
    section = dict(manifest.recipe.get("model") or {})
    origin = f"trained to step {manifest.step} with paceline {manifest.versions.get('paceline', '')}".strip()
    files = manifest.state.get("huggingface") or {}
    if files:
        settings = files["config.json"]
        text = f"A {settings['architectures'][0]}, {origin}. Load it with its `from_pretrained(folder)`.\n"
    elif section.get("name") == "gpt":
        defaults = inspect.signature(GPT).parameters  # of options that are not in the recipe
        heads, dropout = (section.get(option, defaults[option].default) for option in ("heads", "dropout"))
        named, settings = gpt2_weights(named, heads), gpt2_config(named, heads, dropout)
        text = f"A GPT-2, {origin}. Load it with `transformers.GPT2LMHeadModel.from_pretrained(folder)`.\n"
    else:
        settings = {"model": section, "step": manifest.step}
        text = (
            f"The weights of {section.get('name', 'a model')}, {origin}. config.json contains the model section of the "
            "recipe. Build the model, then call `safetensors.torch.load_model(model, path)`.\n"
        )
    folder.mkdir()
    _safetensors(folder / "model.safetensors", named, manifest)
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    if generation := files.get("generation_config.json"):
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (folder / "README.md").write_text(text)


def _atomically(output: Path, write: Callable[[Path], None]) -> None:
    """Write next to `output`, sync, then rename."""
    partial = output.with_name(f".{output.name}.partial-{secrets.token_hex(4)}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write(partial)
        for path in [*partial.iterdir(), partial] if partial.is_dir() else [partial]:
            regular_files.sync(path)
        _require_free(output)
        partial.rename(output)
        regular_files.sync(output.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            "not-exported", f"Could not write {output}: {getattr(error, 'strerror', None) or error}."
        ) from None
    finally:
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):
            partial.unlink()


def _require_free(output: Path) -> None:
    if output.exists() or output.is_symlink():
        raise CheckpointError("exists", f"{output} already exists.", fix="use another name, or remove it first")


def gpt2_weights(own: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """The state_dict of a `gpt`, converted to GPT2LMHeadModel."""
    _require_shape(own, heads)
    return dict(_renamed(name, tensor, heads) for name, tensor in own.items() if name != _SHARED)


def gpt2_config(own: Mapping[str, Tensor], heads: int, dropout: float) -> dict[str, Any]:
    """The config.json for transformers."""
    vocabulary, width = own["tokens.weight"].shape
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": _layers(own),
        "n_embd": width,
        "n_head": heads,
        "n_positions": own["positions.weight"].shape[0],
        "vocab_size": vocabulary,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "attn_pdrop": dropout,
        "embd_pdrop": dropout,
        "resid_pdrop": dropout,
        "tie_word_embeddings": True,
        "bos_token_id": None,  # the defaults of GPT-2 are outside smaller vocabularies
        "eos_token_id": None,
        "torch_dtype": str(own["tokens.weight"].dtype).removeprefix("torch."),
    }


def _layers(own: Mapping[str, Tensor]) -> int:
    return len({match[1] for name in own if (match := re.match(r"blocks\.(\d+)\.", name))})


def _require_shape(own: Mapping[str, Tensor], heads: int) -> None:
    """Require exactly the parameters of a GPT-2 of this size."""
    blocks = [f"blocks.{number}.{part}" for number in range(_layers(own)) for part in (*_LINEAR, *_NORMS)]
    expected = {f"{part}.{kind}" for part in (*blocks, "norm") for kind in ("weight", "bias")}
    expected |= {"tokens.weight", "positions.weight"}
    differing = expected.symmetric_difference(name for name in own if name != _SHARED)
    if differing:
        raise _not_gpt2(f"{min(differing)} is {'missing' if min(differing) in expected else 'unexpected'}")
    head = own.get(_SHARED)
    if head is not None and head is not own["tokens.weight"] and not head.equal(own["tokens.weight"]):
        raise _not_gpt2("its head is not tied to the token embedding")
    if own["tokens.weight"].shape[1] % heads:
        raise _not_gpt2(f"its width {own['tokens.weight'].shape[1]} is not divisible by {heads} heads")


def _not_gpt2(reason: str) -> ModelError:
    return ModelError("not-gpt2", f"The model can't be exported as GPT-2: {reason}.")


def _renamed(name: str, tensor: Tensor, heads: int) -> tuple[str, Tensor]:
    layer, _, kind = name.rpartition(".")
    if layer in _TOP:
        return f"transformer.{_TOP[layer]}.{kind}", tensor
    _, number, part = layer.split(".", 2)
    if part == "attention.qkv":  # from (query, key, value) per head to all queries, all keys, all values
        each = tensor.view(heads, 3, tensor.shape[0] // (3 * heads), -1)
        tensor = each.transpose(0, 1).reshape(tensor.shape)
    if part in _LINEAR and kind == "weight":
        tensor = tensor.t()
    return f"transformer.h.{number}.{(_LINEAR | _NORMS)[part]}.{kind}", tensor.contiguous()
