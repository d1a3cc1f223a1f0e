"""What happens inside a rank before, around and after the user's code.

A forked rank runs `run_rank` directly; a fresh one is `python -m paceline.launcher.local.rank_main SPEC`, which does
the same in a new interpreter and never imports torch for itself.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import json
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from paceline.launcher.local import interrupts
from paceline.launcher.workload import Target
from paceline.run.failures import FailureRecord, describe
from paceline.run.folder import RunFolder
from paceline.runtime import environment

_PR_SET_PDEATHSIG = 1  # Linux's prctl: a signal to get when the parent ends
_EXIT_SECONDS = 10.0


def run_rank(body: Callable[[], None], logs: RunFolder, stdin: int | None = None) -> None:
    """Run a rank's body with its output where it belongs; a failure is recorded, and ends the process."""
    rank_info = environment.read_rank_info() or environment.RankInfo()
    log = logs.rank_log(rank_info.rank)
    _forget_parent()
    _direct_streams(log if rank_info.rank else None, stdin if rank_info.rank == 0 else None)
    _reseed(rank_info.rank)
    code = 0
    try:
        body()
    except KeyboardInterrupt:
        os._exit(130)  # the launcher ends the run: nothing to report
    except SystemExit as request:
        code = _exit_code(request)
        if code:
            words = f": {request.code}" if isinstance(request.code, str) else ""
            FailureRecord(
                rank_info.rank, time.time(), code, f"rank {rank_info.rank} called sys.exit({code}){words}\n"
            ).write(logs)
    except BaseException as error:
        failure = describe(error, rank_info.rank)
        failure.write(logs)  # first, so that its time is before those of ranks that fail because of this one
        with log.open("a") as file:
            file.write(failure.text)
        code = failure.exit_code
    if code:
        _fail(code)
    _finish()


def _fail(code: int) -> None:
    """The end of a rank that failed: its exit functions run, but may not hold it up (a group may be hard to close)."""
    watchdog = threading.Timer(_EXIT_SECONDS, os._exit, (code,))
    watchdog.daemon = True
    watchdog.start()
    atexit._run_exitfuncs()
    _flush()
    os._exit(code)


def _finish() -> None:
    """The end of an interpreter, in its order: threads, exit functions, streams. The process itself lives on until
    the launcher has taken note, so what others could be waiting for is closed as if it were gone."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
        gc.collect()
        sys.modules["torch.distributed"].destroy_process_group()
        gc.collect()
    _flush()


def _reseed(rank: int) -> None:
    """Forked ranks begin with one and the same random state; each gets its own, which follows from the parent's."""
    if "torch" in sys.modules:
        from paceline.runtime import rng

        rng.seed_cpu(rng.derive_seed(sys.modules["torch"].initial_seed(), rank) >> 1)


def _forget_parent() -> None:
    """What the parent does on signals and at its exit (removing temporary folders, say) is not for a forked rank."""
    os.environ.pop(interrupts.TORCHS_OWN, None)
    if sys.platform == "linux":  # torch asks for a SIGINT here; what comes then is the reaper's affair
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup stays nohup
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    if "paceline.runtime.process_group" in sys.modules:
        sys.modules["paceline.runtime.process_group"].forget()


def _direct_streams(log: Path | None, stdin: int | None) -> None:
    """Rank 0 keeps screen and keyboard; the others write to their log. Python's streams are made anew on the
    descriptors: those of the parent may belong to a notebook or a test runner."""
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    if stdin is not None:
        os.dup2(stdin, 0)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    errors = getattr(sys.__stdout__, "errors", None)
    for number, name in ((1, "stdout"), (2, "stderr")):
        binary = os.fdopen(os.dup(number), "wb", 0)
        setattr(sys, name, io.TextIOWrapper(binary, errors=errors, line_buffering=True, write_through=True))


def _exit_code(request: SystemExit) -> int:
    """As the interpreter does: nothing is 0, a number is itself, anything else is printed and is 1."""
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF
    print(request.code, file=sys.stderr)  # noqa: T201
    return 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the screen is gone: there is nobody left to tell
            stream.flush()


def main() -> None:
    """A rank in a fresh interpreter."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    target = Target.from_json(spec)
    run_rank(target.run, RunFolder(Path(spec["folder"])))


if __name__ == "__main__":
    main()
