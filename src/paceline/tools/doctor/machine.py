"""All checks of one machine, in the order in which they are printed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from paceline.config.recipe import Config
from paceline.errors import PacelineError
from paceline.text import plural
from paceline.tools.doctor import gpus, interfaces, limits, software, storage, variables
from paceline.tools.doctor.finding import Finding
from paceline.tools.doctor.gpus import GpuFacts
from paceline.tools.doctor.variables import VariableFacts

_CPU_RANKS = 2  # that a recipe starts without GPUs
_RANKS, _SECONDS = 2, 20.0  # of the all-reduce
_OF_A_JOB = re.compile(r"(?:PET|SLURM|OMPI|PMI|TORCHELASTIC|LOCAL|GROUP|ROLE|MASTER)_\w+|(?:NODE_)?RANK|WORLD_SIZE")


def check_machine(
    gpu_facts: GpuFacts,
    *,
    ranks: int | None = None,
    several_hosts: bool = False,
    folder: Path = Path("runs"),
    port: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> list[Finding]:
    """`ranks`: that training would start here, by default one per GPU; `folder`: in which runs are."""
    network, adapters = interfaces.read(environment=environment), interfaces.read_fabric()
    ranks = ranks or _default_ranks(gpu_facts)
    values = VariableFacts(
        environment, [each.name for each in network.interfaces], gpu_facts.number, ranks,
        has_infiniband=adapters.has_infiniband, several_hosts=several_hosts,
    )  # fmt: skip
    needs_locked_memory = adapters.has_infiniband and several_hosts and bool(gpu_facts.gpus)
    return [
        *software.check(gpu_facts.gpus),
        *gpus.check(gpu_facts),
        *interfaces.check_fabric(adapters, len(gpu_facts.gpus), several_hosts),
        *limits.judge(limits.read(), ranks, has_infiniband=needs_locked_memory, several_hosts=several_hosts),
        *storage.check(folder),
        *interfaces.check(network, port=port, several_hosts=several_hosts),
        *variables.check(values),
    ]


def check_training(gpu_facts: GpuFacts, config: Config | None, ranks: int | None) -> list[Finding]:
    """What a launch would check before ranks start, and a real all-reduce on the device of the recipe."""
    device, backend = (None, None) if config is None else (config.device, config.backend)
    recipe = [] if config is None else [_check_recipe(config, ranks or _default_ranks(gpu_facts))]
    return [*recipe, _check_all_reduce(device, backend, len(gpu_facts.gpus))]


def _default_ranks(gpu_facts: GpuFacts) -> int:
    return len(gpu_facts.gpus) or _CPU_RANKS


def _check_recipe(config: Config, ranks: int) -> Finding:
    from paceline.train.recipe_objects import check

    try:
        check(config, ranks)
    except PacelineError as error:
        return Finding("recipe", "fail", f"[{error.code}] {error.what}", error.why, error.fix)
    return Finding("recipe", "ok", f"valid on {ranks} ranks")


def _check_all_reduce(device: str | int | None, backend: str | None, number: int) -> Finding:
    """Between two ranks of this machine, on `number` GPUs. With a single one there is one rank, because NCCL does not
    support two on one; without any, two on the CPU."""
    import paceline
    from paceline.tools.doctor.node_probe import AllReduceResult, all_reduce, judge_all_reduce

    where = None if device != "cpu" and number else "cpu"
    ranks = min(_RANKS, number) if where is None else _RANKS

    def rank() -> dict[str, object]:
        return asdict(all_reduce(where, backend if where is None else None, _SECONDS))

    try:
        with _environment({} if where is None else {"CUDA_VISIBLE_DEVICES": ""}):
            result = paceline.launch(rank, ranks=ranks)
    except PacelineError as error:
        return Finding("all-reduce", "fail", error.what, error.why, error.fix)
    return judge_all_reduce([""], [AllReduceResult(**result)], of=plural(ranks, "rank"))


@contextmanager
def _environment(changed: Mapping[str, str]) -> Iterator[None]:
    """Without the variables of a job that this machine is in, such as those of a pod: its ranks must not be met."""
    before = dict(os.environ)
    for name in filter(_OF_A_JOB.fullmatch, before):
        del os.environ[name]
    os.environ.update(changed)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
