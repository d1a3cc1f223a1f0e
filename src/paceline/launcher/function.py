"""`paceline.launch(fn, ranks=4, **kwargs)`: a function on several ranks, from a script or a notebook.

The ranks are forked, so the function may be a closure or a lambda, and see everything that the caller sees. What
rank 0 returns comes back.

Where the environment says that other machines do the same (contract.py), all of their ranks are one world, and the
machine of rank 0 gets the result.
"""

from __future__ import annotations

import inspect
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.diagnose.cause import Cause, find_cause
from paceline.errors import LaunchError, PacelineError
from paceline.launcher.cluster import manual, node_env
from paceline.launcher.launch import Launch
from paceline.launcher.local import rank_logs
from paceline.launcher.rank_count import choose_ranks
from paceline.launcher.workload import LocalStart, Workload
from paceline.run import failures
from paceline.run.folder import RunFolder
from paceline.runtime import environment

# Objects that a result may hold, and the module of each.
_OBJECTS = {"History": "paceline.train.history"}


def launch(fn: Callable[..., Any], /, ranks: int | None = None, **kwargs: Any) -> Any:
    """Run `fn(**kwargs)` on `ranks` ranks and return rank 0's result.

    Without a number: one rank for each GPU, else one. Rank 0's output is shown; the others' only when one fails. An
    error on any rank ends all of them and is raised here.
    """
    inspect.signature(fn).bind(**kwargs)  # a call that can't be made is an error here, not on every rank
    found = node_env.read_node_environment(os.environ)
    asked = found.ranks if ranks is None and found is not None else ranks
    number, reason = choose_ranks(asked, device=None, on_cpu=1)
    if ranks is None:
        print(f"ranks: {number} ({reason})", flush=True)
    found = found or node_env.first_rank_contract(os.environ, number)
    with rank_logs.temporary() as logs, tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        result = Path(scratch)
        work = Workload(lambda: _call(fn, kwargs, result))
        if found is None or found.nodes_max == 1:
            _run_here(work, LocalStart(number, logs.folder))
        else:
            _run_among_several(work, number, found)
        return _load(result)


def _run_here(work: Workload, start: LocalStart) -> None:
    from paceline.launcher.local import agent

    outcome = agent.run(work, start)
    if outcome.signal == signal.SIGINT:
        raise KeyboardInterrupt  # what a notebook's stop button and a script's caller expect
    if outcome.signal is not None:
        raise SystemExit(128 + outcome.signal)
    if not outcome.is_good:
        raise _error(find_cause(outcome.ends, oom_killed=outcome.oom_killed), start.logs)


def _run_among_several(work: Workload, ranks: int, found: node_env.NodeEnvironment) -> None:
    print(found.words(), flush=True)
    host, port = found.meeting_place()
    wanted = Launch(ranks, run=None, nodes=(found.nodes_min, found.nodes_max))
    status = manual.launch_manual(work, wanted, manual.ManualNode(found.node_rank, host, port))
    if status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if status:
        raise LaunchError("rank-failed", f"The ranks ended with status {status}; the cause is shown above.")


def _call(fn: Callable[..., Any], kwargs: dict[str, Any], result: Path) -> None:
    import torch

    # The parent may have run a threaded operation: its pool is not in this process, and waiting for it would hang.
    torch.set_num_threads(1)
    value = fn(**kwargs)
    place = environment.read_rank_info()
    if place is None or place.is_main:
        from paceline.runtime import serialization

        serialization.save_result(value, result, _OBJECTS)


def _load(result: Path) -> Any:
    """What rank 0 returned; None where it called sys.exit(0)."""
    from paceline.runtime import serialization

    return serialization.load_result(result, _OBJECTS)


def _error(cause: Cause, logs: RunFolder) -> PacelineError:
    """The rank's own error, or one for the way it ended; with what it had printed if that was not on screen."""
    record = failures.read(logs).get(-1 if cause.rank is None else cause.rank)
    error = LaunchError("rank-failed", f"{cause.what}.", fix=cause.fix) if record is None else record.as_error()
    log = logs.rank_log(cause.rank or 0)
    printed = log.read_text(errors="replace").strip() if log.exists() else ""
    if record is not None:
        printed = printed.replace(record.text.strip(), "").strip()
    if printed and cause.rank:
        error.add_note(f"--- what rank {cause.rank} had printed ---\n{printed[-4000:]}")
    return error
