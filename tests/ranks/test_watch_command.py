"""`paceline watch`, `paceline report` and the page of `paceline compare`, as users call them."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml

import forked
from made_runs import make_run

SMALL: dict[str, Any] = {
    "model": {"name": "mlp", "inputs": 64, "width": 16},
    "data": {"name": "shapes", "size": 8, "channels": 1, "length": 256},
    "batch": 32,
    "train": {"max_steps": 12},
    "eval_every": 4,
    "log_every": 2,
    "device": "cpu",
    "report": True,
    "precision": "fp16",
    "profile": [4, 6],
}


@contextmanager
def watching(*words: str, cwd: Path) -> Iterator[str]:
    """The address of a page."""
    output, errors = cwd / "output", cwd / "errors"
    with output.open("wb") as out, errors.open("wb") as err:
        pid = forked.start(lambda: forked.command("watch", *words), cwd, out.fileno(), err.fileno())
    try:
        deadline = time.monotonic() + 60
        while not (text := output.read_text()).endswith("\n"):
            assert time.monotonic() < deadline and os.waitpid(pid, os.WNOHANG) == (0, 0), errors.read_text()
            time.sleep(0.02)
        yield text.strip()
    finally:
        os.kill(pid, signal.SIGINT)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0, errors.read_text()


def ask(url: str, path: str) -> Any:
    address, _, token = url.partition("?token=")
    with urlopen(Request(f"{address}{path}", headers={"Authorization": f"Bearer {token}"}), timeout=60) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.yaml").write_text(yaml.safe_dump(SMALL))
    done = forked.paceline("train", "-n", "2", "small.yaml", "run=good", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run_on_a_page(trained: Path) -> None:
    with watching("good", cwd=trained) as url:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", url)
        assert "ssh -L" in (trained / "errors").read_text()
        (run,) = ask(url, "api/runs")["runs"]
        found = ask(url, f"api/run?id={run['id']}")
        ranks = ask(url, f"api/ranks?id={run['id']}")
    assert found["head"]["state"] == "finished" and found["curves"]["loss"]["x"] == list(range(1, 13))
    assert found["curves"]["loss_scale"]["y"][0] == 65536.0 and ranks["ranks"] == [0, 1]
    about = found["about"]
    assert dict(about["environment"])["command"].endswith("train -n 2 small.yaml run=good")
    assert [profile["rank"] for profile in about["profiles"]] == [0, 1] and about["profiles"][0]["operations"]
    assert about["profiles"][0]["step"] == pytest.approx(
        sum(about["profiles"][0][part] for part in ("compute", "exposed", "idle")), rel=0.01
    )
    assert {each["check"] for each in about["checkpoints"]} == {"complete"}
    precision = next(row for row in about["recipe"] if row[0] == "precision")
    assert precision[1] == "fp16" and re.fullmatch(r"small\.yaml:\d+", precision[2])


def test_a_folder_of_runs(trained: Path) -> None:
    with watching(cwd=trained) as url:
        assert [run["name"] for run in ask(url, "api/runs")["runs"]] == ["good"]


def test_an_address_for_others_comes_with_a_warning(trained: Path) -> None:
    with watching("--host", "0.0.0.0", cwd=trained):
        assert "warning: anybody who can reach" in (trained / "errors").read_text()


def test_a_port_that_is_taken(trained: Path) -> None:
    with watching(cwd=trained) as url:
        port = url.partition("127.0.0.1:")[2].partition("/")[0]
        done = forked.paceline("watch", "--port", port, cwd=trained)
    assert done.returncode == 2 and "[launch.port-in-use]" in done.stderr


def test_a_run_writes_its_report(trained: Path) -> None:
    report = trained / "runs" / "good" / "report.html"
    assert report.read_bytes().startswith(b"<!doctype html>") and b'"state":"finished"' in report.read_bytes()


def test_a_script_writes_its_report_without_a_launcher(tmp_path: Path) -> None:
    script = (
        "import torch, paceline\n"
        "data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))\n"
        "model = torch.nn.Linear(4, 1)\n"
        "trainer = paceline.Trainer(model, criterion=torch.nn.MSELoss(), batch=8, run='alone', report=True)\n"
        "trainer.train(data, epochs=1)\n"
    )
    (tmp_path / "script.py").write_text(script)
    done = forked.script(tmp_path / "script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert b'"state":"finished"' in (tmp_path / "runs" / "alone" / "report.html").read_bytes()


def test_report(trained: Path) -> None:
    done = forked.paceline("report", "good", "-o", "page.html", cwd=trained)
    assert done.returncode == 0 and done.stdout.startswith("page.html (") and (trained / "page.html").exists()
    done = forked.paceline("report", "good", "--to", "csv", "-o", "table", cwd=trained)
    assert done.returncode == 0 and done.stdout == "table/metrics.csv\n"
    done = forked.paceline("report", "bad", cwd=trained)
    assert done.returncode == 2 and "[checkpoint.no-run]" in done.stderr


def test_compare_prints_and_writes_a_page(tmp_path: Path) -> None:
    for seed in (1, 2):
        make_run(tmp_path / "runs" / f"run-{seed}", steps=50, seed=seed)
    done = forked.paceline("compare", "run-1", "run-2", cwd=tmp_path)
    assert done.returncode == 0 and "best loss" in done.stdout and done.stdout.endswith("\ncompare.html\n")
    (tmp_path / "compare.html").unlink()
    done = forked.paceline("compare", "run-1", "run-2", "--text", cwd=tmp_path)
    assert done.returncode == 0 and "best loss" in done.stdout and not (tmp_path / "compare.html").exists()
