"""Tests of distributed code on several ranks.

from paceline.testing import ranks

@ranks(2)
def test_sum():
    tensor = torch.ones(1)
    paceline.dist.all_reduce(tensor)
    assert tensor.item() == 2
"""

from paceline.testing.comparison import parity
from paceline.testing.runner import RankFailure, ranks, run_on_ranks

__all__ = ["RankFailure", "parity", "ranks", "run_on_ranks"]
