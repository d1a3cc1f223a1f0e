"""Models by name.

    @register_model("mine")
    class Mine(torch.nn.Module):
        def __init__(self, width: int = 64): ...

    model = get_model("mine")(config)      # config.model holds the options
    model = get_model("mine")(width=32)

The parameters of a model's `__init__` are the options that a recipe's `model:` section may give.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from paceline.config.recipe import Config
from paceline.errors import ModelError, did_you_mean

Maker = Callable[..., nn.Module]
AnyMaker = TypeVar("AnyMaker", bound=Maker)

_makers: dict[str, Maker] = {}


def register_model(name: str) -> Callable[[AnyMaker], AnyMaker]:
    """Make a module class, or a function that returns a module, available as `model: {name: …}`."""

    def register(maker: AnyMaker) -> AnyMaker:
        _makers[name] = maker
        return maker

    return register


def get_model(name: str) -> Callable[..., nn.Module]:
    """A builder for the model of that name: call it with a Config, or with the model's own options."""
    maker = _find(name)

    def build(config: Config | None = None, **options: Any) -> nn.Module:
        return maker(**_checked(name, maker, {**_from_config(name, config), **options}))

    return build


def check_model(name: str, options: dict[str, Any]) -> None:
    """Whether there is such a model with such options, without building it."""
    _checked(name, _find(name), options)


def _find(name: str) -> Maker:
    # The embedded models register themselves when they are imported, and are imported when somebody asks.
    from paceline.models import gpt, mlp, resnet, vae  # noqa: F401

    if name not in _makers:
        raise ModelError(
            "unknown-name",
            f"There is no model named {name!r}: {did_you_mean(name, _makers)}",
            fix="register your own with @paceline.register_model",
        )
    return _makers[name]


def _from_config(name: str, config: Config | None) -> dict[str, Any]:
    if config is None or config.model is None:
        return {}
    if config.model.name != name:
        raise ModelError(
            "other-model",
            f"The model {name!r} was asked for, but the recipe describes {config.model.name!r}.",
            why="the recipe's options belong to another model",
            fix=f"use get_model({config.model.name!r}), or set model.name={name}",
        )
    return config.model.options()


def _checked(name: str, maker: Maker, options: dict[str, Any]) -> dict[str, Any]:
    known = inspect.signature(maker).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for option in options:
        if option not in known and not takes_any:
            raise ModelError(
                "unknown-option",
                f"The model {name!r} has no option {option!r}: {did_you_mean(option, known)}",
            )
    return options
