from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import CheckpointError
from paceline.models.gpt import GPT
from paceline.optim.ema import Ema
from worlds import ranks


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def drift(model: nn.Module, seed: int) -> None:
    """Stand-in for an optimizer step: every parameter moves."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=source))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("warmup", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13), (torch.bfloat16, 1e-5)]
)
def test_the_average_is_that_of_a_float64_loop(warmup: bool, dtype: torch.dtype, tolerance: float) -> None:
    model = small_model().to(dtype)
    model[0].bias.requires_grad_(False)
    average = Ema(dict(model.named_parameters()), 0.9, warmup)
    expected = {name: value.double() for name, value in weights(model).items()}
    for step in range(1, 101):
        drift(model, step)
        average.update(step)
        decay = min(0.9, (1 + step) / (10 + step)) if warmup else 0.9
        for name, value in weights(model).items():
            expected[name] = decay * expected[name] + (1 - decay) * value.double()
    found = average.state_dict()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(value.double(), expected[name], rtol=tolerance, atol=tolerance)


def test_a_model_of_several_dtypes_is_averaged() -> None:
    model = small_model()
    model[2].to(torch.bfloat16)
    average = Ema(dict(model.named_parameters()), 0.5, False)
    start = weights(model)
    drift(model, 1)
    average.update(1)
    for name, value in weights(model).items():
        torch.testing.assert_close(average.state_dict()[name], (start[name].float() + value.float()) / 2)


def test_inside_swapped_the_model_computes_with_the_averages_and_afterwards_with_its_own_bits() -> None:
    model = small_model().eval()
    average = Ema(dict(model.named_parameters()), 0.5, False)
    drift(model, 1)
    average.update(1)
    objects, before = [id(parameter) for parameter in model.parameters()], weights(model)
    reference = copy.deepcopy(model)
    reference.load_state_dict({**reference.state_dict(), **average.state_dict()})
    inputs = torch.randn(3, 4)
    with average.swapped():
        assert torch.equal(model(inputs), reference(inputs))
        assert_same_bits(weights(model), average.state_dict())
    assert_same_bits(weights(model), before)
    assert [id(parameter) for parameter in model.parameters()] == objects
    assert not torch.equal(model(inputs), reference(inputs))


def test_the_models_own_weights_return_after_an_exception_and_the_averages_stay() -> None:
    model = small_model().to(torch.bfloat16)
    average = Ema(dict(model.named_parameters()), 0.5, False)
    drift(model, 1)
    average.update(1)
    before, averages = weights(model), {name: value.clone() for name, value in average.state_dict().items()}
    with pytest.raises(KeyError), average.swapped(), average.swapped():
        raise KeyError("inside")
    assert_same_bits(weights(model), before)
    assert_same_bits(average.state_dict(), averages)


def test_buffers_are_the_models_own() -> None:
    model = small_model()
    average = Ema(dict(model.named_parameters()), 0.5, True)
    assert not any("running" in name for name in average.state_dict())
    model(torch.randn(8, 4))
    with average.swapped():
        assert model[1].running_mean.abs().sum() > 0


def test_tied_parameters_are_averaged_once() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["tokens"].weight
    average = Ema(dict(model.named_parameters()), 0.5, False)
    start = model["head"].weight.detach().clone()
    drift(model, 1)
    average.update(1)
    assert list(average.state_dict()) == ["tokens.weight"]
    torch.testing.assert_close(average.state_dict()["tokens.weight"], (start + model["head"].weight.detach()) / 2)


def test_a_resumed_average_continues_with_the_same_bits() -> None:
    model = small_model()
    average = Ema(dict(model.named_parameters()), 0.9, True)
    drift(model, 1)
    average.update(1)
    saved = {name: value.clone() for name, value in average.state_dict().items()}
    drift(model, 2)
    resumed = Ema(dict(model.named_parameters()), 0.9, True)
    resumed.load_state_dict(saved)
    average.update(2)
    resumed.update(2)
    assert_same_bits(resumed.state_dict(), average.state_dict())
    assert not torch.equal(saved["0.weight"], resumed.state_dict()["0.weight"])


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_averages_of_another_model_have_a_code(change: str) -> None:
    average = Ema(dict(small_model().named_parameters()), 0.9, True)
    state = dict(average.state_dict())
    if change == "missing":
        del state["0.weight"]
    else:
        state["0.weight" if change == "shape" else "3.weight"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as caught:
        average.load_state_dict(state)
    assert caught.value.code == "checkpoint.other-model"


@ranks(2)
def test_a_model_in_ddp_trains_on_after_a_swap_as_if_there_had_been_none() -> None:
    def trained(swap: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = GPT(layers=1, width=8, heads=2, vocabulary=11, context=4)
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        average = Ema(dict(model.named_parameters()), 0.9, True)
        tokens = torch.randint(11, (4, 4), generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
        for step in range(1, 6):
            optimizer.zero_grad()
            wrapped(tokens, tokens)["loss"].backward()
            optimizer.step()
            average.update(step)
            if swap:
                with average.swapped(), torch.no_grad():
                    wrapped(tokens, tokens)
        return weights(model)

    assert_same_bits(trained(swap=True), trained(swap=False))
