"""Checks environment variables that change distributed training; variables.toml next to this file lists them.

Most are judged by the patterns there, and some by the functions in `JUDGES`, which compare a value with the machine.
Only variables in the list are looked at, and values that may contain a password are never shown.
"""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from paceline.text import plural, shorten
from paceline.tools.doctor import limits
from paceline.tools.doctor.finding import ORDER, Finding, Status

_CHECK = "environment"
_SHOWN = 100  # characters of a value
_MAX_THREADS, _MAX_SOCKETS = 16, 64  # NCCL's limits for a connection
_SOCKET_THREADS = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
_HIDE_ALL = ("", "-1", "NoDevFiles")  # the last one is SLURM's, for a job without GPUs
_CUDA_LIBRARY = re.compile(r"lib(cudart|cublas(Lt)?|cudnn\w*|nccl|nvJitLink)\.so")


@dataclass(frozen=True)
class VariableFacts:
    environment: Mapping[str, str]
    interfaces: Collection[str]
    gpus: int  # of this machine, whether visible or not
    ranks: int  # on this machine
    cores: float = field(default_factory=lambda: min(limits.read_cores()))
    has_infiniband: bool = False
    several_hosts: bool = False


@dataclass(frozen=True)
class VariableRule:
    """A table of variables.toml, which describes the fields."""

    names: tuple[str, ...]
    does: str
    judge: str = ""
    accepts: str = ".*"
    rejected: Status = "warn"
    otherwise: str = ""
    status: Status = "ok"
    value: str = ".*"
    only: str = ""
    unless: tuple[str, ...] = ()
    why: str = ""
    fix: str = "unset {names}"
    hidden: bool = False
    is_set_when_empty: bool = False


class Assessment(NamedTuple):
    """Empty texts: those of the rule."""

    status: Status
    seen: str = ""
    why: str = ""
    fix: str = ""


def check(facts: VariableFacts) -> list[Finding]:
    findings, seen = [], set[str]()
    for rule in rules():
        names = [
            name
            for name, value in sorted(facts.environment.items())
            if any(fnmatchcase(name, pattern) for pattern in rule.names)
            and name not in seen
            and (value or rule.is_set_when_empty)
        ]
        if names:
            seen.update(names)
            findings.append(_finding(rule, names, facts))
    return findings or [Finding(_CHECK, "ok", "no variable is set that changes distributed training")]


@cache
def rules() -> tuple[VariableRule, ...]:
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return tuple(VariableRule(tuple(names.split()), **table) for names, table in tables.items())


def _finding(rule: VariableRule, names: list[str], facts: VariableFacts) -> Finding:
    status, seen, why, fix = _assess(rule, names, facts)
    shown = names if rule.hidden else [f"{name}={_short(facts.environment[name])}" for name in names]
    what = f"{', '.join(shown)}: {seen or rule.does}"
    if status == "ok":
        return Finding(_CHECK, status, what)
    return Finding(_CHECK, status, what, why or rule.why, (fix or rule.fix).replace("{names}", " ".join(names)))


def _short(value: str) -> str:
    return shorten(value if value.isprintable() else repr(value), _SHOWN)


def _assess(rule: VariableRule, names: list[str], facts: VariableFacts) -> Assessment:
    if any(name in facts.environment for name in rule.unless) or (rule.only and not getattr(facts, rule.only)):
        return Assessment("ok")
    if rule.judge:
        return max((JUDGES[rule.judge](name, facts) for name in names), key=lambda each: ORDER.index(each.status))
    values = [facts.environment[name] for name in names]
    if not all(re.fullmatch(rule.accepts, value, re.DOTALL) for value in values):
        return Assessment(rule.rejected, "invalid value", rule.otherwise)
    return Assessment(rule.status if any(re.fullmatch(rule.value, value, re.DOTALL) for value in values) else "ok")


