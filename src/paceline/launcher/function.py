"""`paceline.launch(fn, ranks=4, **kwargs)`: a function on several ranks, from a script or a notebook.

The ranks are forked, so the function may be a closure or a lambda, and see everything that the caller sees. What
rank 0 returns comes back.

Where the environment says that other machines do the same (cluster/node_env.py), all of their ranks are one world, and
the machine of rank 0 gets the result.
"""

from __future__ import annotations

import inspect
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.config.launch import LaunchSpec, NodeRange
from paceline.diagnose.cause import Cause, find_cause
from paceline.errors import LaunchError, PacelineError
from paceline.launcher.cluster import manual, node_env
from paceline.launcher.local import rank_logs
from paceline.launcher.local.start import LocalStart, NodeAssignment
from paceline.launcher.rank_count import choose_ranks
from paceline.launcher.workload import Workload
from paceline.log import Log
from paceline.run import failures
from paceline.run.folder import RunFolder
from paceline.runtime import environment

# Objects that a result may hold, and the module of each.
_OBJECTS = {"History": "paceline.train.history"}

_log = Log(stream="stdout")  # between what the caller prints


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
        _log.info(f"ranks: {number} ({reason})")
    found = found or node_env.first_rank_environment(os.environ, number)
    with rank_logs.temporary() as logs, tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        result = Path(scratch)
        workload = Workload(lambda: _call(fn, kwargs, result))
        if found is None or found.nodes_max == 1:
            _run_here(workload, LocalStart(LaunchSpec(), logs, NodeAssignment(number, world=number)))
        else:
            _run_among_several(workload, number, found)
        return _load(result)


def _run_here(workload: Workload, start: LocalStart) -> None:
    from paceline.launcher.local import agent

    outcome = agent.run(workload, start)
    if outcome.signal == signal.SIGINT:
        raise KeyboardInterrupt  # what a notebook's stop button and a script's caller expect
    if outcome.signal is not None:
        raise SystemExit(128 + outcome.signal)
    if not outcome.is_good:
        raise _error(find_cause(outcome.ends, oom_killed=outcome.oom_killed), start.logs.folder)


def _run_among_several(workload: Workload, ranks: int, found: node_env.NodeEnvironment) -> None:
    _log.info(found.words())
    nodes = NodeRange(found.nodes_min, found.nodes_max)
    spec = LaunchSpec(ranks=ranks, nodes=nodes, node_rank=found.node_rank, master=found.endpoint())
    status = manual.launch_manual(workload, spec)
    if status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if status:
        raise LaunchError("rank-failed", f"The ranks ended with status {status}; the cause is shown above.")


def _call(fn: Callable[..., Any], kwargs: dict[str, Any], result: Path) -> None:
    import torch

    # The parent may have run a threaded operation: its pool is not in this process, and waiting for it would hang.
    torch.set_num_threads(1)
    value = fn(**kwargs)
    rank_info = environment.read_rank_info()
    if rank_info is None or rank_info.is_main:
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
