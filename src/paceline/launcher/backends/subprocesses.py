"""Node launchers behind a local process, such as ssh or srun.

The process receives its order on standard input, which then stays open: when it is closed, the other side knows that
the front end has exited. Its output is shown here, and its last lines are kept, because they often hold the only
explanation of a failure ("Permission denied").

Each process has its own session, so that Ctrl-C reaches the ranks first instead of cutting the connection to them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from paceline.errors import LaunchError

KILLED = "killed by"  # a signal: how the description of an exit begins
_LAST_LINES = 20
_LAST_BYTES = 16384
_NOTICE_SECONDS = 1.0
_DRAIN_SECONDS = 1.0  # to read the output of a process that exited; another process may hold its pipe open
_TERM_SECONDS = 5.0  # between SIGTERM and SIGKILL


class SubprocessBackend:
    """Starts one process per node. `patience`: seconds in which launchers may exit by themselves."""

    def __init__(self, names: Sequence[str], argv_of: Callable[[int], Sequence[str]], patience: float) -> None:
        self.names = names
        self._argv_of = argv_of
        self._patience = patience
        self._running: dict[int, RelayedProcess] = {}
        self._ending: list[threading.Thread] = []

    def start(self, node: int, order: bytes) -> None:
        """Start the launcher of a node. One that is still running is stopped meanwhile."""
        if node in self._running:
            self._meanwhile(self._stop, [self._running.pop(node)])
        self._running[node] = RelayedProcess(self._argv_of(node), order)

    def ended(self) -> dict[int, str]:
        exited = [node for node, each in self._running.items() if each.process.poll() is not None]
        return {node: self._running.pop(node).describe_exit() for node in exited}

    def is_accident(self, reason: str) -> bool:
        return reason.startswith(KILLED)

    def stop(self) -> None:
        processes = list(self._running.values())
        self._running.clear()
        self._stop(processes)
        for each in self._ending:
            each.join()
        self._ending.clear()

    def _stop(self, processes: Sequence[RelayedProcess]) -> None:
        stop_processes(processes, self._patience)
        for each in processes:
            each.close()

    def _meanwhile(self, end: Callable[[Sequence[RelayedProcess]], None], processes: Sequence[RelayedProcess]) -> None:
        """In a thread: while the front end is blocked, all nodes take it for lost."""
        thread = threading.Thread(target=end, args=(processes,), daemon=True)
        thread.start()
        self._ending.append(thread)


class LauncherProcess:
    """A process that reads an order from standard input, and exits when that is closed."""

    def __init__(self, argv: Sequence[str], *, stdout: int | None = None, env: Mapping[str, str] | None = None) -> None:
        self.argv = argv
        try:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE,
                start_new_session=True, bufsize=0, env=env,
            )  # fmt: skip
        except OSError as error:
            raise LaunchError("no-program", f"Cannot execute {argv[0]!r}: {error.strerror}.") from None
        self._has_order = threading.Event()

    def send_order(self, order: bytes) -> None:
        """Blocks while the pipe is full, until the other side reads."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has exited, and its last lines tell why
            while order:
                order = order[os.write(self.process.stdin.fileno(), order) :]
        self._has_order.set()

    def disconnect(self) -> None:
        """Tell the other side that the front end exits."""
        assert self.process.stdin is not None
        # The other side may have read its order just before the thread that writes it marks it as sent.
        if self._has_order.wait(_NOTICE_SECONDS):
            self.process.stdin.close()
        else:  # it has not read its order, so it would not notice
            self.signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Close the pipes of a process that has exited."""
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


class RelayedProcess(LauncherProcess):
    """A thread sends the order and shows the standard error of the process."""

    def __init__(self, argv: Sequence[str], order: bytes) -> None:
        super().__init__(argv)
        self._relay = OutputRelay()
        self._thread = threading.Thread(target=self._run, args=(order,), daemon=True)
        self._thread.start()

    def _run(self, order: bytes) -> None:
        assert self.process.stderr is not None
        self.send_order(order)
        while chunk := os.read(self.process.stderr.fileno(), 65536):
            self._relay.write(2, chunk)
        self._relay.finish()

    def describe_exit(self) -> str:
        self.close()
        return self._relay.describe_exit(self.process.returncode)

    def close(self) -> None:
        self._thread.join(_DRAIN_SECONDS)
        if not self._thread.is_alive():
            super().close()


def stop_processes(processes: Sequence[LauncherProcess], patience: float) -> None:
    """Stop all at the same time: by closing standard input, then with SIGTERM, then with SIGKILL."""
    for each in processes:
        each.disconnect()
    _wait(processes, patience)
    for each in processes:
        each.signal(signal.SIGTERM)
    _wait(processes, _TERM_SECONDS)
    for each in processes:
        each.signal(signal.SIGKILL)
    _wait(processes, _TERM_SECONDS)


def _wait(processes: Sequence[LauncherProcess], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for each in processes:
        with suppress(subprocess.TimeoutExpired):
            each.process.wait(max(0.0, deadline - time.monotonic()))


class OutputRelay:
    """Shows the output of a launcher in whole lines, so that lines of two nodes do not mix. A progress bar ends its
    lines with \\r. The end of standard error is kept."""

    def __init__(self) -> None:
        self._partial = {1: b"", 2: b""}  # by stream: the incomplete last line
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

    def describe_exit(self, status: int | str) -> str:
        """The exit status, or another reason, followed by the last lines of standard error."""
        if isinstance(status, int):
            status = f"exit status {status}" if status >= 0 else f"{KILLED} {signal.Signals(-status).name}"
        return "\n".join([status, *self._tail.decode(errors="replace").splitlines()[-_LAST_LINES:]])


def _show(stream: int, data: bytes) -> None:
    with suppress(OSError):  # the terminal is gone
        while data:
            data = data[os.write(stream, data) :]
