from __future__ import annotations

from typing import Any

import pytest
import torch

import paceline
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


def heads() -> tuple[dict[str, Any], torch.Tensor]:
    """Models and batches whose losses are means over other things than samples."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    sizes |= {"vocab_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config, spans = (transformers.BertConfig(**sizes, num_labels=number) for number in (3, 2))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 32, (7, 6), generator=generator)
    labels = ids.clone()
    for row in range(7):
        labels[row, 1 + (row * 5) % 6 :] = -100
    ends = torch.tensor([1, 99, 99, 3, 4, 99, 2])
    classes = torch.tensor([0, -100, 1, -100, -100, 2, 1])
    sequence = transformers.T5Config(
        vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
    )
    return {
        "masked language model": (transformers.BertForMaskedLM, config, {"labels": labels}),
        "sequence to sequence": (transformers.T5ForConditionalGeneration, sequence, {"labels": labels}),
        "tokens": (transformers.BertForTokenClassification, config, {"labels": labels.where(labels < 0, labels % 3)}),
        "samples without a class": (transformers.BertForSequenceClassification, config, {"labels": classes}),
        "spans outside": (
            transformers.BertForQuestionAnswering, spans, {"start_positions": ends, "end_positions": ends}
        ),
    }, ids  # fmt: skip


def test_losses_of_hugging_face_heads_do_not_depend_on_the_slices(capsys: Any) -> None:
    kinds, ids = heads()
    for name, (kind, config, targets) in kinds.items():
        batch, found = {"input_ids": ids, **targets}, []
        for settings in ({}, {"accumulate": 3}):
            torch.manual_seed(0)
            model = kind(config)
            trainer = paceline.Trainer(
                model, torch.optim.SGD(model.parameters(), lr=0.1), unused_parameters="allow", run=False, quiet=True,
                **settings,
            )  # fmt: skip
            found.append(trainer.train([batch] * 2, max_steps=2).losses)
        assert found[1] == pytest.approx(found[0], rel=1e-5), name
    assert capsys.readouterr().out == ""
