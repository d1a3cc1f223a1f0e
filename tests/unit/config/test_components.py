from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
import torch

import paceline
from paceline.config.components import (
    LOGGERS,
    METRICS,
    OPTIMIZERS,
    PRECISIONS,
    SCHEDULES,
    TORCH_OPTIMIZERS,
    optimizer_facts,
)
from paceline.config.recipe import Config
from paceline.errors import ConfigError
from paceline.models import metrics  # noqa: F401  # implements METRICS
from paceline.monitor import loggers  # noqa: F401  # implements LOGGERS
from paceline.optim import (
    optimizers,  # implements OPTIMIZERS
    schedules,  # noqa: F401  # implements SCHEDULES
)
from paceline.precision import policies  # noqa: F401
from paceline.registry import Registry
from paceline.train.trainer_kwargs import TrainerKwargs


@pytest.mark.parametrize("registry", [OPTIMIZERS, PRECISIONS, SCHEDULES, LOGGERS, METRICS], ids=lambda each: each.kind)
def test_what_is_declared_is_implemented_and_nothing_else(registry: Registry[Any, Any]) -> None:
    assert registry.declared and sorted(registry.declared) == sorted(registry.implemented)


def test_classes_of_optimizers_exist() -> None:
    facts = [OPTIMIZERS.facts(name) for name in OPTIMIZERS.declared] + list(TORCH_OPTIMIZERS)
    names = [name for each in facts for name in each.classes]
    assert len(names) == len(set(names)) > 10
    assert [name for name in names if not hasattr(torch.optim, name) and not hasattr(optimizers, name)] == []


def test_every_optimizer_of_torch_has_facts_but_the_one_with_a_closure() -> None:
    classes = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    classes = [
        each for each in classes if issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
    ]
    unknown = [each.__name__ for each in classes if not optimizer_facts([(each.__module__, each.__name__)]).classes]
    assert unknown == ["LBFGS"]


def test_of_a_base_class_only_the_need_for_full_weights_is_inherited() -> None:
    mine, adamw, muon_ = ("user.code", "Mine"), ("torch.optim.adamw", "AdamW"), ("torch.optim._muon", "Muon")
    assert optimizer_facts([adamw]).elementwise
    assert not optimizer_facts([mine, adamw]).elementwise
    assert not optimizer_facts([("user.code", "AdamW")]).elementwise
    assert optimizer_facts([mine, muon_]).needs_full


def test_the_trainers_keywords_spell_the_names_of_the_registries() -> None:
    assert list(get_args(get_type_hints(TrainerKwargs)["precision"])) == PRECISIONS.declared


@pytest.mark.parametrize(
    "values", [{"optimizer": {"name": "adams"}}, {"schedule": {"name": 3}}, {"precision": "fp8"}, {"loggers": ["cvs"]}]
)
def test_an_unknown_name_is_refused_with_the_known_ones(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"bad-value[^$]*: expected '[\w-]+', .* or '[\w-]+'"):
        Config.from_dict(values)


def test_a_registered_name_is_in_recipe_and_schema_with_its_options() -> None:
    @paceline.register_optimizer("with-options", state_per_param=1)
    def build(params: Any, settings: Any, lr: float, *, rho: float = 0.5) -> torch.optim.Optimizer:
        return torch.optim.SGD(params.groups, lr=lr)

    config = Config.from_dict({"optimizer": {"name": "with-options", "rho": 0.1}}, ["optimizer.lr=0.5"])
    assert config.optimizer.options() == {"rho": 0.1}
    assert Config.from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert "with-options" in Config.json_schema()["$defs"]["Optimizer"]["properties"]["name"]["enum"]
    for name in ("with-options", "adamw"):
        with pytest.raises(ConfigError, match=r"unknown key 'optimizer\.lrr' [^$]*fix: did you mean 'lr'"):
            Config.from_dict({"optimizer": {"name": name, "lrr": 1}})
    with pytest.raises(ConfigError, match=r"unknown key 'optimizer\.rho'"):
        Config.from_dict({"optimizer": {"name": "adamw", "rho": 0.1}})
