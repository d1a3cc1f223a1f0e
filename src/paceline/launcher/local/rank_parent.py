"""The parent of the ranks of one node: a process between the launcher and its ranks.

It starts the ranks, reports how each of them exited, and passes signals on to them. Whatever ranks leave running
becomes its child (PR_SET_CHILD_SUBREAPER) and is ended. If the launcher is killed, it ends the ranks.

That a process has exited is known from waitpid, never from the end of a pipe: a process that a rank forked holds all
pipes of the rank. Signals are blocked from each fork until the handlers of the new process are set.
"""

from __future__ import annotations

import math
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType

from paceline.errors import LaunchError
from paceline.launcher.local.interrupts import HANDLED
from paceline.runtime.processes import prctl, run_forked, set_title

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # elsewhere than on Linux, what ranks leave running stays
_BLOCKED = {*HANDLED, signal.SIGUSR2, signal.SIGCHLD}
_POLL_SECONDS = 0.1
# What ranks left running may exit by itself, then gets SIGTERM, then SIGKILL; after the last limit it is given up.
_LEFTOVER_TERM, _LEFTOVER_KILL, _LEFTOVER_LIMIT = 0.3, 1.5, 6.0
_LEFTOVER_POLL = 0.02
_ABANDONED_SECONDS = 2.0  # for this process to exit after it was told to kill the ranks and should be done
_REPORT = struct.Struct("=cqqd")  # kind, local rank, value, time
_COMMAND = struct.Struct("=qq")  # signal, process group that has received it already or -1


