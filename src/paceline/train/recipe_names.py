"""What the names in a recipe stand for: its model, data and metrics, registered or of the user's own code.

Commands that only read a recipe never call this: it may import code that the recipe names (`module:function`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from paceline.config.components import METRICS
from paceline.config.recipe import Config, with_sections
from paceline.config.sections import NamedSection
from paceline.data.datasets import DATASETS
from paceline.errors import TrainError
from paceline.models import metrics  # noqa: F401 - implements those of METRICS
from paceline.models.zoo import MODELS
from paceline.own_code import is_own
from paceline.registry import Registry
from paceline.run.history import require_free_names

REGISTRIES: dict[str, Registry[Any, Any]] = {"model": MODELS, "data": DATASETS}
MetricsLike = Mapping[str, Any] | Sequence[str] | str | None


def _call(function: Callable[[], Any]) -> Any:
    return function()


def import_component(config: Config, key: str) -> None:
    """Import the model or dataset of a recipe, if it is of the user's own code."""
    section: NamedSection | None = getattr(config, key)
    if section is not None and is_own(section.name):
        REGISTRIES[key].import_own(section.name, config.code)


def settle(config: Config, ask: Callable[[Callable[[], Any]], Any] = _call) -> tuple[Config, list[str]]:
    """The recipe without options of a model or dataset that an override has replaced by one that does not have them,
    and what to say about it. `ask` calls functions that may import code of the user."""
    changes, notes = dict[str, NamedSection](), list[str]()
    for key in [key for key in REGISTRIES if config.inherited.get(key)]:
        section: NamedSection = getattr(config, key)
        known, options = ask(partial(_options, config, key)), section.options()
        foreign = [] if known is None else [name for name in options if name not in known]
        if dropped := [name for name in foreign if name in config.inherited[key]]:
            kept = {name: value for name, value in section.model_dump().items() if name not in dropped}
            changes[key] = type(section).model_validate(kept)
            them = ", ".join(f"{key}.{name}" for name in dropped)
            notes.append(f"{key}.name={section.name} drops {them} of the recipe: {section.name} has no such option")
    return with_sections(config, changes), notes


def _options(config: Config, key: str) -> list[str] | None:
    """The options of a component; None: any."""
    import_component(config, key)
    name = getattr(config, key).name
    REGISTRIES[key].find(name)
    return REGISTRIES[key].options(name)


def split_metrics(given: MetricsLike) -> tuple[list[str], dict[str, Any]]:
    """The names in an argument `metrics`, which a recipe can contain, and functions by name, which it can't."""
    if given is None:
        return [], {}
    if isinstance(given, Mapping):
        return [], dict(given)
    names = [given] if isinstance(given, str) else list(given)
    return names, {}


def build_metrics(config: Config, more: MetricsLike = None) -> dict[str, Any]:
    """The metrics of a recipe, and more, by the name under which they are recorded. In a dict, a function may be given
    by its name as well."""
    found: dict[str, Any] = {}
    names, functions = split_metrics(more)
    for name in [*config.metrics, *names]:
        short = name.rpartition(":")[2].rpartition(".")[2]
        if short in found or short in functions:
            raise TrainError("reserved-name", f"Two metrics have the name {short!r}.", fix="remove or rename one")
        found[short] = _find_metric(name, config)
    found |= {key: _find_metric(value, config) if isinstance(value, str) else value for key, value in functions.items()}
    require_free_names(found, "metrics")
    return found


def _find_metric(name: str, config: Config) -> Any:
    if is_own(name):
        METRICS.import_own(name, config.code)
    metric: Any = METRICS.find(name)
    return metric() if isinstance(metric, type) else metric  # a class, as those of torchmetrics
