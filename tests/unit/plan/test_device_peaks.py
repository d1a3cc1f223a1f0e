from __future__ import annotations

import pytest

from paceline.plan.device_peaks import peak_flops


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
