"""Programs with one mismatched collective: drawn from a seed, run on forked ranks, and judged.

A program is a Python file with a line per collective. Every rank reads the result of each, and compares it with what a
program without the mismatch gives: that is the moment at which a bad value would be used.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import random
import re
import signal
import sys
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as torch_dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from paceline import dist
from paceline.errors import WorldError
from paceline.runtime import collective_calls, environment
from paceline.runtime.network import listen
from paceline.runtime.process_group import open_store

Mode = Literal["debug", "default", "torch", "DETAIL"]
MODES: tuple[Mode, ...] = ("debug", "default", "torch", "DETAIL")
KINDS = ("operation", "shape", "dtype", "reduction", "root", "group", "order", "skipped", "extra")
OPERATIONS = ("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "barrier")
REDUCTIONS = ("SUM", "MAX", "MIN", "PRODUCT")
DTYPES = ("float32", "float64", "int32", "int64")
WITH_REDUCTION, WITH_ROOT = ("all_reduce", "reduce", "reduce_scatter"), ("broadcast", "reduce", "gather", "scatter")


@dataclass(frozen=True)
class Call:
    """A collective. Its number identifies it in all ranks, also where a rank makes it at another place."""

    number: int
    api: str  # torch_dist or dist
    operation: str
    size: int
    dtype: str
    reduction: str
    root: int
    group: tuple[int, ...]

    @property
    def signature(self) -> list[object]:
        """What other ranks have to call as well. Calls with equal ones can't be told apart."""
        values = [] if self.operation == "barrier" else [self.size, self.dtype]
        reduction = [self.reduction] * (self.operation in WITH_REDUCTION)
        return [self.operation, self.group, *values, *reduction, *[self.root] * (self.operation in WITH_ROOT)]

    def source(self) -> str:
        """A line of Python. `own`, `empty`, `read` and `group` are functions of the rank that runs it."""
        own, empty = f"own({self.number}, {self.size}, {self.dtype!r})", f"empty({self.number})"
        group, op, root = f"group=group{self.group}", f"torch_dist.ReduceOp.{self.reduction}", self.root
        calls = {
            "all_reduce": f"all_reduce({own}, {op}, {group})",
            "broadcast": f"broadcast({own}, {root}, {group})",
            "reduce": f"reduce({own}, {root}, {op}, {group})",
            "all_gather": f"all_gather({empty}, {own}, {group})",
            "gather": f"gather({own}, {empty} if rank == {root} else None, {root}, {group})",
            "scatter": f"scatter({own}, {empty} if rank == {root} else None, {root}, {group})",
            "reduce_scatter": f"reduce_scatter({own}, {empty}, {op}, {group})",
            "barrier": f"barrier({group})",
        }
        return f"begin({self!r}); {self.api}.{calls[self.operation]}; read()"


@dataclass(frozen=True)
class Program:
    seed: int
    ranks: int
    kind: str
    who: int  # the rank with the mismatch
    at: int  # place of the mismatch in the calls of the others
    calls: tuple[Call, ...]
    own: tuple[Call, ...]  # of the rank with the mismatch, instead of `replaced` ones of the others
    replaced: int

    def source(self) -> str:
        lines = []
        for place, each in enumerate(self.calls):
            if place == self.at:
                lines.append(f"if rank == {self.who}:")
                lines += [f"    {call.source()}" for call in self.own] or ["    pass"]
                others = self.calls[self.at : self.at + self.replaced]
                lines += [f"elif rank in {call.group}: {call.source()}" for call in others[:1]]
                lines += [f"if rank != {self.who} and rank in {call.group}: {call.source()}" for call in others[1:]]
            if not self.at <= place < self.at + self.replaced:
                lines.append(f"if rank in {each.group}: {each.source()}")
        return "\n".join(lines) + "\n"


