from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import ModelError


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_resnet50_has_the_published_number_of_parameters() -> None:
    assert parameters(paceline.get_model("resnet50")(classes=1000)) == 25_557_032


def test_resnet18_has_the_published_number_of_parameters() -> None:
    assert parameters(paceline.get_model("resnet18")()) == 11_689_512


def test_gpt_has_gpt2s_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = paceline.get_model("gpt")(layers=12, width=768, heads=12, vocabulary=50257, context=1024)
    assert parameters(model) == 124_439_808


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [
        ("mlp", {"inputs": 48}, (2, 3, 4, 4)),
        ("resnet20", {}, (2, 3, 32, 32)),
        ("resnet18", {"classes": 5}, (2, 3, 64, 64)),
    ],
)
def test_classifiers_give_logits_or_a_loss(name: str, options: dict[str, int], shape: tuple[int, ...]) -> None:
    model = paceline.get_model(name)(**options)
    inputs, targets = torch.rand(shape), torch.tensor([0, 1])
    logits = model(inputs)
    expected = nn.functional.cross_entropy(logits, targets)
    model.eval()  # batch statistics were updated: compare the loss of one and the same pass
    logits = model(inputs)
    expected = nn.functional.cross_entropy(logits, targets)
    assert model(inputs, targets)["loss"].item() == pytest.approx(expected.item(), rel=1e-5)


def test_vae_reconstructs_better_after_some_steps() -> None:
    torch.manual_seed(0)
    model = paceline.get_model("vae")(size=8, channels=1, width=64, latent=4)
    images = (torch.rand(16, 1, 8, 8) > 0.5).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = model(images)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert model.decode(torch.zeros(3, 4)).shape == (3, 1, 8, 8)


def test_gpt_looks_only_back() -> None:
    model = paceline.get_model("gpt")(layers=2, width=32, heads=2, context=8)
    model.eval()
    tokens = torch.randint(0, 256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[0, :5], after[0, :5], atol=1e-6)
    assert not torch.allclose(before[0, 5:], after[0, 5:], atol=1e-6)


def test_gpts_padding_counts_nothing() -> None:
    model = paceline.get_model("gpt")(layers=1, width=16, heads=2, context=8, ignore_index=-100)
    tokens = torch.randint(0, 256, (2, 8))
    targets = torch.randint(0, 256, (2, 8))
    targets[1, 3:] = -100
    loss = model(tokens, targets)
    assert isinstance(loss, paceline.Loss)
    assert int(loss.weight) == 11
    flat = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
    assert (loss.sum / loss.weight).item() == pytest.approx(flat.item(), rel=1e-5)


def test_gpt_generates_behind_its_prompt() -> None:
    model = paceline.get_model("gpt")(layers=1, width=16, heads=2, context=8)
    prompt = torch.tensor([[1, 2, 3]])
    written = model.generate(prompt, 12)
    assert written.shape == (1, 15) and torch.equal(written[:, :3], prompt)
    assert model.training


def test_a_model_is_built_from_its_recipe() -> None:
    config = paceline.Config.from_dict({"model": {"name": "mlp", "inputs": 12, "width": 5}})
    assert paceline.get_model("mlp")(config).layers[0].weight.shape == (5, 12)
    # A recipe that says nothing of a model gives the defaults of any model.
    assert paceline.get_model("vae")(paceline.Config()).shape == (3, 32, 32)


def test_a_registered_model_of_ones_own_is_found() -> None:
    @paceline.register_model("line")
    class Line(nn.Module):
        def __init__(self, slope: float = 1.0) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.tensor(slope))

    assert paceline.get_model("line")(slope=3.0).slope.item() == 3.0


def test_bad_models_have_codes() -> None:
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
