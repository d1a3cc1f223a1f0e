"""A launch on this machine alone: start the ranks, and again where that helps."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from itertools import count

from paceline.errors import LaunchError
from paceline.launcher.launch import Launch, prepare_environment
from paceline.launcher.local import interrupts, rank_logs
from paceline.launcher.local import status as local_status
from paceline.launcher.local.rank_logs import RankLogs
from paceline.launcher.rank_count import choose_ranks
from paceline.launcher.restart_policy import GiveUp, Supervisor
from paceline.launcher.workload import LocalStart, Workload
from paceline.run import heartbeat
from paceline.run.failures import first_coded
from paceline.run.folder import short
from paceline.run.ledger import Ledger


def launch_single_node(work: Workload, launch: Launch) -> int:
    """Run it to its end; the exit status for the shell."""
    began = time.time()
    prepare_environment(launch)
    with interrupts.as_exceptions(), rank_logs.opened(launch) as where:
        ranks, reason = choose_ranks(launch.ranks, device=launch.device, on_cpu=launch.on_cpu)
        named = f"; logs in {short(where.folder.logs)}" if where.run else ""
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


def _generations(work: Workload, launch: Launch, ranks: int, where: RankLogs, began: float) -> int:
    supervisor, suspect, ledger = Supervisor(launch.max_restarts), None, Ledger(where.run)
    for generation in count(launch.restarted):
        start = LocalStart(
            ranks=ranks,
            logs=where.folder,
            port=launch.port,
            grace=launch.patience,
            generation=generation,
            max_restarts=launch.max_restarts,
            fresh=launch.fresh,
            environment={**where.environment, **local_status.suspect(suspect)},
        )
        is_first = generation == launch.restarted
        facts = {"nodes": 1, "ranks": ranks, "generation": generation, "resumed": is_first and generation > 0}
        ledger.note("launched", at=began if is_first else None, **facts)
        outcome = local_status.run_shown(work, start, launch)
        if outcome.signal is not None:
            if record := first_coded(where.folder):  # a save that the signal asked for, and that went wrong
                print(f"\nrank {record.rank}: {record.text.rstrip()}", file=sys.stderr, flush=True)
            local_status.show_ledger(where, 128 + outcome.signal)
            local_status.interrupted(where)
            return 128 + outcome.signal
        if outcome.is_good:
            local_status.show_ledger(where, 0)
            return 0
        samples = {rank: each.samples for rank, each in heartbeat.read_suspects(where.folder).items()}
        verdict = supervisor.decide(outcome.ends, oom_killed=outcome.oom_killed, suspects=samples)
        local_status.note_failure(verdict.cause, where)
        if isinstance(verdict, GiveUp):
            local_status.show_ledger(where, verdict.cause.status)
            local_status.show_cause(verdict.cause, where)
            return verdict.cause.status
        suspect = verdict.suspect
        told = {"cause": vars(verdict.cause), "number": supervisor.restarts, "of": launch.max_restarts}
        print(local_status.again({**told, "delay": verdict.delay}), file=sys.stderr, flush=True)
        time.sleep(verdict.delay)
    raise AssertionError("counting never ends")