def draw(seed: int) -> Program:
    generator = random.Random(seed)
    ranks = generator.choice((2, 3))
    groups = [tuple(range(ranks)), (0, 1)] + ([(1, 2), (0, 2)] if ranks == 3 else [])
    api = generator.choice(("torch_dist", "dist", "mixed"))
    calls = [_draw_call(generator, number, groups, api) for number in range(generator.randint(5, 40))]
    kind = generator.choice(KINDS)
    for attempt in itertools.count(1):
        if attempt % 100 == 0:  # it does not apply to any call of this program
            kind = generator.choice(KINDS)
        at, who = generator.randrange(len(calls)), generator.randrange(ranks)
        found = calls[at]
        if who not in found.group:
            continue
        own, replaced = [found], 1
        if kind == "operation":
            own = [replace(found, operation=generator.choice([each for each in OPERATIONS if each != found.operation]))]
        elif kind == "shape" and found.operation != "barrier":
            own = [replace(found, size=found.size + generator.choice((1, 3, 60)))]
        elif kind == "dtype" and found.operation != "barrier":
            own = [replace(found, dtype=generator.choice([each for each in DTYPES if each != found.dtype]))]
        elif kind == "reduction" and found.operation in WITH_REDUCTION:
            own = [replace(found, reduction=generator.choice([each for each in REDUCTIONS if each != found.reduction]))]
        elif kind == "root" and found.operation in WITH_ROOT:
            own = [replace(found, root=generator.choice([each for each in found.group if each != found.root]))]
        elif kind == "group" and (others := [each for each in groups if who in each and each != found.group]):
            group = generator.choice(others)
            own = [replace(found, group=group, root=found.root if found.root in group else who)]
        elif kind == "order":
            after = calls[at + 1] if at + 1 < len(calls) else found
            if after.group != found.group or after.signature == found.signature:
                continue
            own, replaced = [after, found], 2
        elif kind == "skipped":
            own = []
        elif kind == "extra":
            own, replaced = [replace(_draw_call(generator, len(calls), [found.group], api))], 0
        else:
            continue
        if not replaced or own != list(calls[at : at + replaced]):
            return Program(seed, ranks, kind, who, at, tuple(calls), tuple(own), replaced)
    raise AssertionError


def _draw_call(generator: random.Random, number: int, groups: list[tuple[int, ...]], api: str) -> Call:
    group = generator.choice(groups)
    chosen = generator.choice(("torch_dist", "dist")) if api == "mixed" else api
    operation, size = generator.choice(OPERATIONS), generator.choice((1, 4, 64, 1000))
    reduction, root = generator.choice(REDUCTIONS), generator.choice(group)
    return Call(number, chosen, operation, size, generator.choice(DTYPES), reduction, root, group)


def value(rank: int, number: int) -> int:
    return (rank + 1) * (number % 7 + 2) + number


def expected(call: Call, rank: int) -> list[int] | None:
    """What each tensor that this rank receives is filled with; None if it receives nothing."""
    values = [value(each, call.number) for each in call.group]
    if call.operation == "barrier" or (call.operation in ("reduce", "gather") and rank != call.root):
        return None
    if call.operation in WITH_REDUCTION:
        product = 1
        for each in values:
            product *= each
        return [{"SUM": sum(values), "MAX": max(values), "MIN": min(values), "PRODUCT": product}[call.reduction]]
    return values if call.operation in ("all_gather", "gather") else [value(call.root, call.number)]


@dataclass(frozen=True)
class RankResult:
    line: int = 0  # of its last call
    bad: str = ""  # the first bad value that it has read
    code: str = ""
    error: str = ""
    status: int | None = 0  # None: it had to be killed
    seconds: float = 0.0  # from the last call on


@dataclass(frozen=True)
class Result:
    program: Program
    ranks: list[RankResult]

    @property
    def outcome(self) -> str:
        if any(rank.bad for rank in self.ranks):
            return "bad value"
        if any("different-collectives" in rank.code for rank in self.ranks):
            return "caught"
        if any("Detected mismatch" in rank.error for rank in self.ranks):
            return "caught"
        if any(rank.status is not None and rank.status < 0 for rank in self.ranks):
            return "abort"
        if any(rank.status is None or "imed out" in rank.error for rank in self.ranks):
            return "hang"
        return "error" if any(rank.error for rank in self.ranks) else "silent"

    def names_both_lines(self) -> bool:
        """Whether every error has the line of the rank with the mismatch, and of one that it does not fit."""
        found = [
            set(re.findall(rf"program_{self.program.seed}\.py:(\d+)", rank.error)) for rank in self.ranks if rank.code
        ]
        others = {str(rank.line) for number, rank in enumerate(self.ranks) if number != self.program.who}
        return all(str(self.ranks[self.program.who].line) in lines and lines & others for lines in found)


