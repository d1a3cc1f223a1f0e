"""Names the layer that received inputs of another dtype than its parameters have."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from paceline.data.batches import tensors_in

_METHODS = {torch.float32: ".float()", torch.float64: ".double()", torch.int64: ".long()"}
_OTHER_DTYPE = re.compile(r"dtype|scalar type|Input type")


@contextmanager
def explain_dtypes(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if _OTHER_DTYPE.search(str(error)) and (hint := _other_dtype(error, model)):
            error.add_note(f"paceline: {hint}")
        raise


def _other_dtype(error: BaseException, model: nn.Module) -> str:
    """The innermost layer that received a tensor of another dtype than it computes with."""
    names = {module: name for name, module in model.named_modules()}
    hint, in_batch = "", set()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code, values = frame.f_code, frame.f_locals
        in_batch |= {tensor.dtype for tensor in tensors_in(values.get("batch"))}
        layer = values.get("self")
        if code.co_name != "forward" or not isinstance(layer, nn.Module) or layer not in names:
            continue
        expected = _expected(layer)
        tensors = [
            each for name in code.co_varnames[1 : code.co_argcount] if isinstance(each := values.get(name), Tensor)
        ]
        wrong = next((tensor for tensor in tensors if expected and tensor.dtype not in expected), None)
        if wrong is not None:
            wanted = _short(expected[0])
            fix = f"return {wanted} inputs from the dataset" if wrong.dtype in in_batch else f"convert them to {wanted}"
            hint = (
                f"{names[layer] or 'the model'} ({type(layer).__name__}) received {_short(wrong.dtype)} inputs of "
                f"shape {tuple(wrong.shape)}, and computes with {wanted}: {fix} ({_METHODS.get(expected[0], '.to(…)')})"
            )
    return hint


def _expected(layer: nn.Module) -> list[torch.dtype]:
    """The dtypes that a layer accepts, as far as its parameters show them."""
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        return [torch.int64, torch.int32]
    dtypes = {parameter.dtype for parameter in layer.parameters()}
    return list(dtypes) if len(dtypes) == 1 and not any(isinstance(m, nn.Embedding) for m in layer.modules()) else []


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
