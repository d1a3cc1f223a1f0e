"""`paceline bench comm` between real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

import forked
from paceline.plan.network_model import COLLECTIVES

RECIPE = {
    "model": {"name": "mlp", "inputs": 192, "width": 64},
    "data": {"name": "shapes", "size": 8, "length": 256},
    "batch": 8,
    "sync": {"every": 5},
}


def write_recipe(folder: Path, **changes: Any) -> str:
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, **changes}))
    return "recipe.yaml"


def test_every_collective_is_measured_between_two_ranks_with_advice_for_a_recipe(tmp_path: Path) -> None:
    files = ("--json", "out.json", "--html", "out.html")
    recipe = write_recipe(tmp_path)
    done = forked.paceline("bench", "comm", recipe, "-n", "2", "--cpu", "--sizes", "1KiB,16MiB", *files, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["version"], report["ranks"], report["backend"], report["device"]) == (1, 2, "gloo", "cpu")
    assert list(report["collectives"]) == list(COLLECTIVES)
    for name, entry in report["collectives"].items():
        assert [point["bytes"] for point in entry["points"]] == [1024, 16 << 20], entry["note"]
        assert all(1e-7 < point["seconds"] < 1 for point in entry["points"])
        assert name in done.stdout and name in (tmp_path / "out.html").read_text()
    assert done.stdout.count("fitted:") == len(COLLECTIVES)
    advice = report["advice"]
    assert "this model waits" in advice["sentence"] and advice["sentence"] in done.stdout
    dense, cast, *_ = advice["methods"]
    values = 192 * 64 + 64 + 64 * 64 + 64 + 64 * 4 + 4
    assert (dense["sent"], cast["sent"]) == (4 * values, 2 * values) and 0 < advice["compute"] < 5
    assert "written: out.json" in done.stderr and not (tmp_path / "runs").exists()


def test_larger_messages_than_the_time_allows_are_omitted_aloud(tmp_path: Path) -> None:
    options = ("--collectives", "all-reduce", "--sizes", "1KiB,256MiB", "--seconds", "0.1")
    sharded = write_recipe(tmp_path, strategy="fsdp", sync=None)
    done = forked.paceline("bench", "comm", sharded, "-n", "2", "--cpu", *options, "--json", "-", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    [entry] = report["collectives"].values()
    assert [point["bytes"] for point in entry["points"]] == [1024]
    assert entry["note"].startswith("stopped at 1 KiB: 256 MiB would exceed 0.1 s (--seconds); no fit")
    reason = "no advice: sync reduces the gradients of ddp, and fsdp communicates inside forward and backward"
    assert report["advice"] == {"sentence": reason, "compute": None, "methods": []}


def test_a_single_rank_is_refused_before_it_starts(tmp_path: Path) -> None:
    done = forked.paceline("bench", "comm", "-n", "1", "--cpu", cwd=tmp_path)
    assert done.returncode == 2 and "[launch.one-rank]" in done.stderr and "-n 2" in done.stderr


def test_invalid_options_are_refused_before_ranks_start(tmp_path: Path) -> None:
    for options, said in {
        ("--sizes", "1KB"): "Invalid size in --sizes: '1KB'",
        ("--collectives", "allreduce"): "did you mean 'all_reduce'?",
        ("--json", "no/such/folder.json"): "No such folder: no/such",
        ("no-such-recipe.yaml",): "no-such-recipe.yaml",
        ("batch=8", "--collectives", "broadcast"): "Advice for a recipe needs all_reduce",
    }.items():
        done = forked.paceline("bench", "comm", *options, cwd=tmp_path)
        assert done.returncode == 2 and said in done.stderr, done.stderr


def test_pods_of_kubernetes_measure_with_the_same_options(tmp_path: Path) -> None:
    options = ("--sizes", "1MiB", "-n", "4", "--nodes", "2", "--k8s-with", "kind=trainjob")
    done = forked.paceline("bench", "comm", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    trainer = yaml.safe_load(done.stdout)["spec"]["trainer"]
    assert (trainer["command"], trainer["args"]) == (["paceline", "bench"], ["comm", "--sizes", "1MiB"])
