"""`channels_last`: images and the weights of convolutions in memory as NHWC, the order that tensor cores read.

A 4-D tensor becomes channels_last, a 5-D one channels_last_3d. Values, shapes and names stay: any other 4-D tensor,
such as an attention mask, is converted too, which changes nothing but its strides.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

Change = Callable[[Tensor], Tensor]


def as_channels_last(tensor: Tensor) -> Tensor:
    """The tensor itself if its format is right already, and if it is sparse or nested."""
    memory_format = _FORMATS.get(tensor.dim())
    if memory_format is None or tensor.layout is not torch.strided or tensor.is_nested:
        return tensor
    return tensor.contiguous(memory_format=memory_format)


def input_change(cast: Change | None, *, channels_last: bool) -> Change | None:
    """The change of every tensor of a batch on its way to the model, if any."""
    if not channels_last:
        return cast
    return as_channels_last if cast is None else lambda tensor: as_channels_last(cast(tensor))


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
