"""A job for SLURM: what was asked for, and the batch script that asks SLURM for it.

    --slurm nodes=2,gpus=4,time=2h,partition=long

The script starts one process, `paceline launch` with the arguments of the command line less `--slurm`, on the first
node of the job. That process takes the place of the batch shell, because SLURM sends its warning before the time limit
(`--signal=B:USR2@90`) to the shell alone, and a shell would die of it. `--requeue` and `--open-mode=append` are there
for the second start of the same job; see `slurm_allocation` for who requeues it, and when.

What ends up in a line of options is held to strict patterns, and what ends up in a line of shell is quoted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import LaunchError, did_you_mean
from paceline.text import parse_pairs

WARNING = 90  # seconds before the time limit; SLURM counts in steps of about half a minute

_NUMBER = r"[1-9][0-9]{0,5}"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}"
_TIME = r"(?=.)(?:(\d{1,4})d)?(?:(\d{1,4})h)?(?:(\d{1,5})m)?(?:(\d{1,6})s)?"  # 1d12h, 90m
_CLOCK = r"(?:(\d{1,4})-)?(\d{1,3}):(\d\d):(\d\d)"  # SLURM's own: 1-12:00:00

# key: (pattern, what to write)
_VALUES = {
    "nodes": (_NUMBER, "a number such as 2"),
    "gpus": (rf"(?:{_NAME}:)?{_NUMBER}", "a number for each node such as 4, or a kind and a number such as a100:4"),
    "time": (rf"{_TIME}|{_CLOCK}", "a time such as 2h, 90m, 1d12h or 02:00:00"),
    "partition": (rf"{_NAME}(?:\+{_NAME})*", "a name, or several with + between"),
    "account": (_NAME, "a name"),
    "qos": (_NAME, "a name"),
    "cpus": (_NUMBER, "a number for each node such as 16"),
    "mem": (rf"{_NUMBER}[KMGT]?", "an amount for each node such as 64G"),
    "signal": (_NUMBER, "seconds before the time limit such as 90"),
}


@dataclass(frozen=True)
class SbatchOptions:
    """What `--slurm` asks for; empty is what the cluster gives by itself."""

    nodes: int = 1
    gpus: str = ""  # for each node
    time: str = ""  # as SLURM writes it: [days-]hours:minutes:seconds
    partition: str = ""
    account: str = ""
    qos: str = ""
    cpus: str = ""  # for each node
    mem: str = ""  # for each node
    signal: int = WARNING


def parse(text: str) -> SbatchOptions:
    """Read `nodes=2,gpus=4,time=2h`."""
    values: dict[str, str] = {}
    for key, value in parse_pairs(text):
        if key not in _VALUES:
            raise _refusal(f"--slurm {text}: there is no {key!r}.", did_you_mean(key, _VALUES))
        pattern, example = _VALUES[key]
        if value is None or not re.fullmatch(pattern, value, re.ASCII):
            raise _refusal(f"--slurm {text}: {key}={value or ''!r} can't be.", f"{key} takes {example}")
        if key in values:
            raise _refusal(f"--slurm {text}: {key} is there twice.", "say it once")
        values[key] = value
    seconds = _seconds(values.get("time", ""))
    warning = int(values.get("signal", min(WARNING, seconds // 2) if seconds else WARNING))
    if seconds is not None and warning >= seconds:
        raise _refusal(
            f"--slurm {text}: the warning would come {warning} s before the limit, and the whole job has {seconds} s.",
            "ask for more time, or for a later warning with signal=",
        )
    words = {key: value for key, value in values.items() if key not in ("nodes", "time", "signal")}
    return SbatchOptions(nodes=int(values.get("nodes", 1)), time=_clock(seconds), signal=warning, **words)


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
        raise _refusal(f"A job of {seconds} s was asked for.", "SLURM counts in minutes: ask for 1m or more")
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def batch_script(
    request: SbatchOptions, command: Sequence[str], *, name: str, workdir: str, log: str, env: Mapping[str, str]
) -> str:
    """The script that sbatch takes. `command` is what runs on the first node, `log` may hold %j for the number of the
    job and is relative to `workdir`, and `env` is for the command and everything that it starts."""
    # Options end at the first command: nothing in the quoted lines below can be taken for one.
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(request, name, workdir, log))]
    for variable, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
            raise _refusal(f"{variable!r} is no name of a variable.", "letters, digits and _ only")
        lines.append(f"export {variable}={shlex.quote(value)}")
    lines.append(f"exec {shlex.join(command)}")
    script = "\n".join(lines) + "\n"
    if "\0" in script:
        raise _refusal("The command or its environment holds a zero byte.", "no program can be given one")
    return script


def _options(request: SbatchOptions, name: str, workdir: str, log: str) -> list[str]:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", name):
        raise _refusal(f"{name!r} is no name for a job.", "letters, digits, dot, dash and _ only")
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
    """A path for a line of options, where SLURM knows quotes, backslashes and % but no shell is at work."""
    checked = path.replace(allowed, "")
    if not checked.isprintable() or set(checked) & set("\"'\\%"):
        raise _refusal(
            f"The path {path!r} can't stand in a batch script.",
            "use a folder whose whole path has no quotes, backslashes, % or line breaks",
        )
    return path


def _refusal(what: str, fix: str) -> LaunchError:
    return LaunchError("bad-slurm", what, fix=fix)
