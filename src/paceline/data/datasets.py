"""Named datasets, selected by the `data:` section of a recipe.

    train, val = paceline.get_data("shapes", size=16)

A named dataset is a function that returns (training set, evaluation set or None), or a dataset class, without an
evaluation set. Its parameters are its options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset

from paceline.errors import DataError
from paceline.registry import Builder, Registry

Pair = tuple[Any, Any]


def _load_embedded() -> None:
    from paceline.data import embedded  # noqa: F401


DATASETS: Registry[None, Pair] = Registry(
    "dataset", error=DataError, hint="@paceline.register_data", load=_load_embedded
)
find_data = DATASETS.find


def register_data(name: str) -> Callable[[Builder], Builder]:
    """Decorator that registers a dataset, for `data.name` in a recipe and `get_data`.

    Args:
        name: of the dataset. The parameters of the function or class are its options in a recipe

    Returns:
        The decorator, for a function that returns (training set, evaluation set or None), or a dataset class.

    Raises:
        DataError: `data.bad-registration`: the name is not a string, or what is decorated can't be called

    Example:
        >>> import torch
        >>> import paceline
        >>> @paceline.register_data("ones")
        ... def ones(length=8):
        ...     return torch.utils.data.TensorDataset(torch.ones(length, 2)), None
        >>> train, val = paceline.get_data("ones", length=4)
        >>> len(train)
        4
    """
    return DATASETS.implement(name)


def get_data(name: str, **options: Any) -> Pair:
    """Return the training and evaluation sets of a named dataset.

    Args:
        name: of a dataset: shapes, stdlib-text, cifar10, or one of `register_data`
        options: of the dataset, as in the `data:` section of a recipe

    Returns:
        (training set, evaluation set or None).

    Raises:
        DataError: `data.unknown-name`, `data.unknown-option`, `data.missing-option`, `data.not-a-pair`

    Example:
        >>> import paceline
        >>> train, val = paceline.get_data("shapes", size=16, length=64)
        >>> len(train)
        64
    """
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
