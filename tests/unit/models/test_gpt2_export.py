"""The tensors of `gpt` under the names of GPT-2; tests/unit/checkpoint/test_export.py compares with transformers."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import ModelError
from paceline.models import gpt2_export
from paceline.models.gpt import GPT

HEADS = 2


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(GPT(layers=2, width=8, heads=HEADS, vocabulary=11, context=4).state_dict())


def test_linear_layers_are_transposed_and_the_shared_head_is_left_out() -> None:
    own = state()
    exported = gpt2_export.weights(own, HEADS)
    assert len(exported) == len(own) - 1 and "lm_head.weight" not in exported
    assert torch.equal(exported["transformer.h.1.mlp.c_fc.weight"], own["blocks.1.up.weight"].t())
    assert torch.equal(exported["transformer.wte.weight"], own["tokens.weight"])
    assert all(tensor.is_contiguous() for tensor in exported.values())


def test_queries_keys_and_values_of_all_heads_follow_each_other() -> None:
    own = state()
    own["blocks.0.attention.qkv.bias"] = torch.arange(24.0)  # of head 0: query, key, value, 4 each; then of head 1
    exported = gpt2_export.weights(own, HEADS)["transformer.h.0.attn.c_attn.bias"]
    assert exported.tolist() == [*range(4), *range(12, 16), *range(4, 8), *range(16, 20), *range(8, 12), *range(20, 24)]


def test_the_config_has_the_sizes_of_the_model() -> None:
    made = gpt2_export.config(state(), HEADS, 0.1)
    sizes = [made[key] for key in ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size", "resid_pdrop")]
    assert sizes == [2, 8, 2, 4, 11, 0.1]


@pytest.mark.parametrize("change", ["missing", "unknown", "untied", "heads"])
def test_a_model_of_another_shape_has_a_code(change: str) -> None:
    own, heads = state(), HEADS
    if change == "missing":
        del own["blocks.1.norm2.bias"]
    elif change == "unknown":
        own["blocks.1.gate.weight"] = torch.ones(2)
    elif change == "untied":
        own["head.weight"] = own["tokens.weight"] + 1
    else:
        heads = 3
    with pytest.raises(ModelError) as caught:
        gpt2_export.weights(own, heads)
    assert caught.value.code == "model.not-gpt2"
