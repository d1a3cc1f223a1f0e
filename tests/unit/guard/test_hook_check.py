"""Communication hooks that can't be used."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import post_localSGD_hook

import tiny
from paceline.errors import TrainError


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"comm_hook": "powersgd"}, r"comm_hook is str, expected a function hook\(state, bucket\)"),
        ({"comm_hook": lambda bucket: bucket}, r"can't be called as hook\(state, bucket\): too many positional"),
        ({"comm_state": {}}, "comm_state without comm_hook"),
        ({"comm_hook": allreduce_hook, "sync": "int8"}, "hook allreduce_hook together with `sync`"),
        ({"comm_hook": post_localSGD_hook}, r"post_localSGD_hook is not supported.*sync=\{'every': 8\}"),
    ],
)
def test_unusable_hooks_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainError, match=rf"(?s)train\.comm-hook\].*{said}"):
        tiny.classifier_trainer(**settings)


def test_one_rank_says_that_it_does_not_use_the_hook(capsys: pytest.CaptureFixture[str]) -> None:
    def hook(state: Any, bucket: Any) -> Any:
        raise AssertionError

    trainer = tiny.classifier_trainer(comm_hook=hook, quiet=False)
    trainer.train(tiny.blobs(), max_steps=1)
    assert "hook is not used, there is one rank" in capsys.readouterr().out