class RankProcesses:
    """The ranks of this node, as seen by the launcher. `entry(local_rank)` runs in each of them. `orphaned()` is called
    after ranks whose launcher was killed."""

    def __init__(
        self,
        number: int,
        entry: Callable[[int], None],
        grace: float,
        orphan_seconds: float,
        orphaned: Callable[[], None] = lambda: None,
    ) -> None:
        self._number, self._entry, self._grace, self._orphan_seconds = number, entry, grace, orphan_seconds
        self._orphaned = orphaned
        self._unread = b""
        self._is_gone, self._error_number = False, 0
        self.pids: dict[int, int] = {}  # by local rank
        self.exits: dict[int, tuple[int, float]] = {}  # by local rank: exit code, and when
        self.ended_leftovers = 0

    def __enter__(self) -> RankProcesses:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed
                stream.flush()  # or both processes would write what is buffered
        self._reports, reports = os.pipe()
        commands, self._commands = os.pipe()
        self.interrupted, interrupted = os.pipe()  # readable when the process group received SIGINT
        pipes = (reports, commands, interrupted)
        launcher = os.getpid()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)

        def parent() -> None:
            for descriptor in (self._reports, self._commands, self.interrupted):
                os.close(descriptor)
            _Parent(self, launcher, pipes, mask).run()

        self._parent = run_forked(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for descriptor in pipes:
            os.close(descriptor)
        os.set_blocking(self._reports, False)
        os.set_blocking(self._commands, False)
        return self

    @property
    def running(self) -> list[int]:
        """Local ranks that have not exited."""
        return [local for local in range(self._number) if local not in self.exits]

    @property
    def have_started(self) -> bool:
        return len(self.pids) == self._number

    def send(self, number: int, except_group: int = -1) -> None:
        """Send a signal to the running ranks. May be called by a signal handler."""
        with suppress(OSError):  # all have exited
            os.write(self._commands, _COMMAND.pack(number, except_group))

    def receive(self, seconds: float) -> None:
        """Wait for reports, for at most `seconds`."""
        self._collect(seconds)
        if self._is_gone and not self.have_started:
            raise _fork_failed(len(self.pids), self._error_number)
        for local in self.running if self._is_gone else ():  # the kernel killed them together with their parent
            self.exits[local] = (-signal.SIGKILL, time.time())

    def _collect(self, seconds: float) -> None:
        if not self._is_gone:
            select.select([self._reports], [], [], seconds)
        self._is_gone = self._is_gone or self._has_exited()  # before the last reports are read
        with suppress(BlockingIOError):
            while data := os.read(self._reports, 65536):
                self._unread += data
        while len(self._unread) >= _REPORT.size:
            self._note(*_REPORT.unpack_from(self._unread))
            self._unread = self._unread[_REPORT.size :]

    def __exit__(self, *exc: object) -> None:
        """End the ranks, if any are left, and everything that they left running."""
        if self.running:
            self.send(signal.SIGKILL)
        end = time.monotonic() + _LEFTOVER_LIMIT + _ABANDONED_SECONDS
        while not self._is_gone and time.monotonic() < end:
            self._collect(_POLL_SECONDS)
        if not self._is_gone:
            os.kill(self._parent, signal.SIGKILL)
            os.waitpid(self._parent, 0)
        for descriptor in (self._reports, self._commands, self.interrupted):
            os.close(descriptor)

    def _has_exited(self) -> bool:
        try:
            return os.waitpid(self._parent, os.WNOHANG)[0] != 0
        except ChildProcessError:  # SIGCHLD is ignored here, or other code of this process waits for any child
            return True

    def _note(self, kind: bytes, local: int, value: int, when: float) -> None:
        if kind == b"s":
            self.pids[local] = value
        elif kind == b"x":
            self.exits[local] = (value, when)
        elif kind == b"l":
            self.ended_leftovers = value
        else:
            self._error_number = value


class _Parent:
    def __init__(self, ranks: RankProcesses, launcher: int, pipes: Sequence[int], mask: Collection[int]) -> None:
        self._ranks, self._launcher, self._mask = ranks, launcher, mask
        self._reports, self._commands, self._interrupted = pipes
        self._running: dict[int, tuple[int, ForkProcess]] = {}  # by pid: local rank and process
        self._gone_at: float | None = None  # when the launcher was found to be gone
        self._sent = 0  # the last signal that was sent for lack of a launcher
        self._leftovers: dict[int, float] = {}  # orphans, and when each was seen first
        self._told: dict[int, int] = {}  # orphans, and the last signal that each got

    def run(self) -> None:
        set_title("paceline: parent of ranks", "pl-parent")
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._handle_signals()
        for local in range(self._ranks._number):
            self._start(local)
        if signal.SIGINT in signal.sigpending():
            signal.sigwait({signal.SIGINT})  # not all ranks received it: the launcher has to forward it
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        limit = math.inf
        while self._running or (self._leftovers and time.monotonic() < limit):
            self._wait(_LEFTOVER_POLL if self._leftovers else _POLL_SECONDS)
            if self._reap() or self._leftovers:
                self._end_leftovers()
            self._obey()
            self._check_launcher()
            limit = math.inf if self._running else min(limit, time.monotonic() + _LEFTOVER_LIMIT)
        if self._told:
            self._report(b"l", 0, len(self._told))
        if self._gone_at is not None:
            self._ranks._orphaned()

    def _handle_signals(self) -> None:
        self._wake, wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in _BLOCKED - {signal.SIGCHLD}:
            if signal.getsignal(number) != signal.SIG_IGN:  # keep signals ignored by nohup
                signal.signal(number, self._heard)
        self._child_handler = signal.signal(signal.SIGCHLD, self._heard)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            os.write(self._interrupted, b"!")

    def _start(self, local: int) -> None:
        # multiprocessing resets what a forked process must not inherit: its children, finalizers and random state.
        process = ForkProcess(target=self._become_rank, args=(local, os.getpid()))
        try:
            process.start()
        except OSError as error:
            self._report(b"f", local, error.errno or 0)
            for pid in self._running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os._exit(1)
        assert process.pid is not None
        self._running[process.pid] = (local, process)
        self._report(b"s", local, process.pid)

    def _become_rank(self, local: int, parent: int) -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(_PR_SET_CHILD_SUBREAPER, 1)  # its daemons are inherited from it when it exits, not before
        if os.getppid() != parent:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for descriptor in (self._reports, self._commands, self._interrupted, self._wake):
            os.close(descriptor)
        for number in _BLOCKED - {signal.SIGCHLD}:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, self._child_handler or signal.SIG_DFL)
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            self._ranks._entry(local)
        except KeyboardInterrupt:
            os._exit(130)  # the launcher ends the run

    def _report(self, kind: bytes, local: int, value: int) -> None:
        with suppress(OSError):  # the launcher is gone
            os.write(self._reports, _REPORT.pack(kind, local, value, time.time()))

    def _wait(self, seconds: float) -> None:
        """Until a signal or a command arrives."""
        ready, _, _ = select.select([self._wake] if self._gone_at else [self._wake, self._commands], [], [], seconds)
        if self._wake in ready:
            os.read(self._wake, 4096)

    def _reap(self) -> bool:
        """Report exits of ranks; returns whether there were any."""
        # Not waitpid(-1): multiprocessing waits for children too, when it starts another, and keeps their exit codes.
        exited = [pid for pid, (_, process) in self._running.items() if process.exitcode is not None]
        for pid in exited:
            local, process = self._running.pop(pid)
            self._report(b"x", local, process.exitcode or 0)
        for pid in self._leftovers:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return bool(exited)

    def _obey(self) -> None:
        if self._gone_at is not None or not select.select([self._commands], [], [], 0)[0]:
            return
        data = os.read(self._commands, 256 * _COMMAND.size)  # writes of this size are atomic
        if not data:
            self._gone_at = time.monotonic()
        for number, except_group in _COMMAND.iter_unpack(data):
            self._send(number, except_group)

    def _send(self, number: int, except_group: int = -1) -> None:
        for pid in self._running:  # not waited for, so each is still the number of a rank
            if os.getpgid(pid) != except_group:
                os.kill(pid, number)

    def _check_launcher(self) -> None:
        """If the launcher is gone, ranks may continue for a while, then get SIGTERM, on which training saves."""
        if self._gone_at is None and os.getppid() != self._launcher:
            self._gone_at = time.monotonic()
        if self._gone_at is None:
            return
        without = time.monotonic() - self._gone_at - self._ranks._orphan_seconds
        number = 0 if without < 0 else signal.SIGTERM if without < self._ranks._grace else signal.SIGKILL
        if number != self._sent:
            self._sent = number
            self._send(number)

    def _end_leftovers(self) -> None:
        """All other children are orphans of ranks that exited. They are ended at once, not with the last rank: they
        hold copies of connections, so that other ranks would wait for one that is gone."""
        now = time.monotonic()
        self._leftovers = {pid: self._leftovers.get(pid, now) for pid in _children() if pid not in self._running}
        for pid, since in self._leftovers.items():
            number = signal.SIGKILL if now > since + _LEFTOVER_KILL else signal.SIGTERM
            if now > since + _LEFTOVER_TERM and self._told.get(pid) != number:
                self._told[pid] = number
                with suppress(OSError):  # another user's
                    os.kill(pid, number)


def _children() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


def _fork_failed(local: int, number: int) -> LaunchError:
    return LaunchError(
        "fork-failed",
        f"Cannot start local rank {local}: {os.strerror(number) if number else 'its parent process was killed'}.",
    )


_EXIT_SECONDS = 10.0  # seconds after a SIGKILL


def kill_orphans(started: Mapping[int, str | None]) -> None:
    """Kill ranks that outlived their launcher, identified by pid and start time, and wait until they are gone."""
    handles = []
    for pid, at in started.items():
        if at is not None and start_time(pid) == at:  # the pid may have been reused
            with suppress(ProcessLookupError):
                handles.append(os.pidfd_open(pid))
                signal.pidfd_send_signal(handles[-1], signal.SIGKILL)
    end = time.monotonic() + _EXIT_SECONDS
    for handle in handles:
        select.select([handle], [], [], max(0.0, end - time.monotonic()))
        os.close(handle)


def start_time(pid: int) -> str | None:
    """When a process was started, in clock ticks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None
