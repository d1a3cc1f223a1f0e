"""What is done to weights as they are: format in memory, checksums of their bits, power iterations of their norms.

`channels_last` stores images and the weights of convolutions as NHWC, the order that tensor cores read. A 4-D tensor
becomes channels_last, a 5-D one channels_last_3d. Values, shapes and names stay: any other 4-D tensor, such as an
attention mask, is converted too, which changes nothing but its strides.

Checksums are exact. Floating-point sums would depend on the order of additions. Bits are summed as 64-bit integers,
which wrap around, in columns with a weight of their own, so that a change in one place is not hidden by the opposite
one in another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

Change = Callable[[Tensor], Tensor]


def as_channels_last(tensor: Tensor) -> Tensor:
    """The tensor itself if its format is right already, and if it is sparse or nested."""
    memory_format = _FORMATS.get(tensor.dim())
    if memory_format is None or tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    return tensor.contiguous(memory_format=memory_format)


@torch.no_grad()
def convert_weights(model: nn.Module) -> int:
    """Convert the parameters in place, and return the number of those that have a format."""
    found = [parameter for parameter in model.parameters() if parameter.dim() in _FORMATS]
    for parameter in found:
        # Not `contiguous`, which keeps the strides of a 1 × 1 kernel: they can be read as either format, but DDP would
        # copy gradients, which have the other ones.
        parameter.data = parameter.data.to(memory_format=_FORMATS[parameter.dim()])
    return len(found)


@torch.no_grad()
def convert_state(optimizer: torch.optim.Optimizer) -> None:
    """Give state that was created before its parameter was converted the strides of that parameter: fused kernels read
    both in the order of memory."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


_COLUMNS = 64  # as fast as a single sum on a CPU
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_MOVED = {*_FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}  # by every backend
_ODD = -7046029254386353131  # 2⁶⁴ divided by the golden ratio, as a signed integer


@torch.no_grad()
def column_sums(tensor: Tensor) -> list[Tensor]:
    """Sums of the tensor's bits, as int64 vectors. What does not fill a row of columns is not summed: gradients of a
    small bias may add up to zero."""
    plain = tensor.detach()
    flat = (torch.view_as_real(plain) if plain.is_complex() else plain).contiguous().view(-1)
    per_word = 8 // flat.element_size()
    words = flat.numel() // per_word if flat.storage_offset() % per_word == 0 else 0
    rows, used = words // _COLUMNS, words // _COLUMNS * _COLUMNS * per_word
    sums = [flat[:used].view(torch.int64).view(rows, _COLUMNS).sum(0)] if rows else []
    rest, width = flat[used:].view(_INTEGERS[flat.element_size()]), _COLUMNS * per_word
    full = len(rest) // width * width  # of a tensor that does not begin with a word
    if full:
        sums.append(rest[:full].view(-1, width).sum(0, dtype=torch.int64))
    if full < len(rest):
        sums.append(rest[full:].to(torch.int64))
    return sums


@torch.no_grad()
def mixed(sums: Sequence[Tensor], device: torch.device) -> Tensor:
    """A 64-bit hash of sums in this order, as a tensor on `device`."""
    values = torch.cat([each.to(device) for each in sums])
    weights = torch.arange(1, len(values) + 1, device=device) * _ODD | 1
    return (values * weights).sum() * _ODD


def checksum(tensor: Tensor) -> int:
    """The checksum of one tensor. Reads it from the device."""
    sums = column_sums(tensor)
    return int(mixed(sums, tensor.device)) if sums else 0


def as_moved(tensor: Tensor) -> Tensor:
    """The tensor, or a view of its bytes if no backend moves its dtype (int16, uint16, float8)."""
    if tensor.dtype in _MOVED or tensor.dtype.is_complex or not tensor.is_contiguous():
        return tensor
    return tensor.view(-1).view(torch.uint8)


class PowerIterations:
    """The spectral norms of a model, of both kinds: `torch.nn.utils.spectral_norm` and that of `parametrizations`.

    A spectral norm improves its estimate in every forward. In a step of several micro-batches only the first one may do
    so, or the weights would depend on their number.
    """

    def __init__(self, model: nn.Module) -> None:
        self._norms: list[tuple[Any, int]] = []
        self._owners: list[tuple[nn.Module, tuple[str, str]]] = []  # with the names of the buffers of the estimate
        for module in model.modules():
            for hook in module._forward_pre_hooks.values():
                if isinstance(hook, SpectralNorm):
                    self._norms.append((hook, hook.n_power_iterations))
                    self._owners.append((module, (f"{hook.name}_u", f"{hook.name}_v")))
            if isinstance(module, _SpectralNorm):
                self._norms.append((module, module.n_power_iterations))
                self._owners.append((module, ("_u", "_v")))

    def __bool__(self) -> bool:
        return bool(self._norms)

    def buffers(self) -> list[Tensor]:
        """The estimates."""
        found = [module._buffers.get(name) for module, names in self._owners for name in names]
        return [buffer for buffer in found if buffer is not None]

    @property
    def allowed(self) -> bool:
        return any(norm.n_power_iterations for norm, _ in self._norms)

    def allow(self, allowed: bool) -> None:
        """Whether the next forwards iterate. Without iterations they use the current estimate."""
        for norm, iterations in self._norms:
            norm.n_power_iterations = iterations if allowed else 0
