"""What happens inside a rank before, around and after the user's code.

A forked rank runs `run_rank` directly; a fresh one is `python -m paceline.launcher.child SPEC`, which does the same in
a new interpreter and never imports torch for itself.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from paceline.launcher.failure import Failure, describe
from paceline.launcher.target import Target
from paceline.runtime import environment


def run_rank(body: Callable[[], None], logs: Path) -> None:
    """Run a rank's body with its output where it belongs; a failure is recorded, and ends the process."""
    place = environment.read_place() or environment.Place()
    log = logs / f"rank-{place.rank}.log"
    _forget_parent()
    _direct_output(log if place.rank else None)
    try:
        body()
    except KeyboardInterrupt:
        os._exit(130)  # the launcher ends the run: nothing to report
    except SystemExit as exit_request:
        _leave_groups()
        code = _exit_code(exit_request)
        if code:
            Failure(place.rank, time.time(), code, f"rank {place.rank} called sys.exit({code})\n").write(logs)
            _flush()
            os._exit(code)
    except BaseException as error:
        failure = describe(error, place.rank)
        failure.write(logs)  # first, so that its time is before those of ranks that fail because of this one
        _flush()
        with log.open("a") as file:
            file.write(failure.text)
        os._exit(failure.exit_code)
    else:
        _leave_groups()
    atexit._run_exitfuncs()
    _flush()


def _forget_parent() -> None:
    """What the parent does on signals and at its exit (removing temporary folders, say) is not for a forked rank."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]


def _direct_output(log: Path | None) -> None:
    """Rank 0 keeps the screen; the others write to their log. Python's streams are made anew on the descriptors:
    those of the parent may belong to a notebook or a test runner."""
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    sys.stdout = io.TextIOWrapper(os.fdopen(os.dup(1), "wb", 0), line_buffering=True, write_through=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(os.dup(2), "wb", 0), line_buffering=True, write_through=True)


def _exit_code(request: SystemExit) -> int:
    """As the interpreter does: nothing is 0, a number is itself, anything else is printed and is 1."""
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF
    print(request.code, file=sys.stderr)
    return 1


def _leave_groups() -> None:
    """Close what paceline opened, if torch was ever imported."""
    if "paceline.runtime.group" in sys.modules:
        sys.modules["paceline.runtime.group"].leave()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the screen is gone: there is nobody left to tell
            stream.flush()


def main() -> None:
    """A rank in a fresh interpreter."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    target = Target(spec["kind"], spec["name"], tuple(spec["args"]))
    run_rank(target.run, Path(spec["logs"]))


if __name__ == "__main__":
    main()
