from __future__ import annotations

import torch

import paceline


def test_shapes_are_a_function_of_their_index() -> None:
    train, val = paceline.get_data("shapes", size=16, channels=1, length=64, val_length=8)
    again, _ = paceline.get_data("shapes", size=16, channels=1, length=64, val_length=8)
    assert torch.equal(train[5]["inputs"], again[5]["inputs"])
    assert not torch.equal(train[5]["inputs"], val[5]["inputs"])
    assert train[5]["inputs"].shape == (1, 16, 16)
    assert train[5]["inputs"].min() >= 0 and train[5]["inputs"].max() <= 1
    assert {int(train[index]["targets"]) for index in range(8)} == {0, 1, 2, 3}
