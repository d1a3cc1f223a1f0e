"""Peak FLOP/s of GPUs by precision, from the data sheets of their vendors: dense (no structured sparsity), accumulated
in float32.

    peak_flops("NVIDIA H100 80GB HBM3", "bfloat16")   989.4e12
"""

from __future__ import annotations

from collections.abc import Mapping

# The columns of the table; V100 and T4 have no bfloat16 and TF32, and GPUs before Ada no float8.
_PRECISIONS = ("float64", "float32", "tf32", "bfloat16", "float16", "float8")

# Part of the name that the driver reports → TFLOP/s. A more specific name stands before a more general one.
_TFLOPS: Mapping[str, tuple[float | None, ...]] = {
    "B200": (37.0, 75.0, 1100.0, 2250.0, 2250.0, 4500.0),
    "GH200": (67.0, 67.0, 494.7, 989.4, 989.4, 1978.9),
    "H200 NVL": (60.0, 60.0, 417.7, 835.4, 835.4, 1670.8),
    "H200": (67.0, 67.0, 494.7, 989.4, 989.4, 1978.9),
    "H100 PCIe": (51.0, 51.0, 378.0, 756.0, 756.0, 1513.0),
    "H100 NVL": (60.0, 60.0, 417.7, 835.4, 835.4, 1670.8),
    "H100": (67.0, 67.0, 494.7, 989.4, 989.4, 1978.9),
    "A100": (19.5, 19.5, 156.0, 312.0, 312.0, None),
    "A40": (0.58, 37.4, 74.8, 149.7, 149.7, None),
    "A10G": (0.49, 31.5, 35.0, 70.0, 70.0, None),
    "A10": (0.49, 31.2, 62.5, 125.0, 125.0, None),
    "L40S": (1.4, 91.6, 183.0, 362.0, 362.0, 733.0),
    "L4": (0.47, 30.3, 60.0, 121.0, 121.0, 242.0),
    "V100-PCIE": (7.0, 14.0, None, None, 112.0, None),
    "V100": (7.8, 15.7, None, None, 125.0, None),
    "T4": (0.25, 8.1, None, None, 65.0, None),
    "RTX 3090": (0.56, 35.6, 35.6, 71.0, 71.0, None),
    "RTX 4090": (1.29, 82.6, 82.6, 165.2, 165.2, 330.3),
    "MI300X": (163.4, 163.4, 653.7, 1307.4, 1307.4, 2614.9),
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s of a device, given its name and the dtype of matrix products ("tf32" where float32 is rounded to it); None
    if unknown."""
    words = f" {device_name.replace('-', ' ')} "
    for name, peaks in _TFLOPS.items():
        if f" {name.replace('-', ' ')} " in words:
            column = "float8" if precision.startswith("float8") else precision
            peak = peaks[_PRECISIONS.index(column)] if column in _PRECISIONS else None
            return None if peak is None else peak * 1e12
    return None
