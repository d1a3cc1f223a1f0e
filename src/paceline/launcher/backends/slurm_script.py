"""Parses `--slurm`, and writes the batch script.

    --slurm nodes=2,gpus=4,time=2h,partition=long

The script runs the same command on the first node of the job. The command replaces the batch shell, because SLURM sends
the warning before the time limit (`--signal=B:USR2@90`) only to the shell, which would be killed by it. `--requeue` and
`--open-mode=append` are for a requeued job (see `slurm_allocation`).

Values in #SBATCH lines must match strict patterns; values in shell lines are quoted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import LaunchError, did_you_mean
from paceline.text import parse_pairs

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
