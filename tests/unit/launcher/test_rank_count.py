from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import LaunchError
from paceline.launcher.rank_count import choose_ranks
from paceline.runtime import device

GPUS = ["cuda:0 (A)", "cuda:1 (A)"]


def test_a_requested_number_is_never_changed() -> None:
    assert choose_ranks(3, device=None, on_cpu=1)[0] == 3


def test_without_a_gpu_and_a_number_the_default_is_used() -> None:
    assert choose_ranks(None, device=None, on_cpu=4)[0] == 4


def test_every_gpu_gets_a_rank_unless_the_cpu_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_names", lambda: GPUS)
    ranks, reason = choose_ranks(None, device=None, on_cpu=4)
    assert ranks == 2 and all(name in reason for name in GPUS)
    assert choose_ranks(None, device="cpu", on_cpu=4)[0] == 4
    assert choose_ranks(3, device="cpu", on_cpu=4)[0] == 3


def test_more_ranks_than_gpus_have_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_names", lambda: GPUS)
    with pytest.raises(LaunchError) as caught:
        choose_ranks(3, device=None, on_cpu=1)
    assert caught.value.code == "launch.more-ranks-than-gpus"


@pytest.mark.parametrize("requested", [0, -1, True, 2.0, "2"])
def test_an_invalid_number_has_a_code(requested: Any) -> None:
    with pytest.raises(LaunchError) as caught:
        choose_ranks(requested, device=None, on_cpu=1)
    assert caught.value.code == "launch.bad-number"
