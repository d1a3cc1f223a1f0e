"""Forks this process, titles processes for ps, top and nvidia-smi, and keeps gloo's threads from doing harm.

A worker frees a finished collective, with the tensors and callbacks that it holds, after `wait()` has returned. For
tensors of Python it needs the GIL. Whoever destroys the group joins its workers, and may hold the GIL meanwhile: DDP's
reducer does, if it is the last to refer to the group (pytorch/pytorch#56297). Both then wait for each other for ever.
A worker may also drop the last reference to the group itself, and join itself ("Resource deadlock avoided"), or ask
for the GIL while the interpreter finalizes, and abort ("terminate called without an active exception").

torch has no call that waits for this, so the state of the threads is read from /proc. `before_shutdown` makes every
group wait, also those that a script opens: `destroy_process_group` calls `ProcessGroup.shutdown` of each group first.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError

_PR_SET_NAME = 15  # Linux prctl
_ARG_START = 45  # position of the address of the arguments in /proc/self/stat, after the name; their end is next


def set_title(title: str, name: str) -> None:
    """Set the command line of this process, cut to the length of the current one, and its name in top, of at most 15
    letters. Python has copied its arguments, so their memory is free to be overwritten."""
    if sys.platform != "linux":
        return
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_START + 1])
        if start and end > start:  # 0 where the system hides them
            space = end - start - 1  # a zero at the end
            ctypes.memmove(start, title.encode(errors="replace")[:space].ljust(space, b"\0"), space)
    prctl(_PR_SET_NAME, name.encode()[:15])


def prctl(option: int, value: int | bytes) -> None:
    """Of Linux; elsewhere it does nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def fork() -> int:
    """`os.fork()`, with a child that never collects the garbage of its parent.

    Some objects own threads, which a fork does not copy. A `TCPStore` joins its thread when it is destroyed. In the
    child, the memory of that thread may belong to another one by then: the child would wait forever, or abort.
    """
    process = os.fork()
    if process == 0:
        gc.freeze()
    return process


def run_forked(body: Callable[[], int | None]) -> int:
    """Fork a process that exits with what `body` returns, or 1 after an exception. Returns its number."""
    process = fork()
    if process == 0:
        status = 1
        try:
            status = body() or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)  # whatever happens, this copy must not continue with the code of its parent
    return process


def call_in_child(function: Callable[[], Any]) -> Any:
    """What a function returns in a forked process, as JSON: one that may start threads or initialize CUDA, after which
    this process could not fork any more. An exception is a RuntimeError here, unless it has a code."""
    receiving, sending = os.pipe()

    def answer() -> None:
        try:
            found: dict[str, Any] = {"value": function()}
        except PacelineError as error:
            found = {"error": error.to_dict()}
        except BaseException as error:
            found = {"raised": str(error) or type(error).__name__}
        os.write(sending, json.dumps(found).encode())

    process = run_forked(answer)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        text = pipe.read()
    os.waitpid(process, 0)
    found = json.loads(text or b'{"raised": "the process was killed"}')
    if "error" in found:
        raise PacelineError.from_dict(found["error"])
    if "raised" in found:
        raise RuntimeError(found["raised"])
    return found["value"]


_WORKER, _LOOP = "pt_gloo_runloop", "gloo_tcp_loop"  # names of gloo's threads
_INTERVAL = 0.005  # seconds; sleeping releases the GIL, which a worker may be waiting for


def before_shutdown() -> None:
    """Wait in every `destroy_process_group` of this process from now on, also if torch is not imported yet."""
    if "torch._C._distributed_c10d" in sys.modules:
        _wait_in_shutdown(sys.modules["torch._C._distributed_c10d"].ProcessGroup)
    elif not any(isinstance(finder, _TorchImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchImport())


class _TorchImport:
    """Notices that torch is being imported. Finds nothing itself."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torch.distributed.distributed_c10d":  # the extension has been initialized
            sys.meta_path.remove(self)
            before_shutdown()


def _wait_in_shutdown(group: Any) -> None:
    """torch has no hook there. The method is replaced in the class, because scripts import functions by name."""
    shutdown = group.shutdown
    if getattr(shutdown, "waits_for_gloo", False):
        return

    def wait_and_shutdown(self: Any) -> None:
        wait_until_idle()
        shutdown(self)

    wait_and_shutdown.waits_for_gloo = True  # type: ignore[attr-defined]
    group.shutdown = wait_and_shutdown


def wait_until_idle(timeout: float = 2.0) -> None:
    """Return when no worker has run for two intervals, or after `timeout` seconds."""
    if sys.platform != "linux":
        time.sleep(4 * _INTERVAL)
        return
    deadline = time.monotonic() + timeout
    before = _workers()
    quiet = 0 if before else 2
    while quiet < 2 and time.monotonic() < deadline:
        time.sleep(_INTERVAL)
        workers = _workers()
        quiet = quiet + 1 if workers == before and all("\tS " in each for each in workers) else 0
        before = workers


def _workers() -> list[str]:
    """The state and the number of context switches of each worker: a worker that ran in between has another number."""
    found = [status for _, status in _threads(_WORKER)]
    return [
        "".join(line for line in each.splitlines() if line.startswith(("State", "volun", "nonvol"))) for each in found
    ]


def _threads(*names: str) -> Iterator[tuple[int, str]]:
    """The number and the status of each thread of this process with one of these names."""
    for task in sorted(Path("/proc/self/task").iterdir()):
        with suppress(OSError):  # it has ended
            status = (task / "status").read_text()
            if status.partition("\n")[0].removeprefix("Name:\t") in names:
                yield int(task.name), status


def keep_gloo_from_preempting() -> None:
    """Call when groups have been created. gloo's loop polls without a pause while another thread holds the lock of a
    connection. If it preempts that thread when data arrive, it polls for a whole time slice, in which nothing is sent:
    where ranks outnumber cores, that was half of the time of a collective."""
    if sys.platform == "linux":
        for thread, _ in _threads(_WORKER, _LOOP):
            with suppress(OSError):  # a sandbox may forbid it
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
