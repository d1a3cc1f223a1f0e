"""The main function of a rank, around the user's code.

A forked rank calls `run_rank` directly; a fresh one is `python -m paceline.launcher.local.rank_main SPEC`, which does
the same in a new interpreter and does not import torch itself.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import io
import json
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from paceline.diagnose.hang import process_stacks, rank_monitor
from paceline.launcher.workload import Target
from paceline.run import failures, heartbeat, regular_files
from paceline.run.folder import RunFolder
from paceline.run.user_frame import find_user_frame
from paceline.runtime import environment
from paceline.runtime.processes import before_shutdown, set_title

_EXIT_SECONDS = 10.0


def run_rank(body: Callable[[], None], logs: RunFolder, name: str, stdin: int | None = None) -> None:
    """Run the body of a rank with its output redirected. A failure is recorded and ends the process. `name`: of the
    function or script, for the title of the process."""
    rank_info = environment.read_rank_info() or environment.RankInfo()
    log = logs.rank_log(rank_info.rank)
    set_title(f"rank {rank_info.rank}/{rank_info.world} {name} (paceline)", f"pl-rank-{rank_info.rank}")
    _reset_inherited_state()
    _direct_streams(log if rank_info.rank else None, stdin if rank_info.rank == 0 else None)
    faulthandler.enable(file=2)  # a crash of native code is in the log with its Python stack, as under torchrun
    _reseed(rank_info.rank)
    process_stacks.allow(logs.stack(rank_info.rank))
    before_shutdown()
    monitor = rank_monitor.start(logs.page(rank_info.rank), logs.heartbeat(rank_info.rank))
    failures.reserve(logs, rank_info.rank)
    failure = None
    try:
        try:
            body()
        except SystemExit as request:
            if failures.exit_code(request):
                if not isinstance(request.code, int):
                    print(request.code, file=sys.stderr)  # noqa: T201
                failure = failures.describe(request, rank_info.rank)
                failures.write(failure, logs)
            elif frame := find_user_frame(request):
                heartbeat.counters.ended = f"has ended at {frame}"
        else:
            heartbeat.counters.ended = "has ended: its code returned" + _waits_for_threads()
        if failure is None:
            heartbeat.mark_returned(logs.heartbeat(rank_info.rank))
            _finish()
            monitor.stop()
    except KeyboardInterrupt:
        os._exit(130)  # the launcher ends the run
    except BaseException as error:
        failure = failures.describe(error, rank_info.rank)
        failures.write(failure, logs, to_log=True)
    if failure is not None:
        _fail(failure.exit_code)


def _waits_for_threads() -> str:
    """Those that the interpreter joins before it exits."""
    threads = [each.name for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    return f", and it waits for the thread {', '.join(threads)}" if threads else ""


def _fail(code: int) -> None:
    """Exit after a failure: run exit handlers with a time limit, because destroying a process group may block."""
    watchdog = threading.Timer(_EXIT_SECONDS, os._exit, (code,))
    watchdog.daemon = True
    watchdog.start()
    atexit._run_exitfuncs()
    _flush()
    os._exit(code)


def _finish() -> None:
    """Shut down like the interpreter does: threads, exit handlers, streams. Connections are closed before, because
    children of this process may hold copies of them, and other ranks would wait for this one."""
    threading._shutdown()  # type: ignore[attr-defined]
    # Ranks that still need this one fail as soon as its connections are closed, and the launcher then sends SIGTERM. It
    # must not turn a clean exit into a kill, or the wrong rank is reported.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    atexit._run_exitfuncs()
    if "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
        gc.collect()
        sys.modules["torch.distributed"].destroy_process_group()
        gc.collect()
    _flush()


def _reseed(rank: int) -> None:
    """Forked ranks inherit the same RNG state; derive a different one for each rank."""
    if "torch" in sys.modules:
        from paceline.runtime import rng

        rng.seed_cpu(rng.derive_seed(sys.modules["torch"].initial_seed(), rank) >> 1)


def _reset_inherited_state() -> None:
    """A forked rank must not run the exit handlers of its parent."""
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    if "paceline.runtime.process_group" in sys.modules:
        sys.modules["paceline.runtime.process_group"].forget()


def _direct_streams(log: Path | None, stdin: int | None) -> None:
    """Rank 0 keeps the terminal; other ranks write to their log. Python's streams are recreated on the descriptors,
    because those of the parent may belong to a notebook or a test runner."""
    if log is not None:
        descriptor = regular_files.open_descriptor(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
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


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the screen is gone
            stream.flush()


def main() -> None:
    """Entry point of a rank in a fresh interpreter."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    target = Target.from_json(spec)
    run_rank(target.run, RunFolder(Path(spec["folder"])), Path(target.name).name)


if __name__ == "__main__":
    main()
