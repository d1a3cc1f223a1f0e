from __future__ import annotations

import numpy as np
import pytest
import torch

import paceline
from paceline.data.stdlib_text import bigram_loss


def test_text_windows_hold_each_tokens_successor_and_do_not_overlap() -> None:
    train, _ = paceline.get_data("stdlib-text", context=16, size=5000)
    first, second = train[0], train[1]
    assert torch.equal(first["inputs"][1:], first["targets"][:-1])
    assert second["inputs"][0] == first["targets"][-1]
    assert len(train) > 100


def test_the_held_out_text_is_not_in_the_training_text() -> None:
    train, val = paceline.get_data("stdlib-text", context=16, size=5000)
    assert len(train.text) + len(val.text) == 5000


def test_bigram_loss_is_the_cross_entropy_of_counted_pairs() -> None:
    text = np.frombuffer(b"ab" * 500, dtype=np.uint8)
    assert bigram_loss(text, text) < 0.01
    random = np.random.default_rng(0).integers(0, 4, 200_000, dtype=np.uint8)
    assert bigram_loss(random[:100_000], random[100_000:]) == pytest.approx(np.log(4), abs=0.002)
