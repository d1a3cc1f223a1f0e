"""Names samples that cannot be collated, functions that cannot be sent to spawned workers, and the layer that received
inputs of another dtype than its parameters have."""

from __future__ import annotations

import pickle
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from paceline.data.batches import tensors_in
from paceline.run.user_frame import place_of

_METHODS = {torch.float32: ".float()", torch.float64: ".double()", torch.int64: ".long()"}
_OTHER_DTYPE = re.compile(r"dtype|scalar type|Input type")


@dataclass(frozen=True)
class Collate:
    """torch's default collate function; its errors get a note with the shapes of the samples."""

    source: str  # of the samples, for the note

    def __call__(self, samples: list[Any]) -> Any:
        try:
            return default_collate(samples)
        except Exception as error:
            kinds = list(dict.fromkeys(map(_kind, samples)))
            problem, fix = "can't be collated", "Return tensors, numbers or arrays"
            if len(kinds) > 1:
                problem, fix = "differ", "Pad them"
            shown = f"the samples of {self.source} {problem}: {' and '.join(kinds[:2])}"
            error.add_note(f"paceline: {shown}. {fix}, or pass a DataLoader with a collate_fn")
            raise


def _kind(sample: Any) -> str:
    """`(tensor (8,), int)`"""
    if isinstance(sample, Tensor) or hasattr(sample, "shape"):
        return f"{'tensor' if isinstance(sample, Tensor) else 'array'} {tuple(sample.shape)}"
    if isinstance(sample, (tuple, list)):
        return f"({', '.join(map(_kind, sample))})"
    if isinstance(sample, dict):
        return f"{{{', '.join(f'{key!r}: {_kind(value)}' for key, value in sample.items())}}}"
    return type(sample).__name__


@contextmanager
def explain_pickling(collate_fn: Any, worker_init_fn: Any) -> Iterator[None]:
    """Starting workers that are not forked pickles the dataset and the functions: name the one that can't be."""
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if "pickle" not in str(error):
            raise
        for name, function in (("collate_fn", collate_fn), ("worker_init_fn", worker_init_fn)):
            qualified = getattr(function, "__qualname__", "")
            if "<" in qualified:
                what = "a lambda" if qualified.endswith("<lambda>") else "defined in another function"
                error.add_note(
                    f"paceline: {name} of the DataLoader{place_of(function)} is {what}, which spawned workers can't "
                    "pickle: use a function that is defined at the top level of a module"
                )
        raise


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
