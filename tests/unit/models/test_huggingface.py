from __future__ import annotations

import pytest

from paceline.models.spec import spec_of


def test_blocks_heads_and_tensor_plan_are_read_from_the_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=32,
    )  # fmt: skip
    spec = spec_of(transformers.LlamaForCausalLM(config))
    assert spec.blocks == ("model.layers.0", "model.layers.1")
    assert spec.heads == {"num_attention_heads": 4, "num_key_value_heads": 2}
    assert spec.tensor_plan is not None and spec.tensor_plan["model.layers.*.mlp.down_proj"] == "row"
    assert spec.pipeline is None and not spec.deferred_init
