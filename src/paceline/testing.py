"""Tests of distributed code on several ranks.

Names are imported on first use: pytest loads the plugin beside them wherever paceline is installed, and must not wait
for torch.

Example:
    >>> import torch
    >>> import paceline
    >>> from paceline import testing
    >>> @testing.ranks(2)
    ... def test_rank():
    ...     assert paceline.dist.world() == 2
    >>> test_rank()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.tools.testing.comparison import parity
    from paceline.tools.testing.runner import RankFailure, ranks, run_on_ranks

__all__ = ["RankFailure", "parity", "ranks", "run_on_ranks"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'paceline.testing' has no attribute {name!r}")
    if name == "parity":
        from paceline.tools.testing.comparison import parity

        return parity
    from paceline.tools.testing import runner

    return getattr(runner, name)
