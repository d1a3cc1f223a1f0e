"""A SLURM job that is followed, with canned answers of scontrol; tests/system has the real one."""

from __future__ import annotations

import json
import os
import random
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.launcher.backends import slurm_job


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `scontrol` shows the files 1, 2, ... one after the other, the last for ever."""
    command = tmp_path / "scontrol"
    command.write_text(
        '#!/bin/sh\ncd "$(dirname "$0")"\nn=$(cat count 2>/dev/null || echo 1)\ncat "$n"\n'
        "[ -e $((n + 1)) ] && echo $((n + 1)) >count\nexit 0\n"
    )
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_job, "_POLL_SECONDS", 0.0)
    return tmp_path


def test_a_job_is_followed_through_a_requeue_to_its_exit_status(
    answers: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    states = [
        "JobState=PENDING Reason=Resources NodeList=(null) Restarts=0 ExitCode=0:0",
        "JobState=RUNNING Reason=None ReqNodeList=x NodeList=a,b Restarts=0 ExitCode=0:0 Command=JobState=FAILED",
        "JobState=PENDING Reason=BeginTime NodeList=(null) Restarts=1 ExitCode=0:0",
        "JobState=FAILED Reason=NonZeroExitCode NodeList=a,b Restarts=1 ExitCode=3:0",
    ]
    for number, state in enumerate(states, start=1):
        (answers / str(number)).write_text(f"JobId=7 JobName=run {state}\n")
    (answers / "log").write_text("step 1\n")
    assert slurm_job.follow("7", answers / "log") == 3
    shown = capfd.readouterr()
    assert shown.out == "step 1\n"
    assert shown.err.splitlines() == [
        "job 7: pending (Resources)",
        "job 7: running on a,b",
        "job 7: pending (BeginTime), requeued",
        "job 7: failed",
    ]


@pytest.mark.parametrize(
    ("state", "status"), [("COMPLETED ExitCode=0:0", 0), ("CANCELLED ExitCode=0:0", 1), ("TIMEOUT ExitCode=0:15", 143)]
)
def test_a_job_that_slurm_ended_does_not_count_as_done(answers: Path, state: str, status: int) -> None:
    (answers / "1").write_text(f"JobId=7 JobState={state}\n")
    assert slurm_job.follow("7", answers / "no log") == status


def test_an_interrupt_leaves_the_job_running_and_says_how_to_end_it(
    answers: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    (answers / "1").write_text("JobId=7 JobState=RUNNING NodeList=a\n")
    monkeypatch.setattr(slurm_job.time, "sleep", interrupt)
    assert slurm_job.follow("7", answers / "log") == 130
    assert "scancel 7" in capfd.readouterr().err


def test_a_machine_without_slurm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"launch\.no-slurm"):
        slurm_job.submit("#!/bin/bash\n")


def test_a_job_is_requeued_when_the_controller_answers_again(answers: Path, capfd: pytest.CaptureFixture[str]) -> None:
    down = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    (answers / "scontrol").write_text(
        f'#!/bin/sh\ncd "$(dirname "$0")"\n[ -e down ] && rm down && {{ {down}; }}\necho "$*" >told\n'
    )
    (answers / "down").touch()
    slurm_job.requeue("7")
    assert (answers / "told").read_text() == "requeue 7\n"
    assert capfd.readouterr().err == "SLURM is not reachable; retrying\n"


def test_a_refused_requeue_is_an_error_at_once(answers: Path) -> None:
    (answers / "scontrol").write_text("#!/bin/sh\necho 'Invalid job id specified for job 7' >&2; exit 1\n")
    with pytest.raises(LaunchError, match=r"(?s)launch\.slurm-refused.*Invalid job id"):
        slurm_job.requeue("7")


@pytest.mark.parametrize(
    ("written", "time"), [("2h", "02:00:00"), ("90m", "01:30:00"), ("1d12h", "1-12:00:00"), ("02:00:00", "02:00:00")]
)
def test_sbatch_options_are_parsed(written: str, time: str) -> None:
    request = slurm_job.parse(
        f"nodes=2,gpus=a100:4,time={written},partition=x,account=y,qos=z,cpus=8,mem=64G,signal=60"
    )
    assert request == slurm_job.SbatchOptions(2, "a100:4", time, "x", "y", "z", "8", "64G", 60)


NO_REQUESTS = [
    *("", "nodes", "nodes=0", "nodes=2,nodes=3", "node=2", "time=", "time=2", "time=30s", "time=1m,signal=60"),
    *("signal=9,time=0m", "gpus=4 --wrap=x", "mem=lots", "cpus=٣"),
    *("partition=a\n#SBATCH --x", "account=a b", "qos=$(id)"),
]


@pytest.mark.parametrize("text", NO_REQUESTS)
def test_invalid_sbatch_options_are_refused(text: str) -> None:
    with pytest.raises(LaunchError, match=r"launch\.bad-slurm"):
        slurm_job.parse(text)


def test_a_misspelled_option_gets_a_suggestion() -> None:
    with pytest.raises(LaunchError, match="did you mean 'partition'"):
        slurm_job.parse("partitoin=x")


def test_a_short_job_is_warned_at_half_time() -> None:
    assert slurm_job.parse("time=1m").signal == 30


def _script(command: list[str], **changes: object) -> str:
    rest: dict[str, object] = {"name": "run", "workdir": "/data/a folder", "log": "/data/run-%j.log", "env": {}}
    return slurm_job.batch_script(slurm_job.parse("nodes=2,time=1h"), command, **{**rest, **changes})  # type: ignore[arg-type]


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
