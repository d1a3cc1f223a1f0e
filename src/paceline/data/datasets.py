"""Named datasets, selected by the `data:` section of a recipe.

    train, val = paceline.get_data("shapes", size=16)

A named dataset is a function that returns (training set, evaluation set or None), or a dataset class, without an
evaluation set. Its parameters are its options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset

from paceline.errors import DataError
from paceline.registry import Registry

Pair = tuple[Any, Any]


def _load_embedded() -> None:
    from paceline.data import cifar, shapes, stdlib_text  # noqa: F401


DATASETS: Registry[None, Pair] = Registry(
    "dataset", error=DataError, hint="@paceline.register_data", load=_load_embedded
)
register_data = DATASETS.implement
find_data = DATASETS.find


def get_data(name: str, **options: Any) -> Pair:
    """Return the training and evaluation sets of a named dataset."""
    made: Any = find_data(name, options)(**options)
    if isinstance(made, list) and made and all(isinstance(each, (Dataset, DataLoader)) for each in made):
        made = tuple(made)  # of random_split; other lists contain batches
    if isinstance(made, tuple) and len(made) == 2 and made[0] is not None:
        return made
    is_data = hasattr(made, "__iter__") or hasattr(made, "__getitem__")
    if is_data and not isinstance(made, (tuple, Mapping, str)):
        return made, None
    got = f"a {type(made).__name__}" + (f" of {len(made)}" if isinstance(made, (tuple, Mapping)) else "")
    raise DataError(
        "not-a-pair",
        f"The dataset {name!r} returned {got} ({DATASETS.place(name)}).",
        why="a recipe trains on one dataset, and evaluates on a second one",
        fix="return (training set, evaluation set), (training set, None), or a dataset",
    )
