from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_gpt_has_gpt2s_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = paceline.get_model("gpt")(layers=12, width=768, heads=12, vocabulary=50257, context=1024)
    assert parameters(model) == 124_439_808


def test_attention_is_causal() -> None:
    model = paceline.get_model("gpt")(layers=2, width=32, heads=2, context=8)
    model.eval()
    tokens = torch.randint(0, 256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[0, :5], after[0, :5], atol=1e-6)
    assert not torch.allclose(before[0, 5:], after[0, 5:], atol=1e-6)


def test_padding_has_no_weight_in_the_loss() -> None:
    model = paceline.get_model("gpt")(layers=1, width=16, heads=2, context=8, ignore_index=-100)
    tokens = torch.randint(0, 256, (2, 8))
    targets = torch.randint(0, 256, (2, 8))
    targets[1, 3:] = -100
    loss = model(tokens, targets)
    assert isinstance(loss, paceline.Loss)
    assert int(loss.weight) == 11
    flat = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
    assert (loss.sum / loss.weight).item() == pytest.approx(flat.item(), rel=1e-5)


def test_generated_tokens_follow_the_prompt() -> None:
    model = paceline.get_model("gpt")(layers=1, width=16, heads=2, context=8)
    prompt = torch.tensor([[1, 2, 3]])
    written = model.generate(prompt, 12)
    assert written.shape == (1, 15) and torch.equal(written[:, :3], prompt)
    assert model.training
