from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import ModelError


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("mlp", {"inputs": 48}, (2, 3, 4, 4)),
        ("resnet20", {}, (2, 3, 32, 32)),
        ("resnet18", {"classes": 5}, (2, 3, 64, 64)),
    ],
)
def test_classifiers_return_logits_or_a_loss(name: str, options: dict[str, int], shape: tuple[int, ...]) -> None:
    model = paceline.get_model(name)(**options)
    inputs, targets = torch.rand(shape), torch.tensor([0, 1])
    logits = model(inputs)
    expected = nn.functional.cross_entropy(logits, targets)
    model.eval()  # batch statistics were updated: compare the loss of one and the same pass
    logits = model(inputs)
    expected = nn.functional.cross_entropy(logits, targets)
    assert model(inputs, targets)["loss"].item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_model_is_built_from_its_recipe() -> None:
    config = paceline.Config.from_dict({"model": {"name": "mlp", "inputs": 12, "width": 5}})
    assert paceline.get_model("mlp")(config).layers[0].weight.shape == (5, 12)
    # A recipe that says nothing of a model gives the defaults of any model.
    assert paceline.get_model("vae")(paceline.Config()).shape == (3, 32, 32)


def test_the_seed_of_a_recipe_determines_the_initial_weights() -> None:
    def weights(seed: int, before: int) -> torch.Tensor:
        torch.manual_seed(before)
        config = paceline.Config.from_dict({"model": {"name": "mlp", "inputs": 4}, "seed": seed})
        state = torch.get_rng_state()
        model = paceline.get_model("mlp")(config)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(model.layers[0].weight, paceline.Trainer.from_config(config).model.layers[0].weight)  # type: ignore
        return model.layers[0].weight

    assert torch.equal(weights(1, before=3), weights(1, before=4))
    assert not torch.equal(weights(1, before=3), weights(2, before=3))


def test_a_registered_model_is_found() -> None:
    @paceline.register_model("line")
    class Line(nn.Module):
        def __init__(self, slope: float = 1.0) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.tensor(slope))

    assert paceline.get_model("line")(slope=3.0).slope.item() == 3.0


def test_a_function_that_returns_no_module_is_named_with_its_line() -> None:
    @paceline.register_model("forgets")
    def forgets(width: int) -> None:
        nn.Linear(width, 1)

    line = forgets.__code__.co_firstlineno
    with pytest.raises(ModelError) as caught:
        paceline.get_model("forgets")(width=2)
    assert caught.value.code == "model.not-a-module" and f"test_zoo.py:{line}" in caught.value.what
    with pytest.raises(ModelError) as missing:
        paceline.get_model("forgets")(paceline.Config.from_dict({"model": {"name": "forgets"}}))
    assert missing.value.code == "model.missing-option" and "'width'" in missing.value.what


def test_invalid_models_and_options_have_codes() -> None:
    with pytest.raises(ModelError) as name:
        paceline.get_model("resnet5")
    assert name.value.code == "model.unknown-name" and "did you mean" in str(name.value)
    with pytest.raises(ModelError) as option:
        paceline.get_model("gpt")(layer=3)
    assert option.value.code == "model.unknown-option" and "did you mean 'layers'" in str(option.value)
    with pytest.raises(ModelError) as other:
        paceline.get_model("vae")(paceline.Config.from_dict({"model": {"name": "gpt"}}))
    assert other.value.code == "model.other-model"
    with pytest.raises(ModelError) as shape:
        paceline.get_model("gpt")(width=30, heads=4)
    assert shape.value.code == "model.bad-shape"
    with pytest.raises(ModelError) as length:
        paceline.get_model("gpt")(layers=1, width=16, heads=2, context=8)(torch.zeros(1, 9, dtype=torch.int64))
    assert length.value.code == "model.too-long"
