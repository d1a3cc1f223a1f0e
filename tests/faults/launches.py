"""Launches in which ranks die, leave children behind, and the launcher is interrupted, each drawn from a number.

    with launches.adopting():                      # what a launch leaves running becomes a child of this process
        launches.try_launch(launches.draw(17))     # "" or what went wrong

Each launch is forked from this process, in which torch and paceline should be imported. It has to end before a deadline
without being killed, leave no process, and say what happened: the rank that died and how, or that it was interrupted.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DEADLINE = 60.0  # seconds for a launch; it takes about one
AFTER_A_KILL = 20.0  # seconds for the ranks of a launcher that died of the signal to be gone
AGAIN = 4.0  # seconds after which Ctrl-C is pressed again, as for ranks that are blocked in a collective
SIGNALS = ("SIGKILL", "SIGABRT", "SIGSEGV")
STATUS = 42


@dataclass(frozen=True)
class Plan:
    """What happens in one launch. `deeds`: by rank, how it dies and when."""

    number: int
    kind: str  # function or script
    ranks: int
    fresh: bool = False
    group: bool = False  # whether ranks have a process group, and wait for the dying one in it
    deeds: dict[str, tuple[str, str, float]] = field(default_factory=dict)  # by rank: how, when, seconds
    leaves: dict[str, list[dict[str, bool]]] = field(default_factory=dict)  # by rank: children
    waits: bool = False  # whether ranks that do not die run until they are stopped
    signal: str = ""  # to the launcher
    to_group: bool = False
    after_entry: bool = False  # the signal is sent after ranks are in their code, else after the start
    delay: float = 0.0


def draw(number: int) -> Plan:
    """One in seven is of a script, the others are of functions."""
    chance = random.Random(number)
    kind = "script" if number % 7 == 6 else "function"
    ranks = chance.choices((1, 2, 3), (1, 6, 1))[0]
    group = ranks > 1 and chance.random() < 0.2
    victims = chance.sample(
        range(ranks), chance.choices((0, 1, 2), (3, 6, 1))[0] if ranks > 1 else chance.randint(0, 1)
    )
    deeds = {str(rank): _deed(chance) for rank in victims[: 1 if group else 2]}
    leaves = {
        str(rank): [{name: chance.random() < 0.5 for name in ("setsid", "quiet", "stubborn", "late")}]
        for rank in range(ranks)
        if chance.random() < 0.2
    }
    certain = any(_is_certain(how, when) and how not in ("exit-0", "return") for how, when, _ in deeds.values())
    waits = certain and chance.random() < 0.4
    signal_name = chance.choices(("", "SIGTERM", "SIGINT", "SIGHUP", "SIGKILL"), (60, 16, 18, 3, 3))[0]
    waits = waits or (bool(signal_name) and not group and chance.random() < 0.5)
    return Plan(
        number, kind, ranks, kind == "script" and chance.random() < 0.08, group and not waits, deeds, leaves, waits,
        signal_name, signal_name == "SIGINT" and chance.random() < 0.5, chance.random() < 0.5 or waits,
        chance.uniform(0.0, 0.3),
    )  # fmt: skip


def _deed(chance: random.Random) -> tuple[str, str, float]:
    """The moments: at once, after some time, at exit (after the code has returned), or from a thread at any moment."""
    when = chance.choice(("start", "later", "at exit", "thread"))
    how = chance.choice((*SIGNALS, "os._exit") if when in ("at exit", "thread") else (*SIGNALS, "os._exit", "sys.exit",
                        "exception", "exit-0"))  # fmt: skip
    return how, when, chance.choice((0.0, 0.005, 0.01, 0.02, 0.04, chance.uniform(0, 0.1)))


def _is_certain(how: str, when: str) -> bool:
    return when != "thread"


# In the ranks


def act(plan: dict[str, Any]) -> str:
    """What a rank does."""
    rank = os.environ["RANK"]
    how, when, seconds = plan["deeds"].get(rank, ("return", "start", 0.0))
    if plan["group"]:
        import torch.distributed as torch_dist

        torch_dist.init_process_group("gloo")
        torch_dist.barrier()
    for child in plan["leaves"].get(rank, ()):
        _leave(**child)
    Path(f"in-{rank}").touch()
    if how != "return":
        if when == "thread":
            threading.Thread(target=lambda: (time.sleep(seconds), _die(how, rank)), daemon=True).start()
        elif when == "at exit":
            atexit.register(lambda: (time.sleep(seconds), _die(how, rank)))
        else:
            time.sleep(seconds if when == "later" else 0.0)
            _die(how, rank)
    elif plan["waits"]:
        time.sleep(600)
    elif plan["group"] and any(deed[1] != "thread" for deed in plan["deeds"].values()):
        torch_dist.barrier()  # for which the dying one never comes
    return f"result of {plan['number']}"


def _die(how: str, rank: str) -> None:
    if how in SIGNALS:
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(600)
    elif how == "exception":
        raise ValueError(f"deed of rank {rank}")
    elif how == "sys.exit":
        sys.exit(STATUS)
    os._exit(0 if how == "exit-0" else STATUS)


def _leave(*, setsid: bool, quiet: bool, stubborn: bool, late: bool) -> None:
    """A child that runs for ever: in a session of its own, without the output of the rank, deaf to SIGTERM."""
    ready, tell = os.pipe()
    if os.fork():
        os.close(tell)
        os.read(ready, 1)
        os.close(ready)
        return
    if setsid:
        os.setsid()
    if quiet:
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if late and os.fork():  # a grandchild, whose parent is gone
        os._exit(0)
    os.close(tell)
    time.sleep(3600)
    os._exit(0)


# Around a launch


@contextmanager
def adopting() -> Iterator[None]:
    """During the block, orphans of this process's descendants become its children."""
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    try:
        yield
    finally:
        libc.prctl(36, 0, 0, 0, 0)


