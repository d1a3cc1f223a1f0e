"""`paceline doctor`: whether this machine, or several hosts, are fit to train."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.config.launch import LaunchSpec
from paceline.tools.cli import options, workloads

if TYPE_CHECKING:
    from paceline.config.recipe import Config
    from paceline.tools.doctor.finding import Finding


@options.launch_options(without=("--nproc-per-node", "--nproc_per_node"))
def doctor(
    arguments: workloads.Arguments = None,
    json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
    bundle: Annotated[
        str | None,
        typer.Option(
            "--bundle", metavar="RUN", help="pack this run for a bug report: only what is known to be harmless"
        ),
    ] = None,
    **launch_options: Any,
) -> None:
    """Check whether this machine is fit to train: versions, GPUs, limits, shared memory, disk, network, environment
    variables, and a real all-reduce. With --hosts, --slurm, --ray or --nodes, check all nodes and the links between
    them. With a recipe, check that as well.

    The exit status is 1 if a check failed."""
    from paceline.tools.doctor.finding import describe, to_json, worst

    config = workloads.read_recipe(arguments, launch_options["ranks"], settled=False)[0] if arguments else None
    facts = {"device": None if config is None else config.device, "default_cpu_ranks": workloads.DEFAULT_CPU_RANKS}
    spec = LaunchSpec.resolve(config, {**launch_options, **facts})
    if bundle is None and any((spec.hosts, spec.slurm, spec.ray, spec.nodes, spec.master)):
        raise SystemExit(_several_nodes(config, spec, json=json))
    findings = _this_machine(config, spec)
    if bundle is not None:
        from paceline.tools.doctor.bundle import write_bundle

        left_out: list[str] = []
        print(f"written: {write_bundle(Path(bundle), findings=findings, say=left_out.append)}")
        print(
            "left out, because it may be private (README.txt in it has all of this):"
            if left_out
            else "nothing was left out"
        )
        print("\n".join(f"  {line}" for line in left_out))
        return
    print(to_json(findings) if json else describe(findings))
    raise SystemExit(1 if worst(findings) == "fail" else 0)


def _this_machine(config: Config | None, spec: LaunchSpec) -> list[Finding]:
    from paceline.tools.doctor import gpus
    from paceline.tools.doctor.machine import check_machine, check_training

    gpu_facts = gpus.read()
    folder = Path(config.run).parent if config is not None and isinstance(config.run, str) else Path("runs")
    machine = check_machine(gpu_facts, ranks=spec.ranks, folder=folder, port=spec.port)
    return [*machine, *check_training(gpu_facts, config, spec.ranks)]


def _several_nodes(config: Config | None, spec: LaunchSpec, *, json: bool) -> int:
    """One rank per node runs the checks; the first one reports."""
    from paceline.launcher.backends.ssh import read_hosts, read_ssh
    from paceline.launcher.dispatch import dispatch
    from paceline.tools.doctor import node_probe, ssh_hosts
    from paceline.tools.doctor.finding import describe, to_json, worst

    before: list[Finding] = []
    if spec.hosts:
        before = ssh_hosts.check(
            read_hosts(spec.hosts),
            ssh=read_ssh(spec.ssh or "ssh"),
            python=spec.python or sys.executable,
            folder=str(Path.cwd()),
            address=spec.address,
        )
        if worst(before) == "fail":  # a launch would fail for the same reason
            print(to_json(before) if json else describe(before))
            return 1
    request = node_probe.ProbeRequest(
        json=json,
        ranks=spec.ranks,
        device=None if config is None else config.device,
        backend=None if config is None else config.backend,
        findings=tuple(before),
    )
    return dispatch(node_probe.workload(request), node_probe.one_rank_per_node(spec), sys.argv[1:])
