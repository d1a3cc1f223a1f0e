"""Programs in a process of their own, forked from this one, which has imported torch and paceline already: that takes a
new interpreter two to three seconds. A few tests of each kind start one all the same, as a user does."""

from __future__ import annotations

import atexit
import io
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from paceline.runtime import process_group
from paceline.runtime.processes import fork
from paceline.tools.cli.main import main


def paceline(*args: str, cwd: Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The command `paceline` with these arguments."""
    return _completed(lambda: command(*args), cwd, env or {})


def script(path: Path, *args: str, cwd: Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`python PATH` with these arguments."""
    return _completed(lambda: _script(path, args), cwd, env or {})


def function(program: Callable[[], object], cwd: Path) -> subprocess.CompletedProcess[str]:
    """A function without a result."""
    return _completed(program, cwd, {})


def command(*args: str) -> None:
    """In a forked process: become the command."""
    sys.argv = ["paceline", *args]
    main()


def start(program: Callable[[], object], cwd: Path, output: int, errors: int) -> int:
    """The id of a process, in a session of its own, that runs a program and exits with its status."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = fork()
    if pid == 0:
        status = 70
        try:
            os.setsid()
            os.chdir(cwd)
            _forget_parent(output, errors)
            status = _status_of(program)
        finally:
            os._exit(status)
    return pid


def _completed(program: Callable[[], object], cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    def in_environment() -> None:
        os.environ.update(env)
        program()

    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        pid = start(in_environment, cwd, output.fileno(), errors.fileno())
        try:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except BaseException:  # the time of the test is over
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        said = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in (output, errors)]
    return subprocess.CompletedProcess([], status, *said)


def _script(path: Path, args: tuple[str, ...]) -> None:
    sys.argv = [str(path), *args]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def _forget_parent(output: int, errors: int) -> None:
    """Streams, exit handlers, world and random numbers are not those of the tests, which may have compiled models. A
    warning is an error as in them."""
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    process_group.forget()
    counters.clear()
    torch.manual_seed(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, output, errors)):
        os.dup2(descriptor, number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(os.fdopen(os.dup(number), "wb", 0), write_through=True) for number in (1, 2)
    )


def _status_of(program: Callable[[], object]) -> int:
    """Like the interpreter: errors are shown, threads ended and exit handlers run."""
    status = 0
    try:
        program()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        status = 1
        sys.last_value = error
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return status
