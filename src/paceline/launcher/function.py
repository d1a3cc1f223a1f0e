"""`paceline.launch(fn, ranks=4, **kwargs)` runs a function on several ranks, from a script or a notebook.

Ranks are forked, so the function may be a closure or a lambda. The result of rank 0 is returned.

If the environment describes several nodes (cluster/node_env.py), their ranks form one world, and the node of rank 0
receives the result.
"""

from __future__ import annotations

import inspect
import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.config.launch import LaunchSpec
from paceline.diagnose.cause import Cause, find_cause
from paceline.diagnose.exits import unrecorded
from paceline.errors import LaunchError, PacelineError
from paceline.launcher.cluster import manual, node_env
from paceline.launcher.local.start import LocalStart, NodeAssignment, temporary_logs
from paceline.launcher.workload import Workload, choose_ranks, reject_launch_on_rank
from paceline.log import Log
from paceline.run import failures
from paceline.run.folder import RunFolder
from paceline.runtime import environment

# Objects that a result may contain, with the module of each.
_OBJECTS = {"History": "paceline.run.history"}

# Parameters of functions written for torch.multiprocessing.spawn, and the attribute of a rank that each gets.
_FILLED = {"rank": "rank", "local_rank": "local_rank", "world_size": "world"}

# What other launchers call the number of ranks.
_COUNTS = ("world_size", "nprocs", "nproc_per_node", "num_processes", "num_gpus", "n")

_log = Log(stream="stdout")  # interleaves with the output of the caller


def launch(fn: Callable[..., Any], /, ranks: int | None = None, **kwargs: Any) -> Any:
    """Run `fn(**kwargs)` on several ranks and return the result of rank 0.

    Every rank, also of one, is a forked child process, so `fn` may be a closure or a lambda. The output of rank 0 is
    shown; that of others only if they fail. An error on any rank stops all of them and is raised here.

    Args:
        fn: the function. Its parameters `rank`, `local_rank` and `world_size` are filled in if they have no value
        ranks: their number; default: one per GPU, or one without GPUs
        kwargs: arguments of the function

    Returns:
        The result of rank 0: JSON values, tensors, a `History`, or containers of these.

    Raises:
        LaunchError: `launch.rank-failed`, `launch.inside-a-rank`, `launch.missing-argument`, `launch.not-a-function`,
            `launch.bad-result`, `launch.more-ranks-than-gpus`
        PacelineError: the error with a code that a rank raised

    Example:
        >>> import torch
        >>> import paceline
        >>> def total(scale):
        ...     tensor = torch.tensor([paceline.dist.rank() + 1.0])
        ...     paceline.dist.all_reduce(tensor)
        ...     return (tensor * scale).item()
        >>> paceline.launch(total, ranks=2, scale=10)
        30.0
    """
    reject_launch_on_rank("paceline.launch()")
    filled = _filled_parameters(fn, ranks, kwargs)
    found = node_env.read_node_environment(os.environ)
    asked = found.ranks if ranks is None and found is not None else ranks
    number, reason = choose_ranks(asked, device=None, on_cpu=1)
    if ranks is None:
        _log.info(f"ranks: {number} ({reason})")
    found = found or node_env.first_rank_environment(os.environ, number)
    with temporary_logs() as logs, tempfile.TemporaryDirectory(prefix="paceline-") as scratch:
        result = Path(scratch)
        workload = Workload(lambda: _call(fn, kwargs, filled, result), name=getattr(fn, "__name__", ""))
        if found is None or found.nodes.most == 1:
            _run_here(workload, LocalStart(LaunchSpec(), logs, NodeAssignment(number, world=number)))
        else:
            _run_among_several(workload, number, found)
        return _load(result)


