"""Hints for names from other frameworks."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import pytest

import paceline
from paceline.config import foreign_names
from paceline.config.launch import LaunchSpec, options_of
from paceline.config.recipe import Config
from paceline.errors import ConfigError
from paceline.train.callbacks import HOOKS

TABLE = tomllib.loads(Path(foreign_names.__file__).with_suffix(".toml").read_text())
OWN = {
    "settings": set(Config.model_fields),
    "options": {flag for option, _ in options_of(LaunchSpec).values() for flag in option.flags},
    "methods": set(dir(paceline.Trainer)),
    "names": set(dir(paceline)),
    "hooks": set(HOOKS),
    "dist": set(dir(paceline.dist)),
}
# Public names of systems whose users come from guides, by where they look for them here.
OF_GUIDES = {
    "settings": "use_dynamic_scaling initial_scale distributed local_rank world_size use_amp use_ema ema_decay",
    "methods": "_reduce_tensor setup_distributed cleanup_distributed",
    "names": "TrainingEngine DistributedAMPTrainer create_default_amp_config launch_distributed_training "
    "GradScaler distributed_train_worker DistributedSampler DDP init_process_group get_rank ReduceOp",
    "dist": "get_rank get_world_size ReduceOp init_process_group destroy_process_group",
}


@pytest.mark.parametrize("kind", OWN)
def test_each_name_has_one_hint_and_is_none_of_ours(kind: str) -> None:
    names = Counter(name for group in TABLE[kind] for name in group.split())
    assert max(names.values()) == 1
    assert set(names) & OWN[kind] <= {"--nproc-per-node", "--nproc_per_node"}  # not options of `paceline train`


def test_every_setting_that_a_hint_quotes_exists() -> None:
    for hint in TABLE["settings"].values():
        for quoted in hint.split("`")[1::2]:
            section, _, key = quoted.partition("=")[0].partition(".")
            kind = Config.model_fields.get(section)
            assert kind or section in ("optimizer", "callbacks", "metrics", "device", "collate_fn"), quoted
            assert not key or key in type(kind.default).model_fields, quoted


def test_a_setting_of_another_framework_names_ours() -> None:
    with pytest.raises(ConfigError) as caught:
        Config(gradient_accumulation_steps=4, use_amp=True, train={"num_epochs": 3}, compress="int8", ddp_comm_hook=1)
    for words in ("use `accumulate`. It splits `batch`", "`precision`", "`train.epochs`", "use `sync`", "comm_hook=fn"):
        assert words in caught.value.fix
    assert foreign_names.suggest("settings", "bach", ["batch", "seed"]) == "did you mean 'batch'?"


def test_a_name_of_another_framework_in_the_package_names_ours() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Accelerator'; use paceline\.Trainer"):
        _ = paceline.Accelerator
    with pytest.raises(AttributeError, match=r"no attribute 'Trainre'$"):
        _ = paceline.Trainre


@pytest.mark.parametrize("kind", OF_GUIDES)
def test_names_of_the_guides_have_hints(kind: foreign_names.Kind) -> None:
    assert [name for name in OF_GUIDES[kind].split() if not foreign_names.find_hint(kind, name)] == []


def test_a_name_of_torch_in_dist_names_ours() -> None:
    with pytest.raises(AttributeError, match=r"'paceline.dist' has no attribute 'get_rank'; use dist\.rank\(\)"):
        _ = paceline.dist.get_rank
    assert not hasattr(paceline.dist, "anything_else")
