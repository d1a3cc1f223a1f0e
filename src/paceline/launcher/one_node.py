"""A launch on this machine alone: start the ranks, and again where that helps."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from itertools import count

from paceline.errors import LaunchError
from paceline.launcher import interrupts, logs, screen
from paceline.launcher.failure import first_coded
from paceline.launcher.launch import Launch, prepare_environment
from paceline.launcher.logs import Logs
from paceline.launcher.ranks import choose_ranks
from paceline.launcher.supervision import Over, Supervisor
from paceline.launcher.work import Start, Work
from paceline.runtime import folder, progress
from paceline.runtime.ledger import Ledger


def launch_here(work: Work, launch: Launch) -> int:
    """Run it to its end; the exit status for the shell."""
    began = time.time()
    prepare_environment(launch)
    with interrupts.as_exceptions(), logs.opened(launch) as where:
        ranks, reason = choose_ranks(launch.ranks, device=launch.device, on_cpu=launch.on_cpu)
        named = f"; logs in {folder.short(where.path)}" if where.run else ""
        print(f"ranks: {ranks} ({reason}){named}", file=sys.stderr, flush=True)
        work.preload()
        try:
            status = _generations(work, launch, ranks, where, began)
        except LaunchError as error:
            if not launch.fallback or error.code != "launch.port-in-use":
                raise
            print(f"fallback: the ranks can't meet ({error.what}); going on as one rank", file=sys.stderr, flush=True)
            status = _generations(work, replace(launch, port=None), 1, where, began)
        return status


def _generations(work: Work, launch: Launch, ranks: int, where: Logs, began: float) -> int:
    supervisor, suspect, ledger = Supervisor(launch.max_restarts), None, Ledger(where.run)
    for generation in count(launch.restarted):
        start = Start(
            ranks=ranks,
            logs=where.path,
            port=launch.port,
            grace=launch.patience,
            generation=generation,
            max_restarts=launch.max_restarts,
            fresh=launch.fresh,
            environment={**where.environment, **screen.suspect(suspect)},
        )
        is_first = generation == launch.restarted
        facts = {"nodes": 1, "ranks": ranks, "generation": generation, "resumed": is_first and generation > 0}
        ledger.note("launched", at=began if is_first else None, **facts)
        outcome = screen.run_shown(work, start, launch)
        if outcome.signal is not None:
            if record := first_coded(where.path):  # a save that the signal asked for, and that went wrong
                print(f"\nrank {record.rank}: {record.text.rstrip()}", file=sys.stderr, flush=True)
            screen.show_ledger(where, 128 + outcome.signal)
            screen.interrupted(where)
            return 128 + outcome.signal
        if outcome.is_good:
            screen.show_ledger(where, 0)
            return 0
        samples = {rank: each.samples for rank, each in progress.read_suspects(where.path).items()}
        verdict = supervisor.judge(outcome.ends, oom_killed=outcome.oom_killed, suspects=samples)
        screen.note_failure(verdict.cause, where)
        if isinstance(verdict, Over):
            screen.show_ledger(where, verdict.cause.status)
            screen.show_cause(verdict.cause, where)
            return verdict.cause.status
        suspect = verdict.suspect
        told = {"cause": vars(verdict.cause), "number": supervisor.restarts, "of": launch.max_restarts}
        print(screen.again({**told, "delay": verdict.delay}), file=sys.stderr, flush=True)
        time.sleep(verdict.delay)
    raise AssertionError("counting never ends")
