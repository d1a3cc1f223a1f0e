"""Names samples that cannot be collated, and functions that cannot be sent to spawned workers."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from paceline.run.user_frame import place_of


@dataclass(frozen=True)
class Collate:
    """torch's default collate function; its errors get a note with the shapes of the samples."""

    source: str  # of the samples, for the note

    def __call__(self, samples: list[Any]) -> Any:
        try:
            return default_collate(samples)
        except Exception as error:
            kinds = list(dict.fromkeys(map(_kind, samples)))
            shown = " and ".join(kinds[:2])
            if len(kinds) > 1:
                error.add_note(
                    f"paceline: the samples of {self.source} differ: {shown}. "
                    "Pad them, or pass a DataLoader with a collate_fn"
                )
            else:
                error.add_note(
                    f"paceline: the samples of {self.source} can't be collated: {shown}. Return tensors, numbers or "
                    "arrays, or pass a DataLoader with a collate_fn"
                )
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
