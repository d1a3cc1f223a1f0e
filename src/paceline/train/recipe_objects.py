"""Build the objects of a recipe, check it before launch, and open the outputs of a run.

The names of its model, data and metrics are registered, or of the user's own code. Commands that only read a recipe
never call this: it may import code that the recipe names (`module:function`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.config.components import METRICS
from paceline.config.recipe import Config, effective, with_sections
from paceline.config.sections import NamedSection
from paceline.data.batches import tensors_in
from paceline.data.datasets import DATASETS, get_data
from paceline.errors import ConfigError, ModelError, PacelineError, TrainError
from paceline.models.metrics import NamedMetric  # implements those of METRICS, too
from paceline.models.spec import declared_spec
from paceline.models.zoo import MODELS, find_model, get_model
from paceline.monitor import rank_stats
from paceline.monitor.loggers import open_loggers
from paceline.monitor.rank_stats import RankStats
from paceline.parallel.compile import require_compiler
from paceline.parallel.fsdp import require_gpu
from paceline.plan.batch import derive_batch
from paceline.plan.layout import Derived, derive_layout
from paceline.plan.memory import MachineFacts
from paceline.plan.passes import require_allowed
from paceline.plan.schedule import derive_schedule
from paceline.precision import policies
from paceline.registry import Registry
from paceline.run import folder as folders
from paceline.run import regular_files
from paceline.run.folder import RunFolder
from paceline.run.history import require_free_names
from paceline.run.jsonl import JsonlWriter
from paceline.run.user_frame import find_user_frame
from paceline.runtime import environment
from paceline.runtime.device import choose_device, memory_of
from paceline.runtime.process_group import World
from paceline.runtime.processes import call_in_child
from paceline.runtime.rng import derive_seed, preserve_rng_state, seed_everything
from paceline.train.checks import layout_checks, run_setup
from paceline.train.recorder import Sinks
from paceline.user_code import is_own

_DATA = 1  # the number of a random stream; the model has 0
REGISTRIES: dict[str, Registry[Any, Any]] = {"model": MODELS, "data": DATASETS}
MetricsLike = Mapping[str, Any] | Sequence[str] | str | None


def import_component(config: Config, key: str) -> None:
    """Import the model or dataset of a recipe, if it is of the user's own code."""
    section: NamedSection | None = getattr(config, key)
    if section is not None and is_own(section.name):
        REGISTRIES[key].import_own(section.name, config.code)


def drop_inherited_options(
    config: Config, ask: Callable[[Callable[[], Any]], Any] = lambda function: function()
) -> tuple[Config, list[str]]:
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


def build_metrics(config: Config, more: MetricsLike = None, model: Any = None, criterion: Any = None) -> dict[str, Any]:
    """The metrics of a recipe, and more, by the name under which they are recorded. In a dict, a function may be given
    by its name as well. Ours know the `model` and the `criterion`."""
    found: dict[str, Any] = {}
    names, functions = split_metrics(more)
    for name in [*config.metrics, *names]:
        short = name.rpartition(":")[2].rpartition(".")[2]
        if short in found or short in functions:
            raise TrainError("reserved-name", f"Two metrics have the name {short!r}.", fix="remove or rename one")
        found[short] = _find_metric(name, config)
    found |= {key: _find_metric(value, config) if isinstance(value, str) else value for key, value in functions.items()}
    require_free_names(found, "metrics")
    ours = {name: each.for_model(model, criterion) for name, each in found.items() if isinstance(each, NamedMetric)}
    return found | ours


def _find_metric(name: str, config: Config) -> Any:
    if is_own(name):
        METRICS.import_own(name, config.code)
    metric: Any = METRICS.find(name)
    return metric() if isinstance(metric, type) else metric  # a class, as those of torchmetrics


def build_model(config: Config) -> nn.Module:
    """The recipe's model, with the same initial weights on every rank."""
    section = _require_section(config.model, "model", "gpt")
    import_component(config, "model")
    # With deferred init, weights are materialized when it is known which of them this rank holds.
    spec = declared_spec(find_model(section.name, section.options()))
    with torch.device("meta") if spec is not None and spec.deferred_init else nullcontext():
        return get_model(section.name)(config)


def build_meta_model(config: Config) -> nn.Module:
    """The recipe's model on the meta device, or with weights if it can't be built there."""
    build = get_model(_require_section(config.model, "model", "gpt").name)
    try:
        with torch.device("meta"):
            return build(config)
    except PacelineError:
        raise
    except Exception:  # code of the user may raise anything there
        return build(config)


def build_data(config: Config) -> tuple[Any, Any]:
    """The recipe's training and validation data."""
    if config.model is None and (config.data is None or not config.data.name):
        raise ConfigError("missing-section", "trainer.train() got no data.")
    section = _require_section(drop_inherited_options(config)[0].data, "data", "stdlib-text")
    import_component(config, "data")
    with preserve_rng_state():  # random data is the same on every rank
        seed_everything(derive_seed(config.seed, _DATA) >> 1)
        return get_data(section.name, **section.options())


