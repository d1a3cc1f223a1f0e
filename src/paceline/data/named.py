"""Datasets by name: what a recipe's `data:` section picks.

    train, val = paceline.get_data("shapes", size=16)

A named dataset is a function that returns (training set, evaluation set or None). Its parameters are the options that
the recipe may give.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from paceline.errors import DataError, did_you_mean

Pair = tuple[Any, Any]
Maker = Callable[..., Pair]

_makers: dict[str, Maker] = {}


def register_data(name: str) -> Callable[[Maker], Maker]:
    """Make a function available as `data: {name: …}`."""

    def register(maker: Maker) -> Maker:
        _makers[name] = maker
        return maker

    return register


def get_data(name: str, **options: Any) -> Pair:
    """The training and evaluation sets of a named dataset."""
    return check_data(name, options)(**options)


def check_data(name: str, options: dict[str, Any]) -> Maker:
    """Whether there is such a dataset with such options, without reading it; returns what makes it."""
    maker = _find(name)
    known = inspect.signature(maker).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for option in options:
        if option not in known and not takes_any:
            raise DataError(
                "unknown-option",
                f"The dataset {name!r} has no option {option!r}: {did_you_mean(option, known)}",
            )
    return maker


def _find(name: str) -> Maker:
    # The embedded sets register themselves when they are imported, and are imported when somebody asks.
    from paceline.data import cifar, shapes, text  # noqa: F401

    if name not in _makers:
        raise DataError(
            "unknown-name",
            f"There is no dataset named {name!r}: {did_you_mean(name, _makers)}",
            fix="register your own with paceline.data.named.register_data",
        )
    return _makers[name]
