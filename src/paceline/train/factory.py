"""From a recipe to objects, and from a run to its folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.config import show
from paceline.config.recipe import Config
from paceline.config.sections import NamedSection
from paceline.data.batches import tensors_in
from paceline.data.datasets import find_data, get_data
from paceline.data.loader import MicroBatch
from paceline.errors import ConfigError, TrainError
from paceline.models.spec import declared_spec
from paceline.models.zoo import find_model, get_model
from paceline.monitor.loggers import open_loggers
from paceline.monitor.profiler import Profiler
from paceline.monitor.rank_stats import RankStats
from paceline.parallel.compile import require_compiler
from paceline.parallel.fsdp import require_gpu
from paceline.parallel.pipeline.stage_partition import partition_model
from paceline.parallel.tensor.apply import check_plan
from paceline.plan.batch import derive_batch
from paceline.plan.derived import Derived
from paceline.plan.layout import derive_layout
from paceline.plan.memory import MachineFacts
from paceline.plan.passes import require_allowed
from paceline.plan.schedule import derive_schedule
from paceline.run.folder import RunFolder
from paceline.run.jsonl import JsonlWriter
from paceline.runtime import collectives, environment, rng
from paceline.runtime.device import choose_device, memory_of
from paceline.runtime.process_group import World
from paceline.train import resolve_layout
from paceline.train.recorder import Sinks


def build_model(config: Config) -> nn.Module:
    """The recipe's model, with the same initial weights on every rank."""
    section = _named(config.model, "model", "gpt")
    rng.seed_everything(rng.derive_seed(config.seed, 0) >> 1)
    # Such a model gets its weights when it is clear which of them this rank holds.
    spec = declared_spec(find_model(section.name, section.options()))
    with torch.device("meta") if spec is not None and spec.deferred_init else nullcontext():
        return get_model(section.name)(config)


def shape_of_model(config: Config) -> nn.Module:
    """The recipe's model without its weights. One whose code has to see values is built with them."""
    build = get_model(_named(config.model, "model", "gpt").name)
    try:
        with torch.device("meta"):
            return build(config)
    except (RuntimeError, NotImplementedError):
        return build(config)


def build_data(config: Config) -> tuple[Any, Any]:
    """The recipe's training and evaluation sets."""
    section = _named(config.data, "data", "stdlib-text")
    return get_data(section.name, **section.options())


def check(config: Config, ranks: int) -> None:
    """What can be known to be wrong before any rank starts."""
    model, data = _named(config.model, "model", "gpt"), _named(config.data, "data", "stdlib-text")
    find_model(model.name, model.options())
    find_data(data.name, data.options())
    plan = derive_layout(config, ranks)
    require_allowed(config, plan)
    derive_batch(config, plan)
    shape = shape_of_model(config)
    if plan.degrees.tensor > 1:
        check_plan(shape, config.tensor, plan.degrees.tensor)
    if plan.degrees.pipeline > 1:
        partition_model(shape, config.pipeline, plan.degrees.pipeline)
    device = choose_device(config.device, environment.RankInfo())
    if config.fsdp.offload:
        require_gpu(device)
    if config.compile:
        require_compiler(device)
    if device.type == "cpu":  # asking a GPU would open its driver, and ranks could no longer be forked
        resolve_layout.settle_on(plan, config, shape, MachineFacts(ranks, nodes=1, memory=memory_of(device, ranks)))
    if config.train.epochs is None and config.train.max_steps is None:
        derive_schedule(config, 1, None, None, None)


def _named(section: NamedSection | None, key: str, example: str) -> NamedSection:
    if section is None:
        raise ConfigError(
            "missing-section",
            f"The recipe has no `{key}:` section.",
            fix=f"name one, for instance {key}: {{name: {example}}}",
        )
    return section


def check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """An optimizer of another model's parameters is an error; returns the trainable ones that it does not hold."""
    trainable = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    everything = {id(parameter) for parameter in model.parameters()}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held - everything:
        raise TrainError(
            "other-parameters",
            f"The optimizer holds {len(held - everything)} parameters that are not the model's.",
            why="it would update weights that the loss does not depend on, and leave the model as it is",
            fix="build the optimizer from model.parameters() of the model that you give to the Trainer",
        )
    return [name for parameter, name in trainable.items() if parameter not in held]


def open_sinks(config: Config, run: RunFolder | None, world: World) -> Sinks:
    """Where this rank's records go."""
    if run is None:
        return Sinks()
    events = RankStats(run.rank_stats(world.rank_info.rank))
    if not world.is_main:
        return Sinks(events=events)
    loggers = open_loggers(config.loggers, run, config.to_dict())
    return Sinks(JsonlWriter(run.metrics), events, loggers)


def open_profiler(config: Config, run: RunFolder | None, world: World) -> Profiler | None:
    return None if config.profile is None else Profiler(config.profile, run, world.rank_info.rank)


def tokens_per_sample(batch: Any) -> int | None:
    """For batches of token numbers: how many a sample has."""
    first = next(tensors_in(batch), None)
    whole_numbers = first is not None and first.dim() == 2 and not first.is_floating_point()
    return first.shape[1] if first is not None and whole_numbers else None


def of_one_step(micros: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    for micro in micros:
        yield micro
        if micro.last:
            return


def open_run(config: Config, default_name: str, is_main: bool) -> RunFolder | None:
    """The run folder, the same on every rank: the launcher's, or a new one that rank 0 makes."""
    if config.run is False:
        return None
    path = None
    if is_main:
        name = config.run if isinstance(config.run, str) else None
        path = str(_launchers_folder(name) or RunFolder.create(name or default_name))
    path = collectives.broadcast_object(path)
    return RunFolder(Path(path))


def default_name(model: nn.Module) -> str:
    """What a run is called that nobody gave a name."""
    return type(model).__name__.lower()


def _launchers_folder(name: str | None) -> RunFolder | None:
    """The launcher's folder: for the first Trainer of a launch, unless that one asks for another name."""
    launched = environment.run_folder()
    if launched is None or launched.config.exists() or not (name is None or launched.is_run_of(name)):
        return None
    return launched


def write_run(run: RunFolder, config: Config, rows: Mapping[str, Derived]) -> None:
    run.config.write_text(show.effective(config) + "\n")
    run.derived.write_text(json.dumps({name: asdict(row) for name, row in rows.items()}, indent=1))