def check(config: Config, ranks: int) -> None:
    """Find errors in the recipe before any rank starts. Code of the user runs in a process of its own: it may use CUDA
    or start threads, and ranks could no longer be forked."""
    if config.init_from is not None:
        folders.require_exists(config.init_from, "No initial weights")
    if any(map(is_own, config.names)):
        call_in_child(lambda: _check(config, ranks))
    else:
        _check(config, ranks)


def check_names(config: Config) -> None:
    """Find errors in the names of a recipe, and in the options of what they stand for."""
    for key, registry in REGISTRIES.items():
        section = getattr(config, key)
        if section is not None and section.name:
            import_component(config, key)
            registry.find(section.name, section.options())
    build_metrics(config)


def _check(config: Config, ranks: int) -> None:
    _require_section(config.model, "model", "gpt")
    _require_section(config.data, "data", "stdlib-text")
    check_names(config)
    plan = derive_layout(config, ranks)
    require_allowed(config, plan)
    derive_batch(config, plan)
    meta_model = _build_checked(config)
    layout_checks.check_plan_of(config, meta_model, plan)
    device = choose_device(config.device, environment.RankInfo())
    if config.fsdp.offload:
        require_gpu(device)
    if config.compile:
        require_compiler(device)
    if device.type == "cpu":  # querying a GPU would initialize CUDA, and ranks could no longer be forked
        machine = MachineFacts(ranks, nodes=1, memory=memory_of(device, ranks))
        layout_checks.resolve_on(plan, config, meta_model, machine)
    if config.train.epochs is None and config.train.max_steps is None:
        derive_schedule(config, 1, None, None, None)


def _build_checked(config: Config) -> nn.Module:
    """The model for checks. An error of the user's code has its line, which a rank would show with a traceback."""
    try:
        return build_meta_model(config)
    except PacelineError:
        raise
    except Exception as error:
        if config.model is None or not is_own(config.model.name):
            raise
        frame = find_user_frame(error)
        raise ModelError(
            "build-failed",
            f"{config.model.name} raised {type(error).__name__}: {error}" + (f" ({frame})." if frame else "."),
        ) from error


def _require_section(section: NamedSection | None, key: str, example: str) -> NamedSection:
    if section is None or not section.name:
        example = f"{key}: {{name: {example}}}, or pass your own object to the Trainer or to train()"
        raise ConfigError("missing-section", f"The recipe names no `{key}:`.", fix=f"add one, e.g. {example}")
    return section


def open_sinks(config: Config, run: RunFolder | None, world: World, recreate: Callable[[], None]) -> Sinks:
    """Open the files and loggers for this rank's records. `recreate` is called if the folder disappears."""
    if run is None:
        return Sinks()
    events = RankStats(run.rank_stats(world.rank_info.rank))
    if not world.is_main:
        return Sinks(events=events)
    loggers = open_loggers(config.loggers, run, config.to_dict())
    return Sinks(JsonlWriter(run.metrics, recreate), events, loggers, JsonlWriter(run.media, recreate))


def open_profiler(config: Config, run: RunFolder | None, world: World) -> Any:
    if config.profile is None:
        return None
    from paceline.monitor.profiler import Profiler  # few runs need it

    return Profiler(config.profile, run, world.rank_info.rank)


def tokens_per_sample(batch: Any) -> int | None:
    """Sequence length of a batch of token ids; None for other batches."""
    first = next(tensors_in(batch), None)
    return None if first is None or first.dim() != 2 or first.is_floating_point() else first.shape[1]


def write_run(run: RunFolder, config: Config, rows: Mapping[str, Derived]) -> None:
    regular_files.replace(run.config, f"{effective(config)}\n".encode())
    script = run_setup.main_script()
    if script is not None:
        rows = {**rows, "script": Derived(os.path.relpath(script, run.path.parent), "trains in this folder")}
    regular_files.replace(run.environment, json.dumps(rank_stats.describe(), indent=1).encode())
    regular_files.replace(run.derived, json.dumps({name: asdict(row) for name, row in rows.items()}, indent=1).encode())


def set_torch_flags(config: Config, device: torch.device) -> None:
    """These flags are global to the process."""
    if config.tf32:
        policies.allow_tf32(True)
    if config.deterministic:
        if device.type == "cuda":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matmul
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if config.fixed_order:
        torch.set_num_threads(1)  # kernels on a CPU divide their sums among threads


def place_criterion(criterion: Any, config: Config, device: torch.device) -> None:
    if isinstance(criterion, nn.Module):
        policies.prepare_model(criterion, config.precision)
        criterion.to(device)