def try_launch(plan: Plan) -> str:
    """Empty, or what went wrong."""
    with tempfile.TemporaryDirectory(prefix="paceline-launches-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        before = set(_children())
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if process == 0:
            _become_launcher(plan, folder)
        status, sent = _watch(plan, folder, process)
        if status is None:
            said = " ".join([_said(folder)[-300:], *_descendants(process)])
            _end(before | {process}, process)
            return f"did not end in {DEADLINE:g} s (signal sent: {sent}): {said}"
        left = _left(before, AFTER_A_KILL if status < 0 else 0.2)
        if left:
            _end(before, None)
            return f"left processes behind: {left}"
        return _judge(plan, folder, status, sent)


def _become_launcher(plan: Plan, folder: Path) -> None:
    status = 70
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.chdir(folder)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        nothing = os.open(os.devnull, os.O_RDONLY)
        output = os.open("said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for target, source in ((0, nothing), (1, output), (2, output)):
            os.dup2(source, target)
        sys.stdout = sys.stderr = io.TextIOWrapper(os.fdopen(os.dup(1), "wb", 0), write_through=True)
        status = _launch_function(plan) if plan.kind == "function" else _launch_script(plan)
    except KeyboardInterrupt:
        status = 130
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _launch_function(plan: Plan) -> int:
    import paceline

    told: dict[str, Any] = {}
    try:
        told["value"] = paceline.launch(lambda: act(asdict(plan)), ranks=plan.ranks)
    except paceline.errors.PacelineError as error:
        told["error"] = "\n".join([str(error), *getattr(error, "__notes__", ())])
    Path("told.partial").write_text(json.dumps(told))
    Path("told.partial").rename("told")
    return 0


def _launch_script(plan: Plan) -> int:
    from paceline.tools.cli.main import main

    tests = Path(__file__).parents[1]
    text = f"import sys; sys.path.insert(0, {str(tests)!r})\nfrom faults.launches import act\nact({asdict(plan)!r})\n"
    Path("script.py").write_text(text)
    sys.argv = ["paceline", "launch", "-n", str(plan.ranks), *["--fresh"] * plan.fresh, "script.py"]
    main()
    return 0


def _watch(plan: Plan, folder: Path, process: int) -> tuple[int | None, bool]:
    """The exit status of the launcher, negative for a signal, None if it has to be killed; whether it got a signal."""
    begin = send_at = time.monotonic()
    send_at += plan.delay
    sent = entered = False
    while (now := time.monotonic()) < begin + DEADLINE:
        if plan.after_entry and not entered:
            entered = len(list(folder.glob("in-*"))) == plan.ranks
            send_at = now + plan.delay
        if plan.signal and now >= send_at and (entered or not plan.after_entry):
            sent = True
            with suppress(ProcessLookupError):
                (os.killpg if plan.to_group else os.kill)(process, getattr(signal, plan.signal))
            send_at = now + AGAIN if plan.signal == "SIGINT" else float("inf")
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), sent
        time.sleep(0.003)
    return None, sent


def _judge(plan: Plan, folder: Path, status: int, sent: bool) -> str:
    """Empty if the launch said what happened."""
    said = _said(folder)
    found = _found(plan, folder, status, said)
    expected = [*_results(plan), *_failures(plan)]
    if sent:
        number = getattr(signal, plan.signal)
        expected += [f"status {128 + number}", f"status {-number}"]
    if any(all(part in found for part in each.split(" ... ")) for each in expected):
        return ""
    return f"said {found[:300]!r}, expected one of {expected} (signal sent: {sent}): {said[-600:]!r}"


def _found(plan: Plan, folder: Path, status: int, said: str) -> str:
    """What a launch told: a result, an error, or a status; of a script also its report."""
    told = folder / "told"
    if plan.kind == "function" and told.exists():
        words = json.loads(told.read_text())
        return str(words["error"]) if "error" in words else f"value {words['value']};"
    report = said[said.rindex(" failed first") - 6 :] if " failed first" in said else ""
    return f"status {status}; {report}"


def _results(plan: Plan) -> list[str]:
    """What is right if no rank fails, unless one certainly does."""
    if any(_is_certain(how, when) and (how != "exit-0" or plan.group) for how, when, _ in plan.deeds.values()):
        return []
    if plan.kind == "script":
        return ["status 0;"]
    return ["value None;" if plan.deeds.get("0", ("",))[0] == "exit-0" else f"value result of {plan.number};"]


def _failures(plan: Plan) -> list[str]:
    """Words of the reports that are right, in parts; of a script also its status."""
    reports = []
    for rank, (how, when, _) in plan.deeds.items():
        words, status = {
            "exception": (f"ValueError: deed of rank {rank}", 1),
            "sys.exit": (f"rank {rank} called sys.exit({STATUS})", STATUS),
            "os._exit": (f"rank {rank} exited with status {STATUS}", STATUS),
            "exit-0": (f"rank {rank} exited with status 0 ... while other ranks were still running", 76),
        }.get(how) or (f"rank {rank} was killed by {how}", 128 + getattr(signal, how))
        words += " after its code returned" * (when == "at exit")
        if how != "exit-0" or plan.group:
            of_script = f"status {status}; rank {rank} failed first ... {words}"
            reports.append(of_script if plan.kind == "script" else words)
    return reports


def _said(folder: Path) -> str:
    path = folder / "said"
    return path.read_text(errors="replace") if path.exists() else ""


def _children() -> list[int]:
    path = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return [int(pid) for pid in path.read_text().split()]


def _left(before: set[int], seconds: float) -> list[str]:
    """New children of this process that are still running after that time: what the launch left behind."""
    end = time.monotonic() + seconds
    while True:
        new = [pid for pid in _children() if pid not in before]
        for pid in new:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        left = [pid for pid in _children() if pid not in before]
        if not left or time.monotonic() > end:
            return [f"{pid} {_command(pid)}" for pid in left]
        time.sleep(0.005)


def _descendants(pid: int) -> list[str]:
    """What a launch that hangs consists of: the title of each process and where it waits in the kernel."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    children = path.read_text().split() if path.exists() else []
    where = Path(f"/proc/{pid}/wchan").read_text() if path.exists() else ""
    return [f"[{pid} {_command(pid)}: {where}]", *(each for child in children for each in _descendants(int(child)))]


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    return ""


def _end(before: set[int], launcher: int | None) -> None:
    """Kill what is left after a violation, so that the next launch starts clean."""
    if launcher is not None:
        with suppress(ProcessLookupError):
            os.kill(launcher, signal.SIGKILL)
        os.waitpid(launcher, 0)
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end and (left := [pid for pid in _children() if pid not in before]):
        for pid in left:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