def run(program: Program, mode: Mode, folder: Path, timeout: float) -> Result:
    """Run a program on forked ranks, with a store in this process."""
    path = folder / f"program_{program.seed}.py"
    path.write_text(program.source())
    listener = listen("127.0.0.1", None)
    port, processes = listener.getsockname()[1], []
    for rank in range(program.ranks):
        process = os.fork()
        if process == 0:
            _be_rank(program, mode, rank, port, path, timeout)
        processes.append(process)
    store = open_store(listener)  # after the forks, which would copy the locks of its threads
    deadline = time.monotonic() + 3 * timeout + 10
    statuses: dict[int, int | None] = {}
    while len(statuses) < len(processes):
        for process in set(processes) - statuses.keys():
            if time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                statuses[process] = None if time.monotonic() > deadline else os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    del store
    results = []
    for rank, process in enumerate(processes):
        told = path.with_suffix(f".{rank}")
        values = json.loads(told.read_text()) if told.exists() else {}
        results.append(RankResult(**values, status=statuses[process]))
    return Result(program, results)


def _be_rank(program: Program, mode: Mode, rank: int, port: int, path: Path, timeout: float) -> None:
    atexit._clear()
    told: dict[str, Any] = {"line": 0, "bad": "", "began": time.monotonic()}
    try:
        output = os.open(path.with_suffix(f".{rank}.txt"), os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        torch.set_num_threads(1)
        os.environ.update(environment.variables(environment.RankInfo(rank, program.ranks, rank, program.ranks)))
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if mode == "DETAIL":
            os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
            torch_dist.set_debug_level_from_env()
        store = PrefixStore("program", TCPStore("127.0.0.1", port, is_master=False))
        limit = timedelta(seconds=timeout)
        torch_dist.init_process_group("gloo", store=store, rank=rank, world_size=program.ranks, timeout=limit)
        every = [each.group for each in (*program.calls, *program.own)]
        world = tuple(range(program.ranks))
        groups = {each: torch_dist.new_group(list(each), timeout=limit) for each in sorted(set(every) - {world})}
        groups[world] = torch_dist.group.WORLD
        if mode == "debug":
            dist.debug(True)
        if mode in ("torch", "DETAIL"):
            collective_calls._CHECKED = 0

        exec(compile(path.read_text(), str(path), "exec"), _names(program, rank, groups, told))
    except WorldError as error:
        told |= {"code": error.code, "error": str(error)}
    except BaseException as error:
        told["error"] = f"{type(error).__name__}: {error}"
    finally:
        told["seconds"] = time.monotonic() - told.pop("began")
        path.with_suffix(f".{rank}").write_text(json.dumps(told))
        atexit._run_exitfuncs()
        os._exit(0)


def _names(program: Program, rank: int, groups: dict[tuple[int, ...], Any], told: dict[str, Any]) -> dict[str, Any]:
    """What a program may use."""
    made: list[Call] = []
    tensors: dict[str, Any] = {}

    def begin(call: Call) -> None:
        made.append(call)
        tensors.clear()
        told["line"], told["began"] = sys._getframe(1).f_lineno, time.monotonic()

    def own(number: int, size: int, dtype: str) -> torch.Tensor:
        tensors["own"] = torch.full((size,), value(rank, number), dtype=getattr(torch, dtype))
        return tensors["own"]

    def empty(number: int) -> list[torch.Tensor]:
        call = made[-1]
        fill = value(rank, number) if call.operation in ("scatter", "reduce_scatter") else 0
        shape, dtype = (call.size,), getattr(torch, call.dtype)
        tensors["list"] = [torch.full(shape, fill, dtype=dtype) for _ in call.group]
        return tensors["list"]

    def read() -> None:
        call = made[-1]
        if told["bad"] or (values := expected(call, rank)) is None:
            return
        received = tensors["list"] if call.operation in ("all_gather", "gather") else [tensors["own"]]
        found = [tensor.unique().tolist() for tensor in received]
        # No value of a call that other ranks have not made is good, and of other calls only the right one.
        if call not in program.calls or found != [[each] for each in values]:
            told["bad"] = f"call {call.number}: {found}, not {values}"

    def group(*ranks: int) -> Any:
        return groups[ranks]

    names = {each.__name__: each for each in (begin, own, empty, read, group, Call)}
    return {**names, "rank": rank, "torch_dist": torch_dist, "dist": dist}
