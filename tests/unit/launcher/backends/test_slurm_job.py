"""A SLURM job that is followed, with canned answers of scontrol; tests/system has the real one."""

from __future__ import annotations

import os
import stat
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
    ("state", "status"),
    [("COMPLETED ExitCode=0:0", 0), ("CANCELLED ExitCode=0:0", 1), ("TIMEOUT ExitCode=0:15", 143)],
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
