"""Exports `gpt` to the format of Hugging Face's GPT-2.

The models are equivalent. GPT-2 transposes the weights of linear layers, and stores the queries of all heads, then
keys, then values; `gpt` interleaves them by head. The head is tied to the embedding in both and not exported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.errors import ModelError

_TOP = {"tokens": "wte", "positions": "wpe", "norm": "ln_f"}
_LINEAR = {"attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
_NORMS = {"norm1": "ln_1", "norm2": "ln_2"}
_SHARED = "head.weight"


def weights(own: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """The state_dict of a `gpt`, converted to GPT2LMHeadModel."""
    _require_shape(own, heads)
    return dict(_renamed(name, tensor, heads) for name, tensor in own.items() if name != _SHARED)


def config(own: Mapping[str, Tensor], heads: int, dropout: float) -> dict[str, Any]:
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
    return ModelError(
        "not-gpt2",
        f"The model can't be exported as GPT-2: {reason}.",
        fix="export it with --to safetensors or --to torch, which keep its parameter names",
    )


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
