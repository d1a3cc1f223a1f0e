from __future__ import annotations

from collections import UserDict, defaultdict

import torch

from paceline.data.batches import apply, rows_of


def test_only_what_is_as_long_as_the_batch_is_sliced() -> None:
    batch = UserDict(x=torch.arange(6), names=list("abcdef"), weight=torch.ones(2), scale=torch.tensor(3.0))
    part = rows_of(batch, 2, 4)
    assert type(part) is UserDict
    assert (part["x"].tolist(), part["names"], len(part["weight"])) == ([2, 3], ["c", "d"], 2)
    assert batch["x"].tolist() == [0, 1, 2, 3, 4, 5]
    nested = apply(defaultdict(list, a=[torch.ones(2)]), lambda tensor: tensor * 2)
    assert nested["a"][0].tolist() == [2.0, 2.0] and nested["other"] == []
