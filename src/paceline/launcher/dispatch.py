"""Selects a launch backend: the first row of `BACKENDS` that applies."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module

from paceline.config.launch import LaunchSpec
from paceline.errors import LaunchError
from paceline.launcher.cluster import node_env
from paceline.launcher.local.single_node import launch_single_node
from paceline.launcher.local.start import prepare_environment
from paceline.launcher.workload import Workload, choose_ranks, reject_launch_on_rank
from paceline.runtime.environment import read_exported
from paceline.runtime.scheduler_env import read_allocation


@dataclass(frozen=True)
class Backend:
    """A launch backend. `field` is the option that selects it; None if the environment does. `launch` is the path of a
    function (workload, spec, command) -> exit status, imported on use."""

    field: str | None
    launch: str
    applies: Callable[[LaunchSpec], bool] | None = None  # default: whether the option is set

    def is_chosen(self, spec: LaunchSpec) -> bool:
        return self.applies(spec) if self.applies else self.is_requested(spec)

    def is_requested(self, spec: LaunchSpec) -> bool:
        return self.field is not None and bool(getattr(spec, self.field))


def _is_submitted(spec: LaunchSpec) -> bool:
    """Inside a SLURM job, the same command launches instead."""
    return bool(spec.slurm) and (spec.dry_run or read_allocation(os.environ) is None)


def _in_allocation(spec: LaunchSpec) -> bool:
    allocation = read_allocation(os.environ)
    return spec.master is None and allocation is not None and allocation.is_front_end


def _among_nodes(spec: LaunchSpec) -> bool:
    found = node_env.read_node_environment(os.environ) if spec.master is None else None
    return found is not None and found.nodes.most > 1


def _is_manual(spec: LaunchSpec) -> bool:
    return spec.nodes is not None or spec.master is not None or spec.node_rank is not None


BACKENDS = (
    Backend("k8s", "paceline.launcher.backends.kubernetes:launch", lambda spec: spec.k8s or bool(spec.k8s_with)),
    Backend("hosts", "paceline.launcher.backends.ssh:launch"),
    Backend("slurm", "paceline.launcher.backends.slurm_job:launch", _is_submitted),
    Backend("ray", "paceline.launcher.backends.ray:launch"),
    Backend(None, "paceline.launcher.backends.slurm_allocation:launch", _in_allocation),
    Backend(None, "paceline.launcher.cluster.manual:launch_from_environment", _among_nodes),
    Backend("master", "paceline.launcher.cluster.manual:launch", _is_manual),
)


def dispatch(workload: Workload, spec: LaunchSpec, command: Sequence[str]) -> int:
    """Run the workload; returns the exit status for the shell. `command` are the arguments of `paceline`."""
    _check_options(spec)
    _check_variables(spec.env)
    backend = next((each for each in BACKENDS if each.is_chosen(spec)), None)
    if backend is None:
        return _launch_here(workload, spec, command)
    module, _, name = backend.launch.partition(":")
    status: int = getattr(import_module(module), name)(workload, spec, command)
    return status


def _launch_here(workload: Workload, spec: LaunchSpec, command: Sequence[str]) -> int:
    """Launch on this node only."""
    reject_launch_on_rank("a command that launches ranks")
    found = node_env.read_node_environment(os.environ)
    wanted = spec if spec.ranks is not None or found is None else replace(spec, ranks=found.ranks)
    if read_exported(os.environ) is not None:
        prepare_environment(wanted)
        ranks, _ = choose_ranks(wanted.ranks, device=wanted.device, on_cpu=wanted.default_cpu_ranks)
        node_env.reject_exported_rank(os.environ, ranks, command)
    return launch_single_node(workload, wanted)


def _check_options(spec: LaunchSpec) -> None:
    names = [f"--{each.field}" for each in BACKENDS if each.is_requested(spec)]
    if len(names) > 1:
        raise LaunchError("bad-options", f"{' and '.join(names)} are mutually exclusive.", fix="choose one of them")
    if spec.rendezvous not in (None, "static", "c10d"):
        raise LaunchError("bad-options", f"Unknown --rdzv-backend {spec.rendezvous!r}.", fix="use static or c10d")
    if spec.rendezvous == "static" and spec.node_rank is None:
        raise LaunchError("bad-options", "--rdzv-backend static requires --node-rank on every node.")


def _check_variables(env: Mapping[str, str]) -> None:
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII) or not _can_be_set(value):
            raise LaunchError(
                "bad-variable",
                f"Invalid environment variable in env: {name!r}.",
                fix="names consist of letters, digits and _; values must not contain NUL",
            )


def _can_be_set(value: str) -> bool:
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False
