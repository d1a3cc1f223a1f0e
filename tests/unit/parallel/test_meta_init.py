"""Models built on the meta device: filled shard by shard, with the weights that one rank would have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
import tiny
from paceline.errors import LayoutError
from paceline.parallel.meta_init import is_meta, materialize


class Waves(nn.Module):
    """A module with a parameter, a buffer that is saved and one that is not."""

    def __init__(self, forgets: bool = False) -> None:
        super().__init__()
        self.forgets = forgets
        self.weight = nn.Parameter(torch.empty(5, 8))
        self.register_buffer("count", torch.empty(3, dtype=torch.int64))
        self.register_buffer("table", torch.empty(5), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.count.zero_()
        if not self.forgets:
            self.table.copy_(torch.linspace(0, 1, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, self.weight) * self.table


def on_meta(build: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = build()
    return model


def filled(build: Any) -> nn.Module:
    model = on_meta(build)
    materialize(model, model, torch.device("cpu"), seed=1)
    return model


def test_every_parameter_and_buffer_gets_its_values() -> None:
    model = filled(lambda: nn.Sequential(Waves(), nn.Linear(5, 2), nn.BatchNorm1d(2)))
    assert not is_meta(model)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in [*model.parameters(), *model.buffers()])
    torch.testing.assert_close(model[0].table, torch.linspace(0, 1, 5))
    assert float(model[1].weight.detach().std()) > 0.05


def test_weights_belong_to_the_modules_name_and_the_seed() -> None:
    first, second = (filled(lambda: nn.Sequential(Waves(), Waves())) for _ in range(2))
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)
    assert not torch.equal(first[0].weight, first[1].weight)
    other = on_meta(Waves)
    materialize(other, other, torch.device("cpu"), seed=2)
    assert not torch.equal(first[0].weight, other.weight)


def test_filling_leaves_the_random_state_as_it_was() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    filled(Waves)
    assert torch.equal(torch.rand(1), expected)


def test_a_tied_weight_stays_one() -> None:
    model = filled(lambda: paceline.get_model("gpt")(layers=1, width=8, heads=1, vocabulary=11, context=4))
    assert model.head.weight is model.tokens.weight
    assert float(model.tokens.weight.detach().std()) == pytest.approx(0.02, rel=0.3)


def test_a_reset_that_forgets_a_buffer_is_named() -> None:
    with pytest.raises(LayoutError, match="'table' is still uninitialized") as caught:
        filled(lambda: nn.Sequential(Waves(forgets=True)))
    assert caught.value.code == "layout.meta-not-filled"


def test_a_module_without_a_reset_is_named() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    with pytest.raises(LayoutError, match="Bare") as caught:
        filled(lambda: nn.Sequential(Bare()))
    assert caught.value.code == "layout.meta-without-reset"


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(settings)
    return model


def _train_meta(strategy: str, name: str) -> dict[str, Any]:
    builds = {"own": lambda: nn.Sequential(Waves(), nn.Linear(5, 2)), "gpt2": tiny.tiny_hf_gpt2, "llama": llama}
    model = on_meta(builds[name])
    settings: dict[str, Any] = {"strategy": strategy, "precision": "fp64", "quiet": True, "run": False, "batch": 6}
    if name == "own":
        settings["criterion"] = nn.CrossEntropyLoss()
    trainer = paceline.Trainer(model, optimizer={"name": "sgd", "lr": 0.1}, **settings)
    before = {key: value.clone() for key, value in trainer.state_dict().items()}
    data = tiny.blobs(24) if name == "own" else tiny.Labelled(24)
    history = trainer.train(data, max_steps=3)
    return {"before": before, "losses": history.losses, "after": trainer.state_dict()}


@pytest.mark.parametrize("name", ["own", "gpt2", pytest.param("llama", marks=pytest.mark.nightly)])
def test_a_meta_model_of_the_users_begins_with_the_same_bits_on_any_layout(name: str) -> None:
    if name != "own":
        pytest.importorskip("transformers")
        on_meta({"gpt2": tiny.tiny_hf_gpt2, "llama": llama}[name])  # imports once, rather than in every forked rank
    one = paceline.launch(_train_meta, ranks=1, strategy="auto", name=name)
    three = paceline.launch(_train_meta, ranks=3, strategy="fsdp", name=name)
    torch.testing.assert_close(three["before"], one["before"], rtol=0, atol=0)
    assert three["losses"] == pytest.approx(one["losses"], rel=1e-9)
    torch.testing.assert_close(three["after"], one["after"], rtol=0, atol=1e-9)
    if name != "own":  # as transformers begins it: the loss of a guess, not that of large random weights
        assert one["losses"][0] == pytest.approx(torch.log(torch.tensor(256.0)).item(), rel=0.05)