def _integer(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 10 else None


def _nccl_interfaces(name: str, facts: VariableFacts) -> Assessment:
    """`eth` is a prefix, `=eth0` a name; `^` before a list excludes it."""
    value = facts.environment[name]
    excludes, names = value.startswith("^"), value.removeprefix("^")
    listed = tuple(part.partition(":")[0] for part in names.removeprefix("=").split(",") if part)
    used = [
        each
        for each in sorted(facts.interfaces)
        if (each in listed if names.startswith("=") else each.startswith(listed)) != excludes
    ]
    if not used:
        return Assessment("fail", f"no interface matches: this machine has {_joined(facts.interfaces)}")
    if facts.several_hosts and used == ["lo"]:
        return Assessment("fail", "lo does not reach other hosts")
    if facts.several_hosts and excludes and "lo" in used:
        seen = "lo is not excluded, and NCCL uses the first interface"
        return Assessment("warn", seen, fix=f"export {name}={value},lo")
    return Assessment("ok", f"NCCL uses {_joined(used)}")


def _gloo_interfaces(name: str, facts: VariableFacts) -> Assessment:
    names = facts.environment[name].split(",")
    if missing := [each for each in names if each not in facts.interfaces]:
        return Assessment("fail", f"no interface {_joined(missing)}: this machine has {_joined(facts.interfaces)}")
    if facts.several_hosts and "lo" in names:
        return Assessment("fail", "lo does not reach other hosts")
    return Assessment("ok")


def _visible_devices(name: str, facts: VariableFacts) -> Assessment:
    value, total = facts.environment[name].strip(), plural(facts.gpus, "GPU")
    chosen = [each.strip() for each in value.split(",")]
    if facts.gpus == 0:
        return Assessment("ok", "no GPU: training uses the CPU")
    if value in _HIDE_ALL:
        return Assessment("warn", f"hides {total}", "training uses the CPU", f"unset {name}")
    if len(set(chosen)) < len(chosen):
        return Assessment("fail", "a GPU is repeated")
    # A GPU may also be chosen by its UUID: GPU-… or MIG-…
    numbers = [each for each in chosen if not each.startswith(("GPU-", "MIG-"))]
    if invalid := [each for each in numbers if _integer(each) not in range(facts.gpus)]:
        return Assessment("fail", f"invalid: {_joined(invalid)}; this machine has {total}, counted from 0")
    return Assessment("ok", f"{len(chosen)} of {total}")


def _threads(name: str, facts: VariableFacts) -> Assessment:
    threads = _integer(facts.environment[name].partition(",")[0].strip())  # a list is for nested parallel regions
    share = max(1, int(facts.cores) // facts.ranks)
    fix = f"export {name}={share}"
    if not threads:
        return Assessment("warn", "invalid value", "OpenMP and MKL ignore it", fix)
    if threads <= share:
        return Assessment("ok")
    return Assessment("warn", f"{plural(facts.ranks, 'rank')} on {facts.cores:g} cores: {share} is enough", fix=fix)


def _socket_threads(name: str, facts: VariableFacts) -> Assessment:
    threads, sockets = (_integer(facts.environment.get(each) or "1") for each in _SOCKET_THREADS)
    if threads is None or sockets is None:
        return Assessment("warn", "invalid value", "NCCL reads a number: any word counts as 0")
    if threads <= _MAX_THREADS and threads * sockets <= _MAX_SOCKETS:
        return Assessment("ok")
    return Assessment("warn", f"at most {_MAX_THREADS} threads, and {_MAX_SOCKETS} sockets in all of them together")


def _listed_paths(name: str, facts: VariableFacts) -> Assessment:
    seen = _PATHS[name](facts.environment[name])
    return Assessment("warn" if seen else "ok", seen)


def _joined(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"


JUDGES: Mapping[str, Callable[[str, VariableFacts], Assessment]] = {
    "gloo_interfaces": _gloo_interfaces,
    "listed_paths": _listed_paths,
    "nccl_interfaces": _nccl_interfaces,
    "socket_threads": _socket_threads,
    "threads": _threads,
    "visible_devices": _visible_devices,
}


def _cuda_libraries(library_path: str) -> str:
    """Not in this Python environment, where torch's own are."""
    found = []
    for folder in map(Path, filter(None, library_path.split(":"))):
        with suppress(OSError):  # missing or not readable
            if any(_CUDA_LIBRARY.match(path.name) for path in folder.iterdir()):
                found += [str(folder)] * (not folder.resolve().is_relative_to(sys.prefix))
    return f"CUDA libraries in {_joined(found)}" if found else ""


def _shadowed_packages(python_path: str) -> str:
    folders = [each for each in python_path.split(":") if each]
    installed = [each for each in sys.path if each not in folders]
    found = []
    for package in ("torch", "paceline"):
        first, second = PathFinder.find_spec(package, folders), PathFinder.find_spec(package, installed)
        if first and second and first.origin != second.origin:
            found.append(first.origin or package)
    return f"another {_joined(found)}" if found else ""


def _missing_libraries(preload: str) -> str:
    # A name without a slash is searched by the loader.
    found = [each for each in re.split(r"[\s:]+", preload) if "/" in each and not os.access(each, os.R_OK)]
    return f"no file {_joined(found)}" if found else ""


_PATHS = {"LD_LIBRARY_PATH": _cuda_libraries, "PYTHONPATH": _shadowed_packages, "LD_PRELOAD": _missing_libraries}
