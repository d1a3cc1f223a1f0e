"""How much of a campaign the tests run: a sample in `make test`, more in `make test-all`."""

from __future__ import annotations

import os

ALL = os.environ.get("PACELINE_ALL_TESTS") == "1"  # set by `make test-all`


def sample(usual: int, full: int) -> int:
    """The number of cases to run."""
    return full if ALL else usual
