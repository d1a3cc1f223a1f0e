"""Launchers of other machines, each behind a process of this one: an ssh, an srun.

`SubprocessBackend` starts one process for each node. The process gets its order through its standard input, which stays
open: its end is what tells the other side that the front end is gone. What the other side writes is shown here, and
its last lines are kept, because they are often all that explains an end ("Permission denied").

Each process has a session of its own, so that a Ctrl-C ends the ranks first, in order, and not the way to them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from paceline.errors import LaunchError

_LAST_LINES = 20
_LAST_BYTES = 16384
_NOTICE_SECONDS = 1.0
_DRAIN_SECONDS = 1.0  # for what a dead process left in its pipe; something else may hold that open for ever
_TERM_SECONDS = 5.0  # between SIGTERM and SIGKILL


class SubprocessBackend:
    """Machines that a command reaches, one for each node; `patience` is how long they get to end by themselves."""

    def __init__(self, names: Sequence[str], argv_of: Callable[[int], Sequence[str]], patience: float) -> None:
        self.names = names
        self._argv_of = argv_of
        self._patience = patience
        self._running: dict[int, _NodeProcess] = {}

    def start(self, node: int, order: bytes) -> None:
        """Begin that node's launcher; where an old one still runs, it is ended first."""
        if node in self._running:
            _end([self._running.pop(node)], self._patience)
        self._running[node] = _NodeProcess(self._argv_of(node), order)

    def ended(self) -> dict[int, str]:
        gone = [node for node, each in self._running.items() if each.process.poll() is not None]
        return {node: self._running.pop(node).last_words() for node in gone}

    def stop(self) -> None:
        processes = list(self._running.values())
        self._running.clear()
        _end(processes, self._patience)


class _NodeProcess:
    """One process that leads to a node, and the thread that gives it the order and shows what it says."""

    def __init__(self, argv: Sequence[str], order: bytes) -> None:
        try:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, bufsize=0
            )
        except OSError as error:
            raise LaunchError(
                "no-program",
                f"The program {argv[0]!r} can't be run: {error.strerror}.",
                fix="check its name and rights",
            ) from None
        assert self.process.stdin is not None and self.process.stderr is not None
        self._stdin = self.process.stdin
        self._stderr = self.process.stderr
        self._relay = OutputRelay()
        self._has_order = threading.Event()
        self._thread = threading.Thread(target=self._tend, args=(order,), daemon=True)
        self._thread.start()

    def _tend(self, order: bytes) -> None:
        # In this thread, because a long order fills the pipe and then waits for the other side to read.
        write_order(self._stdin.fileno(), order)
        self._has_order.set()
        while chunk := os.read(self._stderr.fileno(), 65536):
            self._relay.write(2, chunk)
        self._relay.finish()

    def last_words(self) -> str:
        """How it ended, and the last lines that came from there."""
        self.close()
        return "\n".join([describe_exit(self.process.returncode), *self._relay.last_lines()])

    def let_go(self) -> None:
        """Tell the other side that nobody is here any more."""
        # The other side may have read its order a moment before the thread that writes it notices.
        if self._has_order.wait(_NOTICE_SECONDS):
            self._stdin.close()
        else:  # it never read its order, so it would not notice
            self.signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def wait(self, until: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """After the process ended: its pipes, once what was in them is shown."""
        self._thread.join(_DRAIN_SECONDS)
        if not self._thread.is_alive():
            self._stdin.close()
            self._stderr.close()


def _end(processes: Sequence[_NodeProcess], patience: float) -> None:
    """All at once: each gets the same time to end by itself, then a SIGTERM, then a SIGKILL."""
    for each in processes:
        each.let_go()
    _wait(processes, patience)
    for each in processes:
        each.signal(signal.SIGTERM)
    _wait(processes, _TERM_SECONDS)
    for each in processes:
        each.signal(signal.SIGKILL)
        each.process.wait()
        each.close()


def _wait(processes: Sequence[_NodeProcess], seconds: float) -> None:
    until = time.monotonic() + seconds
    for each in processes:
        each.wait(until)


class OutputRelay:
    """Shows what a node's launcher writes: whole lines only, so that those of two nodes do not mix. A progress bar ends
    its own with \\r. The end of its standard error is kept."""

    def __init__(self) -> None:
        self._partial = {1: b"", 2: b""}  # by stream: the line that has not ended
        self._tail = b""

    def write(self, stream: int, data: bytes) -> None:
        if stream == 2:
            self._tail = (self._tail + data)[-_LAST_BYTES:]
        data = self._partial[stream] + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        self._partial[stream] = data[end:]
        _show(stream, data[:end])

    def finish(self) -> None:
        for stream, rest in self._partial.items():
            _show(stream, rest + b"\n" if rest else b"")

    def last_lines(self) -> list[str]:
        return self._tail.decode(errors="replace").splitlines()[-_LAST_LINES:]


def write_order(descriptor: int, order: bytes) -> None:
    with suppress(BrokenPipeError):  # the launcher is gone already, and its last lines will say why
        while order:
            order = order[os.write(descriptor, order) :]


def describe_exit(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"ended by {signal.Signals(-status).name}"


def _show(stream: int, data: bytes) -> None:
    with suppress(OSError):  # the screen is gone
        while data:
            data = data[os.write(stream, data) :]
