"""Launching from the command line: a run folder, rank 0 on screen, and the first failure as the last thing shown."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import LaunchError, PacelineError
from paceline.launcher.console import Console
from paceline.launcher.failure import Failed, Failure, exit_status, first_coded, forget_failures
from paceline.launcher.ranks import choose_ranks
from paceline.launcher.target import Target
from paceline.runtime import environment, folder
from paceline.runtime.lock import require_free

if TYPE_CHECKING:
    from paceline.launcher.agent import Start


@dataclass(frozen=True)
class Launch:
    """What was asked for on the command line or in the recipe."""

    ranks: int | None  # None: choose, and say so
    run: str | None  # name of the run folder; None leaves nothing behind
    on_cpu: int = 1  # ranks to choose where there is no GPU
    device: str | int | None = None
    port: int | None = None
    fresh: bool = False
    fallback: bool = False  # where ranks can't meet, go on as one
    env: Mapping[str, str] | None = None  # variables that every rank must have
    grace: float | None = None  # seconds that a SIGTERM leaves the ranks, where those are more than usual
    resume: str | None = None  # auto: the newest run of that name; or the folder of a run or a checkpoint


def launch_target(target: Target, launch: Launch) -> int:
    """Run a script, module or program on ranks; returns the exit status for the shell."""
    target.check()

    def run(start: Start) -> None:
        from paceline.launcher import agent

        if target.kind == "program" or launch.fresh:
            agent.run_fresh(target, start)
        else:
            agent.run_forked(target.run, start)

    return _launch(launch, run)


def launch_body(body: Callable[[], None], launch: Launch, prepare: Callable[[int], None]) -> int:
    """Run a function of paceline's own on ranks; `prepare` does, before the fork, what need not be done by each."""

    def run(start: Start) -> None:
        from paceline.launcher import agent

        prepare(start.ranks)
        agent.run_forked(body, start)

    return _launch(launch, run)


def _launch(launch: Launch, run: Callable[[Start], None]) -> int:
    os.environ.update(launch.env or {})
    _share_cores(launch.ranks or launch.on_cpu)
    with _logs(launch.run, launch.resume) as logs:
        try:
            with Console(folder.rank_log(logs, 0)):
                _run_ranks(launch, logs, run)
            return 0
        except Failed as failed:
            _show(failed.failure, logs if launch.run else None)
            return exit_status(failed.failure)
        except SystemExit:
            if failure := first_coded(logs):  # a save that the signal asked for, and that went wrong
                _show(failure, logs if launch.run else None)
            where = f"; what there is lies in {folder.short(logs.parent)}" if launch.run else ""
            print(f"\ninterrupted{where}", file=sys.stderr, flush=True)
            raise


def _run_ranks(launch: Launch, logs: Path, run: Callable[[Start], None]) -> None:
    # Only now: importing torch takes a second and reads the environment that was just prepared.
    from paceline.launcher.agent import GRACE, Start

    ranks, reason = choose_ranks(launch.ranks, device=launch.device, on_cpu=launch.on_cpu)
    where = f"; logs in {folder.short(logs)}" if launch.run else ""
    print(f"ranks: {ranks} ({reason}){where}", file=sys.stderr, flush=True)
    try:
        run(Start(ranks, logs, launch.port, max(GRACE, launch.grace or 0.0)))
    except LaunchError as error:
        if not launch.fallback or error.code != "launch.port-in-use":
            raise
        print(f"fallback: the ranks can't meet ({error.what}); going on as one rank", file=sys.stderr, flush=True)
        run(Start(1, logs))


def _share_cores(ranks: int) -> None:
    """A fair share of the cores for each rank, unless somebody decided otherwise; torchrun would give it one."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))


@contextmanager
def _logs(run: str | None, resume: str | None) -> Iterator[Path]:
    """Where ranks log: in the run folder, of which they learn through their environment, or for the time being. A run
    that goes on keeps its folder, and its logs grow."""
    if run is None:
        with tempfile.TemporaryDirectory(prefix="paceline-") as temporary:
            yield Path(temporary)
        return
    if resume not in (None, "auto"):
        folder.require_there(str(resume))
    gone_on = folder.newest(run) if resume == "auto" else folder.run_at(resume) if resume else None
    if gone_on is not None:
        require_free(gone_on)  # another job's logs are none of ours
        logs = gone_on / "logs"
        logs.mkdir(exist_ok=True)
        forget_failures(logs)
        os.environ[environment.RUN_FOLDER] = str(gone_on)
        yield logs
        return
    made = folder.create(run)
    os.environ[environment.RUN_FOLDER] = str(made)
    try:
        yield made / "logs"
    except PacelineError:  # nothing was started, so there is nothing to keep
        shutil.rmtree(made)
        raise


def _show(failure: Failure, logs: Path | None) -> None:
    """The first failure, once, as the last thing on screen."""
    where = f" (log: {folder.short(folder.rank_log(logs, failure.rank))})" if logs else ""
    sys.stdout.flush()
    print(f"\nrank {failure.rank} failed first{where}:\n{failure.text.rstrip()}", file=sys.stderr, flush=True)