def _filled_parameters(fn: Callable[..., Any], ranks: int | None, kwargs: Mapping[str, Any]) -> list[str]:
    """The parameters to fill in on each rank. Invalid arguments are an error here, not on every rank."""
    if not callable(fn):
        raise LaunchError("not-a-function", f"launch() takes a function, got {fn!r:.60}.")
    signature = inspect.signature(fn)
    _reject_other_counts(fn, signature, ranks, kwargs)
    bound = signature.bind_partial(**kwargs).arguments
    required = [name for name, each in signature.parameters.items() if each.default is each.empty]
    missing = [name for name in required if name not in bound and not str(signature.parameters[name]).startswith("*")]
    if unknown := [name for name in missing if name not in _FILLED]:
        name, call = getattr(fn, "__name__", "fn"), ", ".join(f"{each}=..." for each in unknown)
        raise LaunchError(
            "missing-argument",
            f"{name}() has no value for {', '.join(map(repr, unknown))}.",
            why=f"launch passes keyword arguments only, and fills in {', '.join(_FILLED)}",
            fix=f"call paceline.launch({name}, ranks=2, {call})",
        )
    return missing


def _reject_other_counts(
    fn: Callable[..., Any], signature: inspect.Signature, ranks: int | None, kwargs: Mapping[str, Any]
) -> None:
    """Refuse a number of ranks by the name that another launcher has for it. A parameter of fn is its own business, but
    a world_size has to be true."""
    for name, value in kwargs.items():
        is_own = name in signature.parameters and name != "world_size"
        if name in _COUNTS and not is_own and (ranks is None or (name == "world_size" and value != ranks)):
            call = f"paceline.launch({getattr(fn, '__name__', 'fn')}, ranks={value!r})"
            raise LaunchError(
                "bad-options",
                f"launch() got {name}={value!r}, but ranks={ranks!r}.",
                why=f"only `ranks` says how many ranks to start; {name} would be an argument of the function",
                fix=f"use {call}; on each rank, its parameters rank and world_size are filled in",
            )


def _run_here(workload: Workload, start: LocalStart) -> None:
    from paceline.launcher.local import agent, status

    outcome = agent.run(workload, start)
    if outcome.signal is None and not outcome.is_good:
        cause = find_cause(outcome.ends, oom_killed=outcome.oom_killed)
        status.note_failure(cause, start.logs)
        raise _error(cause, start.logs.folder)
    status.show_ledger(start.logs, 128 + outcome.signal if outcome.signal else 0)
    if outcome.signal == signal.SIGINT:
        raise KeyboardInterrupt  # expected by notebooks and callers
    if outcome.signal is not None:
        raise SystemExit(128 + outcome.signal)


def _run_among_several(workload: Workload, ranks: int, found: node_env.NodeEnvironment) -> None:
    _log.info(found.describe())
    nodes = found.nodes
    spec = LaunchSpec(ranks=ranks, nodes=nodes, node_rank=found.node_rank, master=found.endpoint())
    status = manual.launch_manual(workload, spec)
    if status == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if status:
        raise LaunchError("rank-failed", f"Ranks exited with status {status}; the cause is shown above.")


def _call(fn: Callable[..., Any], kwargs: dict[str, Any], filled: Sequence[str], result: Path) -> None:
    import torch

    # The thread pool of the parent does not exist in a forked process, and using it would deadlock.
    torch.set_num_threads(1)
    rank_info = environment.read_rank_info() or environment.RankInfo()
    value = fn(**kwargs, **{name: getattr(rank_info, _FILLED[name]) for name in filled})
    if rank_info.is_main:
        from paceline.runtime import serialization

        serialization.save_result(value, result, _OBJECTS)


def _load(result: Path) -> Any:
    """The result of rank 0; None if it called sys.exit(0)."""
    from paceline.runtime import serialization

    return serialization.load_result(result, _OBJECTS)


def _error(cause: Cause, logs: RunFolder) -> PacelineError:
    """The error of the rank, or one that describes its exit; with its output if that was not on screen."""
    rank = -1 if cause.rank is None else cause.rank
    record = failures.read(logs).get(rank) or unrecorded(logs, rank, cause.status, 0.0)
    waited = f"\n{cause.text}" if cause.kind == "timeout" else ""  # of the ranks that waited for this one
    error = LaunchError("rank-failed", f"{cause.what}.{waited}", fix=cause.fix) if record is None else record.as_error()
    printed = failures.tail(logs, cause.rank or 0, lines=1000).strip()
    if record is not None:
        printed = printed.replace(record.log_text.strip(), "").strip()
    if printed and cause.rank:
        error.add_note(f"--- output of rank {cause.rank} ---\n{printed[-4000:]}")
    return error
