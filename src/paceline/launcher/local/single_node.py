"""Launch on a single node, with restarts."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from itertools import count

from paceline import log
from paceline.config.launch import LaunchSpec
from paceline.errors import LaunchError
from paceline.launcher.local import interrupts
from paceline.launcher.local import status as local_status
from paceline.launcher.local.start import LocalStart, NodeAssignment, RankLogs, open_logs, prepare_environment
from paceline.launcher.restart_policy import GiveUp, Supervisor
from paceline.launcher.workload import Workload, choose_ranks
from paceline.run import heartbeat
from paceline.run.failures import first_coded
from paceline.run.folder import short
from paceline.run.ledger import Ledger
from paceline.text import plural


def launch_single_node(workload: Workload, spec: LaunchSpec) -> int:
    """Run the workload; returns the exit status for the shell."""
    began = time.time()
    prepare_environment(spec)
    if spec.dry_run:
        ranks, reason = choose_ranks(spec.ranks, device=spec.device, on_cpu=spec.default_cpu_ranks)
        print(f"would start {plural(ranks, 'rank')} on this machine ({reason})")  # noqa: T201
        return 0
    with interrupts.as_exceptions(), open_logs(spec) as logs:
        ranks, reason = choose_ranks(spec.ranks, device=spec.device, on_cpu=spec.default_cpu_ranks)
        named = f"; logs in {short(logs.folder.logs)}" if logs.run else ""
        log.info(f"ranks: {ranks} ({reason}){named}")
        workload.preload()
        try:
            status = _generations(workload, spec, ranks, logs, began)
        except LaunchError as error:
            if not spec.fallback or error.code != "launch.port-in-use":
                raise
            log.info(f"fallback: rendezvous failed ({error.what}); continuing as a single rank")
            status = _generations(workload, replace(spec, port=None), 1, logs, began)
        except SystemExit as signalled:  # while no rank was running
            local_status.show_ledger(logs, int(signalled.code or 0))
            raise
        return status


def _generations(workload: Workload, spec: LaunchSpec, ranks: int, logs: RankLogs, began: float) -> int:
    supervisor, suspect, ledger = Supervisor(spec.max_restarts, spec.on_hang), None, Ledger(logs.run)
    for generation in count(spec.prior_starts):
        start = LocalStart(spec, logs, NodeAssignment(ranks, world=ranks), generation, suspect)
        is_first = generation == spec.prior_starts
        facts = {"nodes": 1, "ranks": ranks, "generation": generation, "resumed": is_first and generation > 0}
        ledger.note("launched", at=began if is_first else None, **facts)
        outcome = local_status.run_shown(workload, start)
        if outcome.signal is not None:
            if record := first_coded(logs.folder):  # a save requested by the signal failed
                print(f"\nrank {record.rank}: {record.text.rstrip()}", file=sys.stderr, flush=True)  # noqa: T201
            local_status.show_ledger(logs, 128 + outcome.signal)
            local_status.interrupted(logs)
            return 128 + outcome.signal
        if outcome.is_good:
            local_status.show_ledger(logs, 0)
            return 0
        samples = {rank: each.samples for rank, each in heartbeat.read_suspects(logs.folder).items()}
        verdict = supervisor.decide(outcome.ends, oom_killed=outcome.oom_killed, suspects=samples, hang=outcome.hang)
        local_status.note_failure(verdict.cause, logs)
        if isinstance(verdict, GiveUp):
            local_status.show_ledger(logs, verdict.cause.status)
            local_status.show_cause(verdict.cause, logs)
            return verdict.cause.status
        suspect = verdict.suspect
        restart = {"kind": "restart", "number": supervisor.restarts, "of": spec.max_restarts}
        log.info(local_status.describe_progress({**restart, "cause": vars(verdict.cause), "delay": verdict.delay}))
        time.sleep(verdict.delay)
    raise AssertionError("unreachable")
