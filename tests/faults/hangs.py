"""Thirteen kinds of hang, each drawn from its number, and what the launcher has to say of each.

    hangs.run(hangs.draw("sleep", 17), folder)     # a Result

What a rank does is in hanging.py, which also writes down what is true. The launcher is forked from this process, in
which torch and paceline should be imported; it is killed, with all of its processes, as soon as its report is there.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nodes import Launcher, launchers, reserve_ports
from system import namespaces

SCRIPT = Path(__file__).with_name("hanging.py")
DEADLINE = 60.0  # seconds for a report, from the start

KINDS = (
    "sleep", "busy", "gil", "sigstop", "skipped", "extra", "reordered", "left", "worker", "nobody-waits", "lock",
    "disk", "network",
)  # fmt: skip
_MISMATCHES = ("skipped", "extra", "reordered")
_ANYWHERE = ("sleep", "busy", "gil", "sigstop", "lock")


@dataclass(frozen=True)
class Plan:
    """What happens in one run."""

    kind: str
    number: int
    layout: str
    ranks: int
    victims: tuple[int, ...]
    step: int  # in which it happens
    site: str = "callback"  # or forward, data
    way: str = ""  # of a data worker
    workers: int = 0
    operations: tuple[str, ...] = ()
    pause: float = 0.0  # seconds in each step
    plain: bool = False  # a script without paceline
    timeout: float = 1800.0  # of its collectives
    disk: str = ""
    interface: str = ""

    @property
    def data_ranks(self) -> int:
        return self.ranks if self.layout in ("ddp", "fsdp") else 1


@dataclass
class Result:
    kind: str
    number: int
    rank: bool = False  # the right one is blamed
    collective: bool = False  # and that which others wait in is named
    lines: bool = False  # of the rank at fault, and of one that waits
    seconds: float | None = None  # from the fault to the report
    limit: float | None = None  # that was exceeded
    text: str = ""
    problem: str = ""

    @property
    def is_right(self) -> bool:
        return self.rank and self.collective and self.lines


def draw(kind: str, number: int, plain: bool = False) -> Plan:
    chance = random.Random(f"{kind} {number}")
    layouts = {"left": ("ddp", "fsdp", "tp"), "worker": ("ddp", "fsdp"), "nobody-waits": ("ddp", "fsdp")}
    layout = chance.choice(("ddp", "fsdp") if plain else layouts.get(kind, ("ddp", "fsdp", "tp", "pp")))
    ranks = 2 if kind == "network" or chance.random() < 0.8 else 4
    site = "callback"
    if kind in _ANYWHERE:
        site = chance.choice(("callback", "forward", "data") if layout in ("ddp", "fsdp") else ("callback", "forward"))
    if kind == "nobody-waits":
        site = "data"
    # Of types that the layout itself does not use: gloo takes an operation of the same type for the missing one, and
    # then ranks compute with wrong values or crash.
    operations = ("barrier", "all_to_all") if layout == "fsdp" else ("barrier", "all_to_all", "all_gather")
    victim = 1 if kind == "network" else chance.randrange(ranks)
    return Plan(
        kind, number, layout, ranks,
        victims=tuple(range(ranks)) if kind == "nobody-waits" else (victim,),
        step=chance.randint(6, 30),
        site="" if kind in ("left", "worker", *_MISMATCHES) else site,
        way=chance.choice(("sigstop", "sleep")) if kind == "worker" else "",
        workers=1 if kind == "worker" else 0,
        operations=tuple(chance.sample(operations, 2)) if kind in _MISMATCHES else (),
        pause=chance.choice((0.0, 0.0, 0.01, 0.05, 0.09)),
        plain=plain,
    )  # fmt: skip


def run(plan: Plan, folder: Path) -> Result:
    """Let it happen in an empty folder, and judge the report."""
    with ExitStack() as stack:
        if plan.kind == "disk":
            plan = _with(plan, disk=str(stack.enter_context(small_disk(folder))))
        launch = stack.enter_context(launchers(folder))
        started = (
            _start_two_nodes(plan, folder, stack, launch) if plan.kind == "network" else [_start(plan, folder, launch)]
        )
        if plan.kind == "disk":  # a process that writes there can't be killed before
            stack.callback(subprocess.run, ["fsfreeze", "--unfreeze", plan.disk], capture_output=True)
        report, seen = _wait_for_report(started, folder)
        return judge(plan, folder, report, seen, "\n".join(each.said for each in started))


def _start(plan: Plan, folder: Path, launch: Any) -> Launcher:
    started: Launcher = launch("launch", "-n", str(plan.ranks), "--cpu", str(SCRIPT), _argument(plan))
    return started


def _start_two_nodes(plan: Plan, folder: Path, stack: ExitStack, launch: Any) -> list[Launcher]:
    machines = stack.enter_context(namespaces.joined())
    master = f"{machines[0].address}:{reserve_ports()}"
    return [
        launch(
            "launch", "-n", str(plan.ranks // 2), "--cpu", "--nodes", "2", "--node-rank", str(node), "--master", master,
            str(SCRIPT), _argument(_with(plan, interface=machine.interface)), enter=machine.enter,
        )
        for node, machine in enumerate(machines)
    ]  # fmt: skip


def _with(plan: Plan, **changes: Any) -> Plan:
    return Plan(**{**asdict(plan), **changes})


def _argument(plan: Plan) -> str:
    return json.dumps({**asdict(plan), "data_ranks": plan.data_ranks})


def _wait_for_report(started: list[Launcher], folder: Path) -> tuple[dict[str, Any], float]:
    """The report and when it was there; {} if there is none."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        for path in folder.glob("runs/*/logs/hang.json"):
            try:
                return json.loads(path.read_text()), time.monotonic()
            except ValueError:
                continue  # half written
        if all(each.status is not None for each in started):
            break
        time.sleep(0.02)
    return {}, time.monotonic()


# The judgement


def judge(plan: Plan, folder: Path, report: dict[str, Any], seen: float, said: str) -> Result:
    result = Result(plan.kind, plan.number, text=str(report.get("text", "")))
    faults = {rank: found for rank in plan.victims if (found := _read(folder / f"fault-{rank}"))}
    waits = {rank: found for rank in range(plan.ranks) if (found := _read(folder / f"waits-{rank}"))}
    if not faults:
        result.problem = f"the fault did not happen: {said[-2000:]}"
        return result
    begin = max(fault["time"] for fault in faults.values())
    if plan.kind == "worker":  # a rank goes on until it has used up what its worker has read
        begin = max(begin, *(float((folder / f"last-{rank}").read_text()) for rank in plan.victims))
    if not report:
        result.problem = f"no report: {said[-2000:]}"
        return result
    result.seconds, result.limit = seen - begin, report.get("limit")
    problems = [
        *_rank_problems(plan, report),
        *_collective_problems(plan, report, waits),
        *_line_problems(plan, report, faults, waits),
    ]
    result.rank, result.collective, result.lines = (
        not any(problem.startswith(word) for problem in problems) for word in ("rank", "collective", "line")
    )
    result.problem = "; ".join(problems)
    return result


def _rank_problems(plan: Plan, report: dict[str, Any]) -> Iterator[str]:
    blamed = tuple(report["ranks"])
    if (plan.kind in _MISMATCHES and plan.ranks == 2) or plan.kind == "network":
        # Each of two ranks waits for the other: nobody can tell who is wrong. Both have to be named.
        if set(blamed) not in (set(), {0, 1}, set(plan.victims)):
            yield f"rank: {blamed} blamed, not {plan.victims}"
        missing = [rank for rank in range(plan.ranks) if rank not in _named_ranks(report["text"])]
        if missing:
            yield f"rank: {missing} not named"
    elif blamed != plan.victims:
        yield f"rank: {blamed} blamed, not {plan.victims}"


def _collective_problems(plan: Plan, report: dict[str, Any], waits: dict[int, Any]) -> Iterator[str]:
    if plan.kind == "nobody-waits":
        if report.get("operation"):
            yield f"collective: {report['operation']} named, but nobody waits in one"
        return
    expected = {
        (_plain(each["name"]), each["number"])
        for rank, found in waits.items()
        if rank not in plan.victims or plan.kind in (*_MISMATCHES, "network")
        for each in found["operations"]
    }
    operation = report.get("operation")
    if not expected and plan.layout == "pp":  # gloo's sends and receives are not recorded
        if not re.search("send|recv|receive", report["text"]):
            yield "collective: neither a send nor a receive is named"
    elif not operation:
        yield f"collective: none named, not one of {sorted(expected)}"
    elif (_plain(operation["name"]), operation["number"]) not in expected:
        yield f"collective: {operation['name']} #{operation['number']} named, not one of {sorted(expected)}"
    elif operation["name"] not in report["text"]:
        yield f"collective: {operation['name']} is not in the text"


def _line_problems(plan: Plan, report: dict[str, Any], faults: dict[int, Any], waits: dict[int, Any]) -> Iterator[str]:
    named = {(file, int(line)) for file, line in re.findall(r"([\w.]+\.py):(\d+)", report["text"])}
    own = {line for file, line in named if file == SCRIPT.name}
    for rank, fault in faults.items():
        first, last = fault["lines"]
        if first and plan.kind != "left" and not own & set(range(first, last + 1)):
            yield f"line of rank {rank}: {fault['function']} in {first}, not in {sorted(own)}"
    both_wait = plan.kind in (*_MISMATCHES, "network")
    for rank in waits if both_wait else [rank for rank in waits if rank not in plan.victims][:1]:
        if not own & set(waits[rank]["lines"]):
            yield f"line of waiting rank {rank}: {waits[rank]['lines']}, not in {sorted(own)}"


def _named_ranks(text: str) -> set[int]:
    found: set[int] = set()
    for group in re.findall(r"\branks? ((?:\d+(?:, | and | to )?)+)", text):
        numbers = [int(number) for number in re.findall(r"\d+", group)]
        found.update(range(numbers[0], numbers[-1] + 1) if " to " in group else numbers)
    return found


def _plain(name: str) -> str:
    """all_gather, of gloo:all_gather and _allgather_base."""
    letters = re.sub(r"[^a-z]", "", name.lower().rpartition(":")[2])
    return re.sub(r"(base|coalesced|tensor|single)$", "", letters)


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own in a file, which can be frozen. Only root can make it."""
    image, mounted = folder / "image", folder / "disk"
    with image.open("wb") as file:
        os.truncate(file.fileno(), 8 << 20)
    mounted.mkdir()
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(mounted)], check=True)
    try:
        yield mounted
    finally:
        deadline = time.monotonic() + 10
        while subprocess.run(["umount", str(mounted)], capture_output=True).returncode and time.monotonic() < deadline:
            time.sleep(0.05)  # a killed process has not closed its file yet


# Plain torchrun


@dataclass
class Ending:
    """What torchrun says of a plain script. `seconds`: from the fault to its end, None if it had to be killed."""

    seconds: float | None
    said: str


def run_with_torchrun(plan: Plan, folder: Path, patience: float) -> Ending:
    """Kill it after `patience` seconds from the fault."""
    with ExitStack() as stack:
        if plan.kind == "disk":
            plan = _with(plan, disk=str(stack.enter_context(small_disk(folder))))
            stack.callback(subprocess.run, ["fsfreeze", "--unfreeze", plan.disk], capture_output=True)
        commands = [_torchrun(plan, "--standalone", "--nproc-per-node", str(plan.ranks))]
        if plan.kind == "network":
            machines = stack.enter_context(namespaces.joined())
            commands = [
                [
                    "ip", "netns", "exec", machine.name,
                    *_torchrun(
                        _with(plan, interface=machine.interface),
                        "--nnodes", "2", "--nproc-per-node", str(plan.ranks // 2), "--node-rank", str(node),
                        "--master-addr", machines[0].address, "--master-port", "29500",
                    ),
                ]
                for node, machine in enumerate(machines)
            ]  # fmt: skip
        started = [_popen(command, folder / f"said-{number}", stack) for number, command in enumerate(commands)]
        faulty, deadline = folder / f"fault-{plan.victims[0]}", time.monotonic() + 100
        while any(process.poll() is None for process in started) and time.monotonic() < deadline:
            if faulty.exists():
                deadline = _read(faulty)["time"] + patience
            time.sleep(0.05)
        said = "\n".join((folder / f"said-{number}").read_text(errors="replace") for number in range(len(started)))
        is_over = faulty.exists() and all(process.poll() is not None for process in started)
        return Ending(time.monotonic() - _read(faulty)["time"] if is_over else None, said)


def _torchrun(plan: Plan, *options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT), _argument(plan)]


def _popen(command: list[str], output: Path, stack: ExitStack) -> subprocess.Popen[bytes]:
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with output.open("wb") as said:
        process = subprocess.Popen(
            command, cwd=output.parent, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=variables,
            start_new_session=True,
        )  # fmt: skip
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """With its ranks, which have sessions of their own."""
    for pid in [*_descendants(process.pid), process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _descendants(pid: int) -> list[int]:
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children += map(int, path.read_text().split())
    return [each for child in children for each in (child, *_descendants(child))]
