"""Submits, follows and requeues SLURM jobs.

`sacct` is not used, because it requires accounting. `scontrol` shows a job for some minutes after its end (`MinJobAge`,
usually five), which is enough for following it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline import log
from paceline.config.launch import LaunchSpec
from paceline.errors import LaunchError, did_you_mean
from paceline.launcher.workload import Workload
from paceline.text import parse_pairs

_POLL_SECONDS = 1.0
_PATIENCE = 60.0  # seconds in which a controller may restart, or its backup take over
_UNREACHABLE = re.compile("Unable to contact slurm|timed out|Unexpected message received|standby mode")
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "DEADLINE"}
_ENDED |= {"BOOT_FAIL", "REVOKED"}
_LOGS = Path("runs")


def launch(workload: Workload, spec: LaunchSpec, command: Sequence[str]) -> int:
    """Submit the command as a batch job and follow it; with `--dry-run`, print the script."""
    options = parse(spec.slurm or "")
    name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(spec.run or "paceline").name) or "paceline"
    log_file = str(_LOGS / f"{name}-slurm-%j.log")
    own = len(command) - workload.script_arguments
    words = [word for index, word in enumerate(command) if word != "--dry-run" or index >= own]
    argv = [sys.executable, "-P", "-m", "paceline", *words]
    script = batch_script(options, argv, name=name, workdir=str(Path.cwd()), log=log_file, env=spec.env)
    if spec.dry_run:
        print(script, end="")  # noqa: T201
        return 0
    _LOGS.mkdir(exist_ok=True)
    job = submit(script)
    log.info(f"job {job}: submitted; cancel it with `scancel {job}`")
    return follow(job, Path(log_file.replace("%j", job)))


def submit(script: str) -> str:
    """Submit a batch script; returns the job id."""
    answer = _run(["sbatch", "--parsable"], script)
    job = answer.strip().split(";")[0]  # the name of the cluster may follow
    if not re.fullmatch(r"[0-9]+", job):
        raise _slurm_error(f"Expected a job id from sbatch, got {answer!r}.")
    return job


def requeue(job: str) -> None:
    """Requeue a running job. SLURM terminates what is left of it, including this process."""
    _run(["scontrol", "requeue", job], patience=_PATIENCE)


def end_steps(job: str, names: Sequence[str]) -> None:
    """Kill the running steps of a job with these names."""
    listed = _run(["squeue", "-h", "-s", "-j", job, "-o", "%i %j"])
    steps = [line.split()[0] for line in listed.splitlines() if line.split()[-1] in names]
    if steps:
        _run(["scancel", "--signal=KILL", *steps])


def is_preempted(job: str) -> bool:
    """Whether the job is being preempted (within its grace time)."""
    return job_info(job, _PATIENCE).get("PreemptTime", "None") not in ("None", "N/A", "Unknown")


def job_info(job: str, patience: float = 0.0) -> dict[str, str]:
    """The fields of `scontrol show job`."""
    # The first occurrence of a field counts: fields with arbitrary content, such as Command, come last.
    pairs = re.findall(r"(\w+)=(\S*)", _run(["scontrol", "--oneliner", "show", "job", job], patience=patience))
    return dict(reversed(pairs))


def follow(job: str, log_file: Path) -> int:
    """Print state changes and the log of a job until it ends; returns its exit status. Ctrl-C leaves it running."""
    shown, reported = 0, ""
    with suppress(KeyboardInterrupt):
        while True:
            try:
                info = job_info(job)
            except LaunchError as error:
                if "Invalid job id" in error.what:
                    raise
                info = {}  # the controller is restarting; the job keeps running
            shown = _show_from(log_file, shown)
            state = _describe(info) if info else "SLURM is not reachable; retrying"
            if state != reported:
                log.info(f"job {job}: {state}")
            reported = state
            if info and info["JobState"] in _ENDED:
                _show_from(log_file, shown)
                return _status(info)
            time.sleep(_POLL_SECONDS)
    log.info(f"\njob {job} keeps running (log: {log_file}); cancel it with `scancel {job}`")
    return 130


def _describe(info: dict[str, str]) -> str:
    state = info["JobState"].lower()
    if state == "pending":
        requeued = ", requeued" if info.get("Restarts", "0") != "0" else ""
        return f"pending ({info.get('Reason', 'None')}){requeued}"
    return f"running on {info['NodeList']}" if state == "running" else state.replace("_", " ")


def _status(info: dict[str, str]) -> int:
    """The exit status for the shell; not 0 for a job that SLURM ended, even if its exit code is 0:0."""
    code, _, number = info.get("ExitCode", "0:0").partition(":")
    status = 128 + int(number) if number not in ("", "0") else int(code)
    return status or (0 if info["JobState"] == "COMPLETED" else 1)


def _show_from(log_file: Path, start: int) -> int:
    """Print the log from byte `start`; returns its current end."""
    with suppress(FileNotFoundError), log_file.open("rb") as file:
        file.seek(start)
        while chunk := file.read(65536):
            start += len(chunk)
            while chunk:
                chunk = chunk[os.write(1, chunk) :]
    return start


def _run(argv: Sequence[str], stdin: str = "", *, patience: float = 0.0) -> str:
    """`patience`: seconds in which the command is tried again while the controller does not answer."""
    end = time.monotonic() + patience
    while True:
        try:
            return _run_once(argv, stdin)
        except LaunchError as error:
            if not _UNREACHABLE.search(error.what) or time.monotonic() >= end:
                raise
            log.info("SLURM is not reachable; retrying")
        time.sleep(_POLL_SECONDS)


def _run_once(argv: Sequence[str], stdin: str) -> str:
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, start_new_session=True)
    except FileNotFoundError:
        raise LaunchError("no-slurm", f"Program not found: {argv[0]}.") from None
    if done.returncode:
        reason = done.stderr.strip() or f"exit status {done.returncode}"
        raise _slurm_error(f"{' '.join(argv[:2])} failed: {reason}")
    return done.stdout


def _slurm_error(what: str) -> LaunchError:
    return LaunchError("slurm-refused", what)


WARNING = 90  # seconds before the time limit; SLURM checks about every 30 s

_NUMBER = r"[1-9][0-9]{0,5}"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}"
_TIME = r"(?=.)(?:(\d{1,4})d)?(?:(\d{1,4})h)?(?:(\d{1,5})m)?(?:(\d{1,6})s)?"  # 1d12h, 90m
_CLOCK = r"(?:(\d{1,4})-)?(\d{1,3}):(\d\d):(\d\d)"  # SLURM's own: 1-12:00:00

# key: (pattern, expected value)
_VALUES = {
    "nodes": (_NUMBER, "a number, e.g. 2"),
    "gpus": (rf"(?:{_NAME}:)?{_NUMBER}", "GPUs per node, e.g. 4 or a100:4"),
    "time": (rf"{_TIME}|{_CLOCK}", "a duration, e.g. 2h, 90m, 1d12h or 02:00:00"),
    "partition": (rf"{_NAME}(?:\+{_NAME})*", "a name, or several separated by +"),
    "account": (_NAME, "a name"),
    "qos": (_NAME, "a name"),
    "cpus": (_NUMBER, "CPUs per node, e.g. 16"),
    "mem": (rf"{_NUMBER}[KMGT]?", "memory per node, e.g. 64G"),
    "signal": (_NUMBER, "seconds before the time limit, e.g. 90"),
}


@dataclass(frozen=True)
class SbatchOptions:
    """The values of `--slurm`; empty: the default of the cluster."""

    nodes: int = 1
    gpus: str = ""  # per node
    time: str = ""  # [days-]hours:minutes:seconds
    partition: str = ""
    account: str = ""
    qos: str = ""
    cpus: str = ""  # per node
    mem: str = ""  # per node
    signal: int = WARNING


def parse(text: str) -> SbatchOptions:
    """Parse `nodes=2,gpus=4,time=2h`."""
    values: dict[str, str] = {}
    for key, value in parse_pairs(text):
        if key not in _VALUES:
            raise _invalid(f"Unknown key {key!r} in --slurm {text}.", did_you_mean(key, _VALUES))
        pattern, example = _VALUES[key]
        if value is None or not re.fullmatch(pattern, value, re.ASCII):
            raise _invalid(f"Invalid value in --slurm {text}: {key}={value or ''!r}.", f"expected {example}")
        if key in values:
            raise _invalid(f"Duplicate key {key!r} in --slurm {text}.", "pass it once")
        values[key] = value
    seconds = _seconds(values.get("time", ""))
    warning = int(values.get("signal", min(WARNING, seconds // 2) if seconds else WARNING))
    if seconds is not None and warning >= seconds:
        raise _invalid(
            f"--slurm {text}: signal={warning} is not shorter than the time limit of {seconds} s.",
            "increase time, or decrease signal",
        )
    rest = {key: value for key, value in values.items() if key not in ("nodes", "time", "signal")}
    return SbatchOptions(nodes=int(values.get("nodes", 1)), time=_clock(seconds), signal=warning, **rest)


def _seconds(time: str) -> int | None:
    if not time:
        return None
    match = re.fullmatch(_CLOCK, time) or re.fullmatch(_TIME, time)
    assert match is not None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _clock(seconds: int | None) -> str:
    if seconds is None:
        return ""
    if seconds < 60:
        raise _invalid(f"Time limit of {seconds} s is too short.", "pass at least 1m: SLURM counts in minutes")
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def batch_script(
    request: SbatchOptions, command: Sequence[str], *, name: str, workdir: str, log: str, env: Mapping[str, str]
) -> str:
    """`command` runs on the first node with the variables in `env`. `log` is relative to `workdir`; %j in it is the job
    id."""
    # sbatch stops reading options at the first command, so the quoted lines below cannot contain any.
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(request, name, workdir, log))]
    for variable, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
            raise _invalid(f"Invalid environment variable: {variable!r}.", "use letters, digits and _ only")
        lines.append(f"export {variable}={shlex.quote(value)}")
    lines.append(f"exec {shlex.join(command)}")
    script = "\n".join(lines) + "\n"
    if "\0" in script:
        raise _invalid("The command or its environment contains NUL.", "remove the NUL character")
    return script


def _options(request: SbatchOptions, name: str, workdir: str, log: str) -> list[str]:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", name):
        raise _invalid(f"Invalid job name: {name!r}.", "use letters, digits, dots, dashes and _ only")
    options = [
        f"--job-name={name}",
        f"--nodes={request.nodes}",
        "--ntasks-per-node=1",
        f"--signal=B:USR2@{request.signal}",
        "--requeue",
        "--open-mode=append",
        f'--output="{_path(log, "%j")}"',
        f'--chdir="{_path(workdir)}"',
    ]
    wanted = {
        "gpus-per-node": request.gpus,
        "time": request.time,
        "partition": request.partition.replace("+", ","),
        "account": request.account,
        "qos": request.qos,
        "cpus-per-task": request.cpus,
        "mem": request.mem,
    }
    return options + [f"--{option}={value}" for option, value in wanted.items() if value]


def _path(path: str, allowed: str = "") -> str:
    """A path in an #SBATCH line, in which SLURM interprets quotes, backslashes and %."""
    checked = path.replace(allowed, "")
    if not checked.isprintable() or set(checked) & set("\"'\\%"):
        raise _invalid(
            f"Path cannot be used in a batch script: {path!r}.",
            "use a directory whose path contains no quotes, backslashes, % or line breaks",
        )
    return path


def _invalid(what: str, fix: str) -> LaunchError:
    return LaunchError("bad-slurm", what, fix=fix)
