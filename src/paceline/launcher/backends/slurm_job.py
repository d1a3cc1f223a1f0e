"""A job of SLURM from outside: submit it, follow it, ask for its second start.

Only `sbatch` and `scontrol` are used. `sacct`, which knows more, is not there on clusters without accounting; scontrol
knows a job for some minutes after its end (`MinJobAge`, usually five), which is enough for somebody who follows it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paceline import log
from paceline.config.launch import LaunchSpec
from paceline.errors import LaunchError
from paceline.launcher.backends import slurm_script
from paceline.launcher.workload import Workload

_LOOK_SECONDS = 1.0
_OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "DEADLINE"}
_OVER |= {"BOOT_FAIL", "REVOKED"}
_LOGS = Path("runs")


def launch(workload: Workload, spec: LaunchSpec, command: Sequence[str]) -> int:
    """Submit the command as a batch job and follow it; with `--dry-run`, show the script."""
    options = slurm_script.parse(spec.slurm or "")
    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(spec.run or "paceline").name) or "paceline"
    log_file = str(_LOGS / f"{name}-slurm-%j.log")
    own = len(command) - workload.script_arguments
    words = [word for index, word in enumerate(command) if word != "--dry-run" or index >= own]
    argv = [sys.executable, "-P", "-m", "paceline", *words]
    script = slurm_script.batch_script(options, argv, name=name, workdir=str(Path.cwd()), log=log_file, env=spec.env)
    if spec.dry_run:
        print(script, end="")  # noqa: T201
        return 0
    _LOGS.mkdir(exist_ok=True)
    job = submit(script)
    log.info(f"job {job}: submitted; {shlex.join(['scancel', job])} ends it")
    return follow(job, Path(log_file.replace("%j", job)))


def submit(script: str) -> str:
    """Hand a batch script to SLURM; returns the number of the job."""
    answer = _ask(["sbatch", "--parsable"], script)
    job = answer.strip().split(";")[0]  # a cluster's name may follow
    if not re.fullmatch(r"[0-9]+", job):
        raise _refusal(f"sbatch answered {answer!r} where the number of a job was expected.")
    return job


def requeue(job: str) -> None:
    """Put the running job back into the queue. SLURM then ends what is left of it, this process as well."""
    _ask(["scontrol", "requeue", job])


def end_steps(job: str, names: Sequence[str]) -> None:
    """End the steps of a job that still run under these names."""
    listed = _ask(["squeue", "-h", "-s", "-j", job, "-o", "%i %j"])
    steps = [line.split()[0] for line in listed.splitlines() if line.split()[-1] in names]
    if steps:
        _ask(["scancel", "--signal=KILL", *steps])


def is_preempted(job: str) -> bool:
    """Whether SLURM is about to take the job's nodes for another job (within its grace time)."""
    return look(job).get("PreemptTime", "None") not in ("None", "N/A", "Unknown")


def look(job: str) -> dict[str, str]:
    """What SLURM knows of a job, by its own names."""
    # The first of each field counts: those that can hold anything, command and folders, come last.
    pairs = re.findall(r"(\w+)=(\S*)", _ask(["scontrol", "--oneliner", "show", "job", job]))
    return dict(reversed(pairs))


def follow(job: str, log_file: Path) -> int:
    """Show a job's changes and its log until it is over; returns its exit status. Ctrl-C leaves the job running."""
    try:
        return _follow(job, log_file)
    except KeyboardInterrupt:
        log.info(f"\njob {job} goes on; its log is {log_file}; `scancel {job}` ends it")
        return 130


def _follow(job: str, log_file: Path) -> int:
    shown, reported = 0, ""
    while True:
        try:
            seen = look(job)
        except LaunchError as error:
            if "Invalid job id" in error.what:
                raise
            seen = {}  # a controller that restarts: the job does not mind
        shown = _show_from(log_file, shown)
        state = _describe(seen) if seen else "SLURM does not answer; trying again"
        if state != reported:
            log.info(f"job {job}: {state}")
        reported = state
        if seen and seen["JobState"] in _OVER:
            _show_from(log_file, shown)
            return _status(seen)
        time.sleep(_LOOK_SECONDS)


def _describe(seen: dict[str, str]) -> str:
    state = seen["JobState"].lower()
    if state == "pending":
        again = ", to start again" if seen.get("Restarts", "0") != "0" else ""
        return f"pending ({seen.get('Reason', 'None')}){again}"
    return f"running on {seen['NodeList']}" if state == "running" else state.replace("_", " ")


def _status(seen: dict[str, str]) -> int:
    """As a shell tells it. A job that SLURM ended may well have 0:0, which would be a lie."""
    code, _, number = seen.get("ExitCode", "0:0").partition(":")
    status = 128 + int(number) if number not in ("", "0") else int(code)
    return status or (0 if seen["JobState"] == "COMPLETED" else 1)


def _show_from(log_file: Path, start: int) -> int:
    """Show what the log holds from there on; returns where it ends now."""
    with suppress(FileNotFoundError), log_file.open("rb") as file:
        file.seek(start)
        while chunk := file.read(65536):
            start += len(chunk)
            while chunk:
                chunk = chunk[os.write(1, chunk) :]
    return start


def _ask(argv: Sequence[str], stdin: str = "") -> str:
    try:
        answer = subprocess.run(argv, input=stdin, capture_output=True, text=True, start_new_session=True)
    except FileNotFoundError:
        raise LaunchError(
            "no-slurm",
            f"There is no {argv[0]} on this machine.",
            why="SLURM's commands start and follow a job, and they are on a cluster's login nodes only",
            fix="run the command there; --dry-run shows the batch script anywhere",
        ) from None
    if answer.returncode:
        reason = answer.stderr.strip() or f"exit status {answer.returncode}"
        raise _refusal(f"{' '.join(argv[:2])} failed: {reason}")
    return answer.stdout


def _refusal(what: str) -> LaunchError:
    return LaunchError("slurm-refused", what, fix="the words are SLURM's own; `sinfo` shows what the cluster offers")
