from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from paceline.models.gpt import GPT
from paceline.monitor.flops import FlopCount, peak_flops

SAMPLES = 5


def counted(loss: Callable[[], Tensor]) -> FlopCount:
    with FlopCount() as count:
        loss().backward()
    return count


def test_each_weight_of_an_mlp_costs_six_flops_a_sample() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    weights = 8 * 16 + 16 * 4
    data, trained = torch.randn(SAMPLES, 8), torch.randn(SAMPLES, 8, requires_grad=True)
    assert counted(lambda: model(trained).sum()).total == 6 * weights * SAMPLES
    # Without the gradient of the inputs of the first layer, which nobody needs.
    assert counted(lambda: model(data).sum()).total == (6 * weights - 2 * 8 * 16) * SAMPLES


def test_a_gpt_costs_what_the_formula_of_its_size_says() -> None:
    layers, width, tokens = 2, 32, 16
    model = GPT(layers=layers, width=width, heads=4, vocabulary=64, context=tokens)
    batch = torch.randint(0, 64, (SAMPLES, tokens))
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2) - model.positions.weight.numel()
    count = counted(lambda: model(batch, batch)["loss"])
    assert count.total == SAMPLES * tokens * (6 * weights + 12 * layers * width * tokens)
    assert (count.uncounted, count.matmul_precision) == (set(), "float32")


def test_a_convolution_costs_two_flops_for_each_weight_and_pixel() -> None:
    model = nn.Conv2d(3, 8, 3, padding=1)
    forward = 2 * model.weight.numel() * 6 * 6 * SAMPLES
    assert counted(lambda: model(torch.randn(SAMPLES, 3, 6, 6)).sum()).total == 2 * forward


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations_do_not_count(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    data = torch.randn(SAMPLES, 8, requires_grad=True)
    plain = counted(lambda: model(data).sum()).total
    assert counted(lambda: checkpoint(model, data, use_reentrant=reentrant).sum()).total == plain > 0


def test_fused_attention_counts_as_much_as_its_matrix_products() -> None:
    query, key, value = torch.randn(3, SAMPLES, 2, 16, 8, requires_grad=True)
    fused = counted(lambda: functional.scaled_dot_product_attention(query, key, value).sum())
    plain = counted(lambda: ((query @ key.transpose(-1, -2)).softmax(-1) @ value).sum())
    assert fused.total == plain.total == 12 * SAMPLES * 2 * 16 * 16 * 8


def test_gradients_of_gradients_count() -> None:
    data = torch.randn(SAMPLES, 8, requires_grad=True)
    model = nn.Linear(8, 4)

    def penalty() -> Tensor:
        [gradient] = torch.autograd.grad(model(data).square().sum(), data, create_graph=True)
        return gradient.square().sum()

    assert counted(penalty).total >= 4 * 2 * SAMPLES * 8 * 4


def test_most_flops_determine_the_precision() -> None:
    model, data = nn.Linear(64, 64), torch.randn(SAMPLES, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert counted(lambda: model(data).sum()).matmul_precision == "bfloat16"


def test_an_operation_without_a_formula_is_named() -> None:
    model, data = nn.LSTM(8, 8), torch.randn(4, SAMPLES, 8)
    assert any("rnn" in name for name in counted(lambda: model(data)[0].sum()).uncounted)


def test_operations_behave_as_without_a_count() -> None:
    mean = torch.randn(4, requires_grad=True).mean()
    quotient = (mean / 2.5).grad_fn
    assert quotient is not None
    with FlopCount():
        saved = quotient._saved_other.detach()  # type: ignore[attr-defined]
        assert (saved.dtype, saved.item(), (2.5 - mean).dtype) == (torch.float64, 2.5, torch.float32)


def test_nested_tensors_are_named_instead_of_counted() -> None:
    linear = nn.Linear(4, 4)
    nested = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)], layout=torch.jagged)
    with FlopCount() as count:
        linear(nested)
    assert count.uncounted == {"NestedTensor"}


@pytest.mark.parametrize(
    "name, precision, expected",
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H200", "float32", 67e12),
        ("NVIDIA H200", "tf32", 494.7e12),
        ("NVIDIA H100 80GB HBM3", "float8_e4m3fn", 1978.9e12),
        ("NVIDIA GH200 480GB", "float16", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A10G", "bfloat16", 70e12),
        ("NVIDIA A10", "bfloat16", 125e12),
        ("NVIDIA L4", "float16", 121e12),
        ("NVIDIA L40S", "float16", 362e12),
        ("Tesla V100-PCIE-16GB", "float16", 112e12),
        ("Tesla V100-SXM2-32GB", "float16", 125e12),
        ("Tesla T4", "float16", 65e12),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2e12),
        ("AMD Instinct MI300X", "bfloat16", 1307.4e12),
    ],
)
def test_the_peak_of_a_gpu_depends_on_its_variant_and_the_precision(name: str, precision: str, expected: float) -> None:
    assert peak_flops(name, precision) == expected


@pytest.mark.parametrize(
    "name, precision",
    [("NVIDIA A1000", "bfloat16"), ("NVIDIA L40", "bfloat16"), ("Tesla T4", "bfloat16"), ("NVIDIA A100", "int8")],
)
def test_an_unknown_peak_is_not_guessed(name: str, precision: str) -> None:
    assert peak_flops(name, precision) is None
