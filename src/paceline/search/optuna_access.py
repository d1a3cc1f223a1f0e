"""Optuna, which is optional: its import, and its warnings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.errors import SearchError


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise SearchError(
            "no-optuna", "A sweep needs Optuna, which is not installed.", fix="pip install 'paceline[sweep]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@contextmanager
def quiet() -> Iterator[None]:
    """Parts of Optuna are marked as experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
