"""The options and the batch script of a SLURM job, without a SLURM; tests/system has the real one."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.launcher.backends import slurm_script


@pytest.mark.parametrize(
    ("written", "time"),
    [("2h", "02:00:00"), ("90m", "01:30:00"), ("1d12h", "1-12:00:00"), ("02:00:00", "02:00:00")],
)
def test_sbatch_options_are_parsed(written: str, time: str) -> None:
    request = slurm_script.parse(
        f"nodes=2,gpus=a100:4,time={written},partition=x,account=y,qos=z,cpus=8,mem=64G,signal=60"
    )
    assert request == slurm_script.SbatchOptions(2, "a100:4", time, "x", "y", "z", "8", "64G", 60)


NO_REQUESTS = [
    *("", "nodes", "nodes=0", "nodes=2,nodes=3", "node=2", "time=", "time=2", "time=30s", "time=1m,signal=60"),
    *("signal=9,time=0m", "gpus=4 --wrap=x", "mem=lots", "cpus=٣"),
    *("partition=a\n#SBATCH --x", "account=a b", "qos=$(id)"),
]


@pytest.mark.parametrize("text", NO_REQUESTS)
def test_invalid_sbatch_options_are_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=r"launch\.bad-slurm"):
        slurm_script.parse(text)


def test_a_misspelled_option_gets_a_suggestion() -> None:
    with pytest.raises(LaunchError, match="did you mean 'partition'"):
        slurm_script.parse("partitoin=x")


def test_a_short_job_is_warned_at_half_time() -> None:
    assert slurm_script.parse("time=1m").signal == 30


def _script(command: list[str], **changes: object) -> str:
    rest: dict[str, object] = {"name": "run", "workdir": "/data/a folder", "log": "/data/run-%j.log", "env": {}}
    return slurm_script.batch_script(slurm_script.parse("nodes=2,time=1h"), command, **{**rest, **changes})  # type: ignore[arg-type]


def test_the_batch_script_is_what_people_would_write() -> None:
    assert _script(["python", "-m", "paceline", "launch", "train.py", "--name", "a b"], env={"A": "it's"}) == (
        """#!/bin/bash
#SBATCH --job-name=run
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:USR2@90
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output="/data/run-%j.log"
#SBATCH --chdir="/data/a folder"
#SBATCH --time=01:00:00
export A='it'"'"'s'
exec python -m paceline launch train.py --name 'a b'
"""
    )


def test_hostile_arguments_arrive_unchanged(tmp_path: Path) -> None:
    """One script with many arguments: each case would take a shell of its own otherwise."""
    generator = random.Random(0)
    pieces = [
        "$(touch x)",
        "`touch x`",
        "; touch x",
        "\n#SBATCH --wrap=x\n",
        "'",
        '"',
        "\\",
        "|",
        "&",
        "*",
        "~",
        "!",
        "é",
        " ",
    ]
    args = ["".join(generator.choices(pieces, k=generator.randint(1, 6))) for _ in range(1000)]
    show = [sys.executable, "-c", "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['A']]))"]
    script = _script([*show, *args], env={"A": args[0]})
    ran = subprocess.run(["bash"], input=script, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert json.loads(ran.stdout) == [args, args[0]]
    assert not list(tmp_path.iterdir())
    options = script.split("export", 1)[0]
    assert all(line.startswith("#") for line in options.splitlines())


@pytest.mark.parametrize(
    "changes",
    [
        *({"name": "a b"}, {"name": ""}, {"workdir": '/a" --wrap="x'}),
        *({"log": "/a\n#SBATCH x"}, {"log": "/a%u"}, {"log": "/a\\"}, {"env": {"A B": "1"}}, {"env": {"A": "\0"}}),
    ],
)
def test_values_that_could_end_their_line_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(LaunchError, match=r"launch\.bad-slurm"):
        _script(["true"], **changes)
