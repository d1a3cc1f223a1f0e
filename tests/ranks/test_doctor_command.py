"""`paceline doctor` and `paceline explain` as a person runs them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import forked

HEALTHY = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "GLOO_", "MASTER_"))}


def test_a_healthy_machine_passes_and_nothing_is_left_behind(tmp_path: Path) -> None:
    done = forked.paceline("doctor", "--json", cwd=tmp_path, env=HEALTHY)
    report = json.loads(done.stdout)
    found = {each["check"]: each for each in report["findings"]}
    assert {"Python", "torch", "GPUs", "shared memory", "disk space", "port", "environment", "all-reduce"} <= {*found}
    assert found["all-reduce"]["status"] == "ok" and "gloo" in found["all-reduce"]["what"]
    assert done.returncode == (report["status"] == "fail"), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_failed_check_sets_the_exit_status_and_says_what_to_do(tmp_path: Path) -> None:
    done = forked.paceline("doctor", cwd=tmp_path, env={**HEALTHY, "NCCL_SOCKET_IFNAME": "absent0"})
    assert done.returncode == 1
    last = done.stdout.splitlines()
    assert "training is likely to fail" in last[-1]
    assert any(line.startswith("fail  ") and "NCCL_SOCKET_IFNAME" in line for line in last), done.stdout
    assert any(line.startswith("      fix: ") for line in last)


def test_a_machine_that_is_part_of_a_job_does_not_join_it(tmp_path: Path) -> None:
    job = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "1"}
    done = forked.paceline("doctor", "--json", cwd=tmp_path, env={**HEALTHY, **job})
    found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert found["all-reduce"]["status"] == "ok", done.stderr


def test_a_recipe_is_checked_too(tmp_path: Path) -> None:
    done = forked.paceline("doctor", "strategy=fsdp", "model.name=gtp", "--json", cwd=tmp_path, env=HEALTHY)
    found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1
    assert found["recipe"]["status"] == "fail" and "[model.unknown-name]" in found["recipe"]["what"]


def test_a_log_is_explained_and_an_unknown_failure_has_another_exit_status(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    done = forked.paceline("explain", "train.log", cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "[cuda.out-of-memory] rank 2, train.log:1")
    assert "\n  fix: " in done.stdout
    log.write_text("Traceback (most recent call last):\n  File 'a.py', line 1, in f\nKeyError: 'lr'\n")
    done = forked.paceline("explain", "train.log", "--json", cwd=tmp_path)
    assert (done.returncode, json.loads(done.stdout)["code"]) == (1, "unknown")
    assert forked.paceline("explain", "bus error in worker", cwd=tmp_path).returncode == 0


def test_a_message_may_be_longer_than_a_file_name_and_a_folder_may_have_the_name_of_a_family(tmp_path: Path) -> None:
    message = "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. " * 4
    done = forked.paceline("explain", message, cwd=tmp_path)
    assert done.stdout.startswith("[ddp.unused-parameters]"), done.stderr
    (tmp_path / "config").mkdir()
    assert "config.unknown-key" in forked.paceline("explain", "config", cwd=tmp_path).stdout
    assert "No such file: absent.log" in forked.paceline("explain", "absent.log", cwd=tmp_path).stderr
