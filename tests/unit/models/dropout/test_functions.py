"""torch's functions by sample: the same mask for a sample in any slice of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.models.dropout.functions import by_sample
from paceline.runtime.noise import NoiseContext
from paceline.runtime.sample_keys import SampleKeys


@dataclass
class Rows:
    samples: int = 6
    start: int = 0
    step: int = 0
    step_samples: int = 6


def run(
    function: Callable[[Tensor], Tensor], inputs: Tensor, start: int = 0, step: int = 0
) -> tuple[Tensor, SampleKeys]:
    """`function` of some samples of a batch, in a step."""
    keys = by_sample(nn.Identity(), [], 1, torch.device("cpu"))
    samples = 6 if start == 0 else 6 - start
    with NoiseContext(1, keys=keys) as draw:
        draw.begin(Rows(samples, start, step))
        result = function(inputs[start:])
        draw.end()
    return result, keys


INPUTS = torch.randn(6, 4, 5, 5, generator=torch.Generator().manual_seed(0))
MODULES = [
    nn.Dropout(0.3),
    nn.Dropout(0.3, inplace=True),
    nn.Dropout2d(0.3),
    nn.AlphaDropout(0.3),
    nn.FeatureAlphaDropout(0.3),
]


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_slice_of_a_batch_has_the_masks_of_its_samples(module: nn.Module) -> None:
    batch, keys = run(lambda inputs: module(inputs.clone()), INPUTS)
    half, _ = run(lambda inputs: module(inputs.clone()), INPUTS, start=3)
    assert torch.equal(batch[3:], half) and not keys.kept
    other, _ = run(lambda inputs: module(inputs.clone()), INPUTS, step=1)
    assert not torch.equal(batch, other)


def test_flattened_tokens_and_heads_belong_to_their_sample() -> None:
    batch, _ = run(lambda inputs: functional.dropout(inputs.reshape(-1, 5), 0.3), INPUTS)
    half, _ = run(lambda inputs: functional.dropout(inputs.reshape(-1, 5), 0.3), INPUTS, start=2)
    assert torch.equal(batch.view(6, -1)[2:], half.view(4, -1))


def test_attention_drops_by_sample() -> None:
    def attend(inputs: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(inputs, inputs, inputs, dropout_p=0.3, is_causal=True)

    batch, keys = run(attend, INPUTS.double())
    half, _ = run(attend, INPUTS.double(), start=2)
    torch.testing.assert_close(batch[2:], half, rtol=1e-12, atol=1e-12)
    assert not keys.kept


def test_attention_without_dropped_elements_equals_torch() -> None:
    mask = torch.rand(6, 1, 5, 5, generator=torch.Generator().manual_seed(1)) > 0.2
    mask[..., 0] = True
    for options in ({"attn_mask": mask}, {"attn_mask": mask.double()}, {"is_causal": True}, {"scale": 0.3}):
        inputs = INPUTS.double()
        expected = functional.scaled_dot_product_attention(inputs, inputs, inputs, **options)
        found, _ = run(
            lambda rows, options=options: functional.scaled_dot_product_attention(
                rows, rows, rows, dropout_p=1e-9, **options
            ),
            inputs,
        )
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand(x.shape[0], 1, 1),
        lambda x: torch.rand((x.shape[0], 1), dtype=torch.float64),
        lambda x: torch.rand_like(x),
        lambda x: torch.bernoulli(torch.full((x.shape[0], 1), 0.5)),
        lambda x: x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.5),
    ],
    ids=["rand", "rand of a tuple", "rand_like", "bernoulli", "bernoulli_"],
)
def test_stochastic_depth_draws_by_sample(draw: Callable[[Tensor], Tensor]) -> None:
    batch, _ = run(draw, INPUTS)
    half, _ = run(draw, INPUTS, start=2)
    assert torch.equal(batch[2:], half) and len(batch.unique()) > 1


def test_a_call_that_does_not_hold_the_samples_is_torch_and_noted() -> None:
    torch.manual_seed(0)
    expected = functional.dropout(torch.ones(7, 3), 0.5)
    torch.manual_seed(0)
    found, keys = run(lambda inputs: functional.dropout(torch.ones(7, 3), 0.5), INPUTS)
    assert torch.equal(found, expected) and keys.kept == {"dropout": (7, 3)}


def test_functions_are_torchs_own_outside_of_a_step() -> None:
    before = functional.dropout, torch.rand, Tensor.bernoulli_
    run(lambda inputs: inputs, INPUTS)
    assert (functional.dropout, torch.rand, Tensor.bernoulli_) == before


def test_the_end_of_an_inner_loop_does_not_end_the_outer_one() -> None:
    outer = by_sample(nn.Identity(), [], 1, torch.device("cpu"))
    with NoiseContext(1, keys=outer) as draw:
        run(lambda inputs: inputs, INPUTS)
        draw.begin(Rows(6, 0))
        functional.dropout(INPUTS, 0.5)
        assert outer.calls == 1
        draw.end()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_uniform_numbers_are_below_one_and_unbiased_in_low_precision(dtype: torch.dtype) -> None:
    """The mean of 600,000 has a standard deviation of 4e-4. That of torch.rand is 1/512 below one half in bf16."""
    drawn, _ = run(lambda inputs: torch.rand(6, 100_000, dtype=dtype), INPUTS)
    expected = torch.rand(600_000, dtype=dtype, generator=torch.Generator().manual_seed(0)).double()
    assert drawn.max() < 1
    assert abs(drawn.double().mean() - expected.mean()) < 0.003
    assert drawn.unique().numel() <= 1 / torch.finfo(dtype).eps * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bernoulli_has_its_probability_in_low_precision(dtype: torch.dtype) -> None:
    """A share of 1/512 is missing if numbers are rounded to bf16 before they are compared: 5 standard deviations."""
    inputs = torch.full((6, 100_000), 0.9, dtype=dtype)
    drawn, _ = run(lambda _: torch.bernoulli(inputs), INPUTS)
    assert drawn.dtype is dtype
    assert abs(float(drawn.double().mean()) - float(inputs[0, 0])) < 0.0012


@pytest.mark.parametrize("function", [functional.alpha_dropout, functional.feature_alpha_dropout])
def test_alpha_dropout_keeps_mean_and_variance(function: Callable[..., Tensor]) -> None:
    inputs = torch.randn(6, 4000, 5, generator=torch.Generator().manual_seed(1))
    name = function.__name__
    outputs, _ = run(lambda rows: getattr(functional, name)(rows, 0.3, training=True), inputs)
    assert abs(float(outputs.mean())) < 0.03 and abs(float(outputs.var()) - 1.0) < 0.05


def test_rows_of_attention_that_are_masked_out_are_zero() -> None:
    mask = torch.ones(6, 1, 5, 5, dtype=torch.bool)
    mask[:, :, 2] = False
    inputs = INPUTS.clone().requires_grad_()
    outputs, _ = run(
        lambda rows: functional.scaled_dot_product_attention(rows, rows, rows, attn_mask=mask, dropout_p=0.3), inputs
    )
    outputs.sum().backward()
    assert inputs.grad is not None and outputs[:, :, 2].abs().max() == 0 and inputs.grad.isfinite().all()


def test_what_cannot_be_drawn_by_sample_is_torchs() -> None:
    def draw(rows: Tensor) -> Tensor:
        assert torch.rand(torch.tensor(6)).shape == (6,) and torch.rand([6, 1]).shape == (6, 1)
        assert torch.rand(6, dtype=torch.complex64).imag.abs().max() > 0
        with pytest.raises(RuntimeError):
            torch.empty(6).bernoulli_(1.5)
        nested = torch.nested.nested_tensor([rows[0, 0], rows[1, 0, :2]], layout=torch.jagged)
        return functional.dropout(nested, 0.5).values()

    run(draw, INPUTS)
    assert "bernoulli_" not in vars(Tensor)


def test_vmap_has_a_mask_for_each_sample() -> None:
    def drop(row: Tensor) -> Tensor:
        return functional.dropout(row, 0.5)

    found, _ = run(lambda rows: torch.vmap(drop, randomness="different")(torch.ones(6, 6, 20)), INPUTS)
    assert len({tuple(mask.flatten().tolist()) for mask in found}) == 6


class Layers(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        first = nn.Sequential(nn.Dropout(0.5))
        self.layers = nn.ModuleList([first, first if tied else nn.Sequential(nn.Dropout(0.5))])
        self.drop = nn.Dropout(0.5)

    def forward(self, inputs: Tensor) -> list[Tensor]:
        return [self.drop(inputs), *(layer(inputs) for layer in self.layers), self.drop(inputs)]


def masks(model: nn.Module, names: list[str]) -> list[Tensor]:
    with NoiseContext(1, keys=by_sample(model, names, 1, torch.device("cpu"))) as draw:
        draw.begin(Rows())
        found: list[Tensor] = model(torch.ones(6, 20))
        draw.end()
    return found


def test_every_call_has_a_mask_of_its_own() -> None:
    for model, names in ((Layers(), ["layers.0", "layers.1"]), (Layers(tied=True), ["layers.0"])):
        found = masks(model, names)
        assert len({tuple(mask.flatten().tolist()) for mask in found}) == 4


def test_dropout_that_begins_later_has_the_masks_of_its_micro_batch() -> None:
    for model, names in ((Layers(), ["layers.0", "layers.1"]), (Layers(tied=True), ["layers.0"])):
        expected = masks(model, names)
        with NoiseContext(1, keys=by_sample(model, names, 1, torch.device("cpu"))) as draw:
            for _ in range(3):
                draw.begin(Rows(step=5))
                model.eval()(torch.ones(6, 20))
                draw.end()
            draw.begin(Rows())
            found = model.train()(torch.ones(6, 20))
            draw.end()
            between = model(torch.ones(6, 20))
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert not any(torch.equal(*pair) for pair in zip(between, expected, strict=True))


def test_a_block_has_its_masks_without_the_blocks_before_it() -> None:
    model, last = Layers(), Layers()
    del last.layers[0]
    last.layers = nn.ModuleDict({"1": model.layers[1]})  # type: ignore[assignment]
    last.forward = lambda inputs: [last.layers["1"](inputs), last.drop(inputs)]  # type: ignore[method-assign,index]
    names = ["layers.0", "layers.1"]
    for full, part in zip(masks(model, names)[2:], masks(last, names), strict=True):
        assert torch.equal(full, part)


def test_the_model_is_unchanged_afterwards() -> None:
    model = Layers()
    masks(model, ["layers.0", "layers.1"])
    assert all("forward" not in layer.__dict__ for layer in model.layers)
