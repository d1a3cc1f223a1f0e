"""Several nodes on one machine: one launcher process each, which tests can kill as a machine can fail.

A launcher is forked from this process, in which torch is imported already: two of them, with two ranks each, are there
within a second or two. Each has a session of its own, so that all that belongs to it is found, and ended, with it.
Everything a node may do to another is in the script that they run: what a test does at some moment would be too late.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

import forked
from paceline.runtime.environment import TOKEN

DEADLINE = 100.0
T = TypeVar("T")

STEPS = 20
# Trains. What happens in a step of a start is told as START:STEP:DEED; deeds but `wait` are the last rank's.
SCRIPT = """
import json, os, signal, sys, threading, time
from pathlib import Path
import psutil, tiny

deeds = {tuple(map(int, told.split(":")[:2])): told.split(":")[2] for told in sys.argv[1:]}
rank, world, start = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
settings = {"save_every": 4, "log_every": 1, "checkpoint": {"background": False, "on_error": False}}
trainer = tiny.classifier_trainer(run=None, quiet=False, **settings)
began = trainer.step_count

def session(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0

def wait_for(number):
    heard, before = [], signal.getsignal(number)
    def hear(number, frame):
        heard.append(number)
        before(number, frame)
    signal.signal(number, hear)
    Path(f"waits-{start}-{rank}").touch()
    while not heard:
        time.sleep(0.01)
    signal.signal(number, before)

def act(*_):
    deed = deeds.get((start, trainer.step_count + 1))
    if deed == "wait":
        wait_for(signal.SIGTERM)
    elif deed and rank == world - 1:
        if deed == "raise":
            raise ValueError("the injected reason")
        if deed == "block":
            Path("blocked").touch()
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        whom, number = deed.split("-")
        if whom == "node":  # all that runs there
            own = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
            for pid in own:
                if pid not in (os.getpid(), os.getppid()) and session(pid) == os.getsid(0):
                    os.kill(pid, signal.SIGKILL)
            whom = "rank"
        launcher = psutil.Process().parent().ppid()
        os.kill(os.getpid() if whom == "rank" else launcher, getattr(signal, number))
        if number == "SIGINT":
            wait_for(signal.SIGINT)

trainer.model.register_forward_pre_hook(act)
trainer.train(tiny.blobs(160), max_steps=20)
if rank == 0:
    told = {"began": began, "world": world, "weights": tiny.weights(trainer).tolist()}
    Path("told").write_text(json.dumps(told))
"""


class Launcher:
    """`paceline` with these arguments, in `folder`."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        enter: Callable[[], None] = lambda: None,
        program: Callable[[], None] | None = None,
    ) -> None:
        """`enter` is called in the new process first. `program` runs there instead of `paceline`."""

        def launcher() -> None:
            os.environ[TOKEN] = "a secret of the tests"  # that in the user's home is left alone
            enter()
            forked.command(*arguments) if program is None else program()

        self._output = folder / f"said-{len(list(folder.glob('said-*')))}"
        with self._output.open("ab") as output:
            self.pid = forked.start(launcher, folder, output.fileno(), output.fileno())
        self._status: int | None = None

    @property
    def said(self) -> str:
        return self._output.read_text(errors="replace")

    def says(self, words: str) -> bool:
        """Whether it has said that. One that ended without is a failed test."""
        if words in self.said:
            return True
        assert self.status is None, f"ended with {self.status} and did not say {words!r}:\n{self.said}"
        return False

    @property
    def status(self) -> int | None:
        """How it ended, negative for a signal; None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def end(self) -> int:
        """Its status, once it has ended; nothing of it is left then."""
        with suppress(TimeoutError):
            eventually(lambda: self.status is not None)
        assert self.status is not None, f"did not end:\n{self.said}"
        with suppress(TimeoutError):
            eventually(lambda: not self.processes(), seconds=30)
        assert not self.processes(), f"processes {self.processes()} are left of:\n{self.said}"
        return self.status

    def processes(self) -> list[int]:
        """All that belong to it, itself included."""
        return [pid for pid in _running() if _session(pid) == self.pid]

    def send(self, number: int) -> None:
        """To the launcher alone, not to its ranks."""
        if self.status is None:
            os.kill(self.pid, number)

    def crash(self) -> None:
        """The whole machine, as if its power had failed."""
        while found := self.processes():
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if self.status is not None:
                time.sleep(0.002)
        while self.status is None:  # its threads are ending
            time.sleep(0.002)


@contextmanager
def launchers(folder: Path) -> Iterator[Callable[..., Launcher]]:
    """A function that starts one more launcher; in the end none is left, whatever happened."""
    started: list[Launcher] = []

    def launch(*arguments: str, where: Path = folder, **how: Any) -> Launcher:
        started.append(Launcher(where, *arguments, **how))
        return started[-1]

    try:
        yield launch
    finally:
        for each in started:
            each.crash()
            assert each.status is not None


@dataclass
class Job:
    """Launchers of one job, which share a folder."""

    folder: Path
    launch: Callable[..., Launcher]
    master: str = ""
    nodes: str = "2"
    enter: Mapping[int, Callable[[], None]] = field(default_factory=dict)  # the machine of each node

    def __post_init__(self) -> None:
        (self.folder / "script.py").write_text(SCRIPT)
        self.master = self.master or f"127.0.0.1:{reserve_ports()}"

    def node(self, rank: int | None, *deeds: str, options: tuple[str, ...] = (), **how: Any) -> Launcher:
        meet = (*self.meet(rank), *options)
        if rank in self.enter:
            how["enter"] = self.enter[rank]
        return self.launch("launch", "-n", "2", *meet, "script.py", *deeds, **how)

    def meet(self, rank: int | None) -> tuple[str, ...]:
        own = () if rank is None else ("--node-rank", str(rank))
        return ("--nodes", self.nodes, *own, "--master", self.master)

    def both(self, *deeds: str, options: tuple[str, ...] = ()) -> tuple[Launcher, Launcher]:
        return self.node(0, *deeds, options=options), self.node(1, *deeds, options=options)

    def waits(self, in_start: int) -> bool:
        return (self.folder / f"waits-{in_start}-0").exists()

    def curve(self) -> list[tuple[int, float]]:
        lines = (self.folder / "runs" / "script" / "metrics.jsonl").read_text().splitlines()
        return [(line["step"], line["loss"]) for line in map(json.loads, lines)]

    def told(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "told").read_text()))

    def assert_same(self, unbroken: Job, began: range = range(1), world: int = 4) -> None:
        """Each step once, with the loss that it has in a run of one node to which nothing happens."""
        assert [step for step, _ in self.curve()] == list(range(1, STEPS + 1))
        assert [loss for _, loss in self.curve()] == pytest.approx([loss for _, loss in unbroken.curve()], rel=1e-5)
        assert self.told()["world"] == world and self.told()["began"] in began
        assert self.told()["weights"] == pytest.approx(unbroken.told()["weights"], rel=1e-4, abs=1e-6)


def run_unbroken(folder: Path) -> Job:
    """The training on one node, in which nothing happens."""
    with launchers(folder) as launch:
        job = Job(folder, launch)
        done = launch("launch", "-n", "2", "script.py")
        assert done.end() == 0, done.said
        return job


def ended(*nodes: Launcher) -> list[int]:
    return [node.end() for node in nodes]


def eventually(there: Callable[[], T], seconds: float = DEADLINE) -> T:
    """The first answer that is something."""
    end = time.monotonic() + seconds
    while not (seen := there()):
        if time.monotonic() > end:
            raise TimeoutError("it did not happen")
        time.sleep(0.01)
    return seen


def reserve_ports() -> int:
    """A port, and with it the next one: the coordinator's and the store's, which may be at other addresses. Sockets
    that do not listen hold both until this process ends, so nobody else gets them; the job can open them because it
    reuses addresses, as these do."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port = int(first.getsockname()[1])
            with suppress(OSError, OverflowError):
                second.bind(("", port + 1))
                for each in (first, second):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    each.detach()
                return port


def _running() -> list[int]:
    """Processes, without those that have ended and wait to be noticed."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if path.read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(int(path.parent.name))
    return found


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
