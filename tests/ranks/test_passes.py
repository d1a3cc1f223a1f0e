"""What `paceline config show` prints is what runs, in that order, under every layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from torch import nn
from typer.testing import CliRunner

import paceline
import tiny
import warm
from paceline.parallel import (
    compile,
    data_parallel,
    dynamic_ddp,
    fsdp,
    meta_init,
    recompute,
    split,
    sync_batchnorm,
    weight_passes,
)
from paceline.parallel.pipeline import stage_partition
from paceline.parallel.pipeline.schedule_runner import PipelineRunner
from paceline.parallel.tensor import apply as tensor
from paceline.precision import policies
from paceline.tools.cli.main import app
from samples import ALL

MORE = {"recompute": "full", "compile": True}
SPLIT = {"strategy": "split", "split": {"devices": ["cpu", "cpu"], "microbatches": 2}}
# `gpt` is built on the meta device; `resnet` on the CPU, with batch norms.
CASES: list[tuple[str, int, str, dict[str, Any], list[str]]] = [
    ("single", 1, "gpt", {"strategy": "single"}, ["placement"]),
    ("single, more", 1, "gpt", {"strategy": "single", "precision": "fp64", **MORE},
     ["precision", "placement", "recompute", "compile"]),
    ("dp", 1, "gpt", {"strategy": "dp"}, ["placement", "data_parallel"]),
    ("split", 1, "gpt", {**SPLIT, **MORE}, ["split", "recompute", "compile", "microbatches"]),
    ("ddp", 2, "resnet", {"strategy": "ddp", **MORE}, ["placement", "sync_batchnorm", "recompute", "compile", "ddp"]),
    ("ddp, own statistics", 2, "resnet", {"strategy": "ddp", "sync_batchnorm": False}, ["placement", "ddp"]),
    ("ddp, meta", 2, "gpt", {"strategy": "ddp"}, ["placement", "sync_batchnorm", "ddp"]),
    ("fsdp", 2, "gpt", {"strategy": "fsdp", **MORE},
     ["broadcast", "sync_batchnorm", "recompute", "compile", "fsdp", "materialize"]),
    ("tp", 2, "gpt", {"strategy": "tp", "precision": "bf16", **MORE},
     ["precision", "broadcast", "tensor", "recompute", "compile", "materialize"]),
    ("pp", 2, "gpt", {"strategy": "pp", **MORE},
     ["broadcast", "pipeline", "recompute", "compile", "materialize", "tied_parameters"]),
    ("hsdp", 4, "gpt", {"strategy": "hsdp"}, ["broadcast", "sync_batchnorm", "fsdp", "materialize"]),
    ("tensor × replicate", 4, "gpt", {"layout": {"tensor": 2, "replicate": 2}, **MORE},
     ["broadcast", "sync_batchnorm", "tensor", "recompute", "compile", "fsdp", "materialize"]),
    ("tensor × shard", 4, "gpt", {"layout": {"tensor": 2, "shard": 2}},
     ["broadcast", "sync_batchnorm", "tensor", "fsdp", "materialize"]),
    ("pipeline × replicate", 4, "gpt", {"layout": {"pipeline": 2, "replicate": 2}},
     ["broadcast", "pipeline", "sync_batchnorm", "fsdp", "materialize", "tied_parameters"]),
    ("pipeline × shard", 4, "gpt", {"layout": {"pipeline": 2, "shard": 2}, **MORE},
     ["broadcast", "pipeline", "sync_batchnorm", "recompute", "compile", "fsdp", "materialize", "tied_parameters"]),
    ("pipeline × tensor", 4, "gpt", {"layout": {"pipeline": 2, "tensor": 2}},
     ["broadcast", "pipeline", "tensor", "materialize", "tied_parameters"]),
]  # fmt: skip
if not ALL:  # each of their passes is in another layout
    CASES = [case for case in CASES if case[0] not in ("tensor × shard", "pipeline × replicate", "pipeline × tensor")]
# The functions that do the work of a pass, in the modules whose passes call them.
WORK = [
    (split, "split", "split"),
    (weight_passes, "broadcast_weights", "broadcast"),
    (stage_partition, "remove_other_stages", "pipeline"),
    (sync_batchnorm, "convert_sync_batchnorm", "sync_batchnorm"),
    (tensor, "_shard_parameters", "tensor"),
    (recompute, "recompute", "recompute"),
    (compile, "compile_model", "compile"),
    (fsdp, "shard", "fsdp"),
    (dynamic_ddp, "replicate", "ddp"),
    (data_parallel, "gpus", "data_parallel"),
    (split, "MicroBatched", "microbatches"),
]


@contextmanager
def recorded(executed: list[str]) -> Iterator[None]:
    """Note the passes by what they call, not by what `parallelize` believes to run."""

    def noting(work: Callable[..., Any], name_of: Callable[..., str | None]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            name = name_of(*args)
            if name is not None and executed[-1:] != [name]:  # a pipeline shards stage by stage
                executed.append(name)
            return work(*args, **kwargs)

        return call

    def patch(owner: Any, attribute: str, name_of: Callable[..., str | None]) -> Any:
        return mock.patch.object(owner, attribute, noting(getattr(owner, attribute), name_of))

    patches = [patch(module, attribute, lambda *_, name=name: name) for module, attribute, name in WORK]
    patches += [
        patch(policies, "prepare_model", lambda *_: "precision"),
        patch(PipelineRunner, "broadcast_tied", lambda *_: "tied_parameters"),
        # The full model's weights are allocated when it is placed; shards of them, when all passes are done.
        patch(meta_init, "materialize", lambda root, model, *_: None if root is model else "materialize"),
    ]
    to = nn.Module.to

    def placing(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        is_model = hasattr(module, "model_spec") or hasattr(module, "stem")
        if is_model and not {"pipeline", "placement"} & set(executed):  # a stage is moved by its own pass
            executed.append("placement")
        return to(module, *args, **kwargs)

    patches.append(mock.patch.object(nn.Module, "to", placing))
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in reversed(patches):
            each.stop()


def recipe(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    return tiny.recipe(model, batch=8, train={"max_steps": 1}, run=False, quiet=True, **settings)


def executed_passes(number: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, ranks, model, settings, _ in CASES:
        if ranks == number:
            config = paceline.Config.from_dict(recipe(model, settings))
            with recorded(found.setdefault(name, [])):
                paceline.Trainer.from_config(config)
    return found


def printed_passes(model: str, settings: dict[str, Any], ranks: int, folder: Path) -> list[str]:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(model, settings)))
    shown = CliRunner().invoke(app, ["config", "show", str(path), "-n", str(ranks)])
    assert shown.exit_code == 0, shown.output
    _, _, listed = shown.output.partition("# applied to the model, in this order:")
    return re.findall(r"^#   \d+\. (\w+)", listed, re.MULTILINE)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*torch.jit")  # torch.compile imports it
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_is_printed_is_what_runs(ranks: int, tmp_path: Path) -> None:
    warm.import_compiler()
    executed = paceline.launch(executed_passes, ranks=ranks, number=ranks)
    expected = {name: passes for name, number, *_, passes in CASES if number == ranks}
    printed = {
        name: printed_passes(model, settings, ranks, tmp_path)
        for name, number, model, settings, _ in CASES
        if number == ranks
    }
    assert executed == expected
    assert printed == expected
