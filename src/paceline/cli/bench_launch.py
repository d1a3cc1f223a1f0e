"""Measures a recipe on the ranks of a launch, here or on other nodes.

All backends of `paceline launch` can run it, because on other nodes it is a module with arguments. The result of rank 0
comes back through a file in the working directory, which nodes share.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from paceline.bench.stored_results import RESULTS
from paceline.config.launch import LaunchSpec
from paceline.config.recipe import Config
from paceline.errors import LaunchError
from paceline.launcher.dispatch import dispatch
from paceline.launcher.workload import Target, Workload
from paceline.plan.network_model import bare
from paceline.run import folder
from paceline.runtime.scheduler_env import read_allocation

_THREADS = "OMP_NUM_THREADS"


def measure_recipe(config: Config, steps: int, spec: LaunchSpec, *, predicts: bool = False) -> dict[str, Any]:
    """The result of `bench.recipe_run.measure`. Raises if a rank failed, after its error was shown."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    result = RESULTS.absolute() / f".{secrets.token_hex(8)}.json"
    request = {"recipe": config.model_dump(mode="json"), "steps": steps, "predicts": predicts}
    words = (json.dumps(request), str(result))
    target = Target("module", "paceline.bench.recipe_run", words)

    def prepare(world: int) -> None:
        from paceline.train.factory import check

        check(bare(config), world)

    workload = Workload(lambda: _run(*words), _preload, prepare, target=target, name="paceline bench")
    # One thread per rank, unless the user has chosen: the same on any number of them.
    env = {_THREADS: os.environ.get(_THREADS, "1"), **spec.env}
    try:
        with _quiet(spec):
            status = dispatch(workload, replace(spec, run=None, env=env), sys.argv[1:])
        if status > 128:
            raise SystemExit(status)  # interrupted
        if status:
            raise LaunchError("rank-failed", f"Ranks exited with status {status}; the cause is shown above.")
        measured: dict[str, Any] = json.loads(result.read_bytes())
        return measured
    except FileNotFoundError:
        raise LaunchError(
            "no-result",
            f"Rank 0 has written no result that this machine can read at {folder.short(result)}.",
            fix="start from a folder that all nodes share",
        ) from None
    finally:
        result.unlink(missing_ok=True)


def submit_if_requested(spec: LaunchSpec) -> None:
    """A SLURM job that does not run yet runs the whole command, whose output is followed here."""
    if spec.slurm and read_allocation(os.environ) is None:
        raise SystemExit(dispatch(Workload(lambda: None), spec, sys.argv[1:]))


def _run(request: str, result: str) -> None:
    from paceline.bench import recipe_run

    recipe_run.main(request, result)


def _preload() -> None:
    import paceline.bench.recipe_run  # noqa: F401


@contextmanager
def _quiet(spec: LaunchSpec) -> Iterator[None]:
    """On one node, hide how many ranks start: a benchmark says so itself."""
    logger = logging.getLogger("paceline")
    level = logger.level
    if not any((spec.hosts, spec.ray, spec.slurm, spec.nodes, spec.master)):
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
