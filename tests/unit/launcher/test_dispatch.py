"""Which backend a command gets, where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from paceline.config.launch import Endpoint, LaunchSpec, NodeRange
from paceline.errors import LaunchError
from paceline.launcher import dispatch
from paceline.launcher.workload import Workload

SALLOC = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
SRUN = {
    **SALLOC, "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "0",
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
}  # fmt: skip
PET = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a"}
MASTER = Endpoint("a", 1)
CASES: list[tuple[LaunchSpec, Mapping[str, str], str | None]] = [
    (LaunchSpec(), {}, None),
    (LaunchSpec(ranks=4), {}, None),
    (LaunchSpec(hosts="a"), {}, "ssh:launch"),
    (LaunchSpec(hosts="a"), SALLOC, "ssh:launch"),
    (LaunchSpec(ray="auto"), {}, "ray:launch"),
    (LaunchSpec(slurm="nodes=2"), {}, "slurm_job:launch"),
    (LaunchSpec(slurm="nodes=2"), SALLOC, "slurm_allocation:launch"),
    (LaunchSpec(slurm="nodes=2", dry_run=True), SALLOC, "slurm_job:launch"),
    (LaunchSpec(), SALLOC, "slurm_allocation:launch"),
    (LaunchSpec(master=MASTER), SALLOC, "manual:launch"),
    (LaunchSpec(), SRUN, "manual:launch_from_environment"),
    (LaunchSpec(), PET, "manual:launch_from_environment"),
    (LaunchSpec(nodes=NodeRange(1, 2)), PET, "manual:launch_from_environment"),
    (LaunchSpec(), {**PET, "PET_NNODES": "1"}, None),
    (LaunchSpec(nodes=NodeRange(2, 2)), {}, "manual:launch"),
    (LaunchSpec(node_rank=1), {}, "manual:launch"),
    (LaunchSpec(k8s=True), {}, "kubernetes:launch"),
    (LaunchSpec(k8s_with="gpus=1"), SALLOC, "kubernetes:launch"),
]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Launches that were begun: the functions that would launch note their names instead."""
    noted: list[str | None] = []

    def note(name: str | None) -> int:
        noted.append(name)
        return 3

    for each in dispatch.BACKENDS:
        module, _, function = each.launch.partition(":")
        name = f"{module.rpartition('.')[2]}:{function}"
        monkeypatch.setattr(import_module(module), function, lambda *_, name=name: note(name))
    monkeypatch.setattr(dispatch, "launch_single_node", lambda *_: note(None))
    return noted


@pytest.mark.parametrize(("spec", "environment", "backend"), CASES)
def test_backend(
    calls: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
    spec: LaunchSpec,
    environment: Mapping[str, str],
    backend: str | None,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert dispatch.dispatch(Workload(lambda: None), spec, ["launch", "script.py"]) == 3
    assert calls == [backend]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (LaunchSpec(hosts="a", ray="auto"), "--hosts and --ray are mutually exclusive"),
        (LaunchSpec(slurm="nodes=2", ray="auto", master=MASTER), "--slurm and --ray and --master are mutually"),
        (LaunchSpec(k8s=True, hosts="a"), "--k8s and --hosts are mutually exclusive"),
        (LaunchSpec(rendezvous="etcd"), "--rdzv-backend 'etcd'"),
        (LaunchSpec(rendezvous="static"), "--node-rank"),
    ],
)
def test_options_that_exclude_each_other(calls: list[str | None], spec: LaunchSpec, words: str) -> None:
    with pytest.raises(LaunchError, match=r"launch\.bad-options") as caught:
        dispatch.dispatch(Workload(lambda: None), spec, ["launch", "script.py"])
    assert words in str(caught.value) and calls == []


@pytest.mark.parametrize(
    ("spec", "environment", "lines"),
    [
        (LaunchSpec(ranks=4), {}, ["would start 4 ranks on this machine (requested)"]),
        (
            LaunchSpec(hosts="a:4,b"),
            {},
            ["would start 4 ranks on a: ssh a ", "would start one rank per GPU on b: ssh b "],
        ),
        (
            LaunchSpec(ray="auto", ranks=4, nodes=NodeRange(2, 2)),
            {},
            ["would start 4 ranks on each of 2 nodes that Ray"],
        ),
        (LaunchSpec(ranks=2), SALLOC, ["would start 2 ranks on each of n1, n2"]),
        (LaunchSpec(ranks=2), PET, ["would start 2 ranks (requested) as node 0 of 2, with the coordinator at a:29500"]),
        (
            LaunchSpec(ranks=2, nodes=NodeRange(2, 2), node_rank=1, master=MASTER),
            {},
            ["would start 2 ranks (requested) as node 1 of 2, with the coordinator at a:1"],
        ),
    ],
)
def test_a_dry_run_says_what_would_be_started_and_starts_nothing(
    spec: LaunchSpec,
    environment: Mapping[str, str],
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    in_folder: Path,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def fail() -> None:
        raise AssertionError("the workload was run")

    assert dispatch.dispatch(Workload(fail, name="x"), replace(spec, dry_run=True, device="cpu", run="x"), []) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == len(lines) and all(line.startswith(begin) for line, begin in zip(shown, lines, strict=True)), (
        shown
    )
    assert list(in_folder.iterdir()) == []
