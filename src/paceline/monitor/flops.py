"""Counts the FLOPs of a forward and backward, with the formulas of `torch.utils.flop_counter`.

    with FlopCount() as count:
        loss = model(batch)
        loss.backward()
    count.total, count.matmul_precision

It counts what a model needs, as MFU is defined: matrix products, convolutions and attention, but no activation that is
computed a second time (checkpointing, the backward of fused attention). Operations run as they would without it, except
some backwards (`changes_backward`). It differs from torch's FlopCounterMode in that, and in that it tells which
operations it could not count.

    peak_flops("NVIDIA H100 80GB HBM3", "bfloat16")   989.4e12

is the peak of a GPU, from the data sheet of its vendor: dense (no structured sparsity), accumulated in float32.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from paceline.data.batches import apply
from paceline.models.loss_module import LossModule

_ATEN = torch.ops.aten

# Namespaces of torch whose operations, if they have no formula, are not matrix products; with these exceptions.
_KNOWN = ("aten", "prim", "prims", "c10d", "_c10d_functional", "c10d_functional", "fsdp", "profiler", "inductor")
_UNCOUNTED = {
    "_cudnn_rnn",
    "_cudnn_rnn_backward",
    "miopen_rnn",
    "miopen_rnn_backward",
    "mkldnn_rnn_layer",
    "mkldnn_rnn_layer_backward",
    "_grouped_mm",
    "_scaled_grouped_mm",
    "_int_mm",
    "_sparse_semi_structured_linear",
    "_sparse_semi_structured_mm",
    "_trilinear",
}


def _attention(query: Tensor, key: Tensor, value: Tensor, *others: Any, out_val: Any, **named: Any) -> int:
    """Two matrix products per head. Half of the scores of causal attention are masked, but counted, as usual."""
    *heads, tokens, size = query.shape
    return 2 * torch.Size(heads).numel() * tokens * key.shape[-2] * (size + value.shape[-1])


def _attention_backward(gradient: Tensor, *inputs: Any, out_val: Any, **named: Any) -> int:
    """Twice the forward. Fused kernels compute the scores again, which torch counts as well."""
    return 2 * _attention(*inputs, out_val=out_val, **named)


_FORMULAS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    **{
        operation: _attention_backward if name.endswith("_backward") else _attention
        for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
        for name in (f"_scaled_dot_product_{kind}", f"_scaled_dot_product_{kind}_backward")
        if (operation := getattr(_ATEN, name, None)) is not None
    },
}


# In a dispatch mode, torch computes their backwards by a formula for tensor subclasses, with other rounding.
_OTHER_BACKWARD = {_ATEN.prod, _ATEN.cumprod}


class FlopCount(TorchDispatchMode):
    """`total` is that of the operations on this rank; `uncounted` names those without a formula.

    `changes_backward`: an operation was seen whose backward must run outside of this mode, for the same bits.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._by_precision: Counter[str] = Counter()
        self.uncounted: set[str] = set()
        self.changes_backward = False

    @property
    def total(self) -> int:
        return self._by_precision.total()

    @property
    def matmul_precision(self) -> str | None:
        """In which most FLOPs are computed: "bfloat16", "tf32", "float32", …"""
        return max(self._by_precision, key=self._by_precision.__getitem__, default=None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = [kind for kind in types if hasattr(kind, "__tensor_flatten__")]
        if inner:  # the operations on the tensors in a DTensor arrive here as well, those in a nested tensor do not
            self.uncounted |= {kind.__name__ for kind in inner if not kind.__module__.startswith("torch.distributed.")}
            return NotImplemented
        kwargs = kwargs or {}
        # PyTorch passes 0-dim tensors that were numbers as numbers.
        if args and isinstance(args[0], (bool, int, float)):
            args = (_restored(func, args[0]), *args[1:])
        result = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", func)
        formula = _FORMULAS.get(packet)
        if formula is not None:
            if not _recomputes():
                self._count(packet, formula, args, kwargs, result)
        elif packet in _OTHER_BACKWARD:
            self.changes_backward = True
            self.uncounted.add(str(packet))
        elif _is_uncounted(func):
            self.uncounted.add(str(packet))
        return result

    def _count(self, packet: Any, formula: Callable[..., int], args: Any, kwargs: Any, result: Any) -> None:
        try:
            flops = formula(*args, **kwargs, out_val=result)
            dtype = next(each.dtype for each in args if isinstance(each, Tensor))
        except Exception:  # shapes that a formula does not know must not end training
            self.uncounted.add(str(packet))
        else:
            self._by_precision[_precision_of(dtype, convolves="convolution" in str(packet))] += flops


def _restored(func: Any, number: bool | int | float) -> Any:
    """Operations on several tensors accept numbers, and derive their dtype from the others."""
    arguments = func._schema.arguments if isinstance(func, torch._ops.OpOverload) else []
    if [str(each.type) for each in arguments].count("Tensor") != 1 or str(arguments[0].type) != "Tensor":
        return number
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None)


def _is_uncounted(func: Any) -> bool:
    namespace = getattr(func, "namespace", None)
    return namespace not in _KNOWN or (namespace == "aten" and func._overloadpacket.__name__ in _UNCOUNTED)


def _recomputes() -> bool:
    """Whether checkpointing runs a forward again: in a backward, with a graph of its own."""
    if torch._C._current_graph_task_id() == -1 or not torch.is_grad_enabled():
        return False
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
    return False


def _precision_of(dtype: torch.dtype, *, convolves: bool) -> str:
    if dtype is torch.float32:
        allowed = torch.backends.cudnn.allow_tf32 if convolves else torch.get_float32_matmul_precision() != "highest"
        return "tf32" if allowed else "float32"
    return str(dtype).removeprefix("torch.")


def count_on_fakes(module: LossModule, batch: Any) -> FlopCount:
    """Run a forward and backward, uncompiled, on tensors without data. Raises what the forward raises, such as where it
    depends on values. The caller restores the module."""
    for part in module.modules():
        for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
            getattr(part, name).clear()  # FSDP gathers parameters in them, and ranks compare the order of modules
        if isinstance(part, _NormBase):
            part.training = False  # synchronized ones would communicate
    module.weighs = False
    count = FlopCount()
    with torch.compiler.set_stance("force_eager"), FakeTensorMode(allow_non_fake_inputs=True) as fake:
        full: dict[int, Tensor] = {}  # of sharded ones as well
        members = {}
        for prefix, part in module.named_modules():  # once, even if it is shared: a second name would keep its fakes
            for name, p in part._parameters.items():
                if p is not None:
                    like = torch.empty(p.shape, dtype=p.dtype, device=p.device, requires_grad=p.requires_grad)
                    members[f"{prefix}.{name}" if prefix else name] = full.setdefault(id(p), like)
        with count:
            value, _ = functional_call(module, members, (apply(batch, fake.from_tensor),), tie_weights=False)
            value.backward()
    return count


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
