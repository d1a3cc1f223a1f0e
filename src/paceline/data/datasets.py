"""Named datasets, selected by the `data:` section of a recipe.

    train, val = paceline.get_data("shapes", size=16)

A named dataset is a function that returns (training set, evaluation set or None). Its parameters are its options.
"""

from __future__ import annotations

from typing import Any

from paceline.errors import DataError
from paceline.registry import Registry

Pair = tuple[Any, Any]


def _load_embedded() -> None:
    from paceline.data import cifar, shapes, stdlib_text  # noqa: F401


_registry: Registry[None, Pair] = Registry(
    "dataset", error=DataError, hint="paceline.register_data", load=_load_embedded
)
register_data = _registry.implement
find_data = _registry.find


def get_data(name: str, **options: Any) -> Pair:
    """Return the training and evaluation sets of a named dataset."""
    return find_data(name, options)(**options)
