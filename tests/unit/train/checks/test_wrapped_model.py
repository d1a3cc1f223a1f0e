"""Models that arrive in a wrapper of torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import _apply_optim_in_backward_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel

import tiny
from paceline.config.recipe import Config
from paceline.errors import LayoutError, TrainError
from paceline.log import rank_log
from paceline.train.checks import wrapped_model
from paceline.train.checks.wrapped_model import hook_of, unwrap_model


def wrapped(*gpus: int) -> nn.Module:
    model = nn.DataParallel(tiny.classifier())
    model.device_ids = list(gpus)  # as on a machine with so many
    return model


@pytest.mark.parametrize(
    ("model", "settings", "ranks", "strategy", "warns"),
    [
        (wrapped(0, 1), {}, 1, "dp", False),
        (wrapped(0, 1), {}, 2, "auto", False),  # the layout of the launch
        (wrapped(0), {}, 1, "auto", False),
        (tiny.classifier(), {}, 1, "auto", False),
        (wrapped(0, 1), {"strategy": "dp"}, 1, "dp", False),
        (wrapped(0, 1), {"strategy": "single"}, 1, "single", True),
        (wrapped(0, 1, 2), {}, 1, "auto", True),  # other GPUs than the visible ones
    ],
)
def test_data_parallel_uses_its_gpus_or_is_warned_about(
    model: nn.Module,
    settings: dict[str, str],
    ranks: int,
    strategy: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(wrapped_model, "gpus", lambda: [torch.device("cuda", 0), torch.device("cuda", 1)])
    config = Config.from_dict(settings)
    assert unwrap_model(model, config, ranks, rank_log(0))[1].strategy == strategy
    assert ("start one rank per GPU with paceline launch" in capsys.readouterr().out) == warns


def test_data_parallel_without_its_gpus_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = tiny.classifier_trainer(wrapped(0, 1))
    assert "DataParallel over 2 GPUs, but this run uses one" in capsys.readouterr().out
    trainer.train(tiny.blobs(), max_steps=1)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one rank, without a port."""
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    yield
    torch_dist.destroy_process_group()


def taken(model: nn.Module) -> Config:
    return unwrap_model(model, Config.from_dict({}), 1, rank_log(0, quiet=True))[1]


@pytest.mark.usefixtures("group")
def test_arguments_of_ddp_become_settings() -> None:
    plain = tiny.classifier()
    assert taken(DistributedDataParallel(plain)) == Config.from_dict({})
    assert taken(DistributedDataParallel(plain, find_unused_parameters=True)).unused_parameters == "allow"
    options: dict[str, Any] = {"static_graph": True, "broadcast_buffers": False, "bucket_cap_mb": 7}
    with pytest.warns(FutureWarning):  # torch 2.13 renamed broadcast_buffers
        section = taken(DistributedDataParallel(plain, **options)).ddp
    assert section.static_graph and not section.broadcast_buffers and section.bucket_mb == 7


@pytest.mark.usefixtures("group")
def test_the_communication_hook_of_ddp_is_taken_along() -> None:
    state = {"a": 1}
    wrapped = DistributedDataParallel(tiny.classifier())
    assert hook_of(wrapped) is None
    wrapped.register_comm_hook(state, fp16_compress_hook)
    hook = unwrap_model(wrapped, Config.from_dict({}), 1, rank_log(0, quiet=True))[2]
    assert hook is not None and (hook.reduce, hook.state) == (fp16_compress_hook, state)
    for built_in, function in [("ALLREDUCE", allreduce_hook), ("FP16_COMPRESS", fp16_compress_hook)]:
        wrapped = DistributedDataParallel(tiny.classifier())
        wrapped._register_builtin_comm_hook(getattr(torch_dist.BuiltinCommHookType, built_in))
        hook = hook_of(wrapped)
        assert hook is not None and hook.reduce is function


@pytest.mark.usefixtures("group")
def test_what_ddp_has_no_setting_for_is_refused() -> None:
    model = tiny.classifier()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    with pytest.raises(LayoutError, match=r"(?s)layout\.wrapped-model.*ignored parameters.*without the wrapper"):
        taken(DistributedDataParallel(model))
    stepping = DistributedDataParallel(tiny.classifier())
    stepping.register_comm_hook(None, _apply_optim_in_backward_hook(gradient_is_bucket_view=True))
    with pytest.raises(TrainError, match=r"(?s)train\.comm-hook\].*steps an optimizer inside the backward"):
        taken(stepping)
    part = nn.Sequential(DistributedDataParallel(tiny.classifier()))
    with pytest.raises(LayoutError, match=r"module 0 is in DistributedDataParallel"):
        unwrap_model(part, Config.from_dict({}), 2, rank_log(0))


def test_a_compiled_model_keeps_its_graph_and_its_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph

    trainer = tiny.classifier_trainer(torch.compile(tiny.classifier(), backend=backend))
    assert trainer.config.compile == "model"
    assert list(trainer.state_dict()) == list(tiny.classifier().state_dict())
    trainer.train(tiny.blobs(), max_steps=1)
    assert compiled


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
