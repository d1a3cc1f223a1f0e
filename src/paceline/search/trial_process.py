"""The process of a trial: a launcher, forked from the sweep, which has imported torch already.

It is in a session of its own, so that Ctrl-C reaches the sweep only, and gets SIGTERM if the sweep dies: its ranks then
save a checkpoint. It holds a lock that forked ranks inherit, so the lock is free when all of them have exited.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import PacelineError
from paceline.run import regular_files
from paceline.runtime.processes import fork

_PR_SET_PDEATHSIG = 1  # Linux prctl
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of a filesystem


@dataclass
class TrialProcess:
    """A running trial."""

    pid: int
    began: float = field(default_factory=time.monotonic)
    status: int | None = None  # as the shell would have it: 128 + number after a signal

    def poll(self) -> int | None:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self.status = code if code >= 0 else 128 - code
        return self.status

    def send(self, number: int) -> None:
        if self.status is None:
            os.kill(self.pid, number)  # not waited for, so it is still the number of this process


def is_free(lock: Path) -> bool:
    """Whether no process of an earlier start of a trial is left on this machine."""
    descriptor = regular_files.open_descriptor(lock, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _NO_LOCKS
    finally:
        os.close(descriptor)
    return True


def start(body: Callable[[], int], *, output: Path, lock: Path, env: Mapping[str, str]) -> TrialProcess:
    """Run `body` in a new process, which exits with what it returns."""
    sweep = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    pid = fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return TrialProcess(pid)
    status = 1
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != sweep:
            os._exit(128 + signal.SIGTERM)
        held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)  # until the last process of this trial has exited
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        _direct_streams(output)
        os.environ.update(env)
        status = body()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
    except PacelineError as error:
        sys.stderr.write(f"{error}\n")
        status = 2
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _direct_streams(output: Path) -> None:
    log = regular_files.open_descriptor(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in ((0, null), (1, log), (2, log)):
        os.dup2(descriptor, number)
    for descriptor in (null, log):
        if descriptor > 2:
            os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
