"""The model registry.

    @register_model("mine")
    class Mine(torch.nn.Module):
        def __init__(self, width: int = 64): ...

    model = get_model("mine")(config)      # config.model holds the options
    model = get_model("mine")(width=32)

The options in the `model:` section of a recipe are the parameters of `__init__`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn

from paceline.config.recipe import Config
from paceline.errors import ModelError
from paceline.registry import Builder, Registry
from paceline.runtime.rng import derive_seed, preserve_rng_state, seed_everything
from paceline.user_code import is_own


def _load_embedded() -> None:
    from paceline.models import gpt, mlp, resnet, vae  # noqa: F401


MODELS: Registry[None, nn.Module] = Registry(
    "model", error=ModelError, hint="@paceline.register_model", load=_load_embedded
)
find_model = MODELS.find


def register_model(name: str) -> Callable[[Builder], Builder]:
    """Decorator that registers a model, for `model.name` in a recipe and `get_model`.

    Args:
        name: of the model. The parameters of the class or function are its options in a recipe

    Returns:
        The decorator.

    Raises:
        ModelError: `model.bad-registration`: the name is not a string, or what is decorated can't be called

    Example:
        >>> import paceline
        >>> from torch import nn
        >>> @paceline.register_model("line")
        ... class Line(nn.Linear):
        ...     def __init__(self, inputs=4):
        ...         super().__init__(inputs, 1)
        >>> paceline.get_model("line")(inputs=2).in_features
        2
    """
    return MODELS.implement(name)


def get_model(name: str) -> Callable[..., nn.Module]:
    """A builder for a registered model, or one of your own code.

    Args:
        name: of a model: gpt, mlp, resnet18, resnet20, resnet50, vae, one of `register_model`, or `module:name` for a
            function or class of your own code

    Returns:
        A function. Call it with a Config, whose seed determines the initial weights, or with the options of the model.

    Raises:
        ModelError: `model.unknown-name`; when the model is built, `model.unknown-option`, `model.missing-option`,
            `model.not-a-module`, `model.other-model`
        ConfigError: `config.no-module`, `config.no-such-name`, `config.not-callable`, `config.import-failed`

    Example:
        >>> import paceline
        >>> model = paceline.get_model("mlp")(inputs=8, width=16)
        >>> sum(parameter.numel() for parameter in model.parameters()) > 0
        True
    """
    if not is_own(name):  # the folder of its recipe is known later
        find_model(name)

    def build(config: Config | None = None, **options: Any) -> nn.Module:
        if is_own(name):
            MODELS.import_own(name, None if config is None else config.code)
        options = {**_from_config(name, config), **options}
        make = find_model(name, options)
        with nullcontext() if config is None else preserve_rng_state():
            if config is not None:
                seed_everything(derive_seed(config.seed, 0) >> 1)
            model: Any = make(**options)
        if not isinstance(model, nn.Module):
            raise ModelError(
                "not-a-module",
                f"The model {name!r} is a {type(model).__name__}, not a torch.nn.Module ({MODELS.place(name)}).",
            )
        return model

    return build


def _from_config(name: str, config: Config | None) -> dict[str, Any]:
    if config is None or config.model is None:
        return {}
    if config.model.name != name:
        raise ModelError(
            "other-model",
            f"Model {name!r} was requested, but the recipe configures {config.model.name!r}.",
            fix=f"use get_model({config.model.name!r}), or set model.name={name}",
        )
    options, known = config.model.options(), MODELS.options(name)
    replaced = [] if known is None else [key for key in config.inherited.get("model", ()) if key not in known]
    return {key: value for key, value in options.items() if key not in replaced}
