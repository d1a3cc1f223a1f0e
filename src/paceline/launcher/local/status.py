"""What a person sees of a launch: the output of ranks, the first failure once, and where the time went."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from paceline import log
from paceline.diagnose.cause import Cause
from paceline.diagnose.signatures import has_traceback
from paceline.errors import PacelineError
from paceline.launcher.local.console import Console
from paceline.launcher.local.rank_logs import RankLogs
from paceline.launcher.local.start import LocalStart
from paceline.launcher.workload import Workload
from paceline.run import goodput, heartbeat
from paceline.run.ledger import Ledger
from paceline.runtime import environment

if TYPE_CHECKING:
    from paceline.launcher.local.agent import AgentObserver, LocalResult


def run_shown(workload: Workload, start: LocalStart, watch: AgentObserver | None = None) -> LocalResult:
    """Start the ranks of this machine and stay until they have ended, with those on screen that belong there."""
    from paceline.launcher.local import agent

    ranks, logs = start.node.rank_range, start.logs.folder
    shown = {rank: logs.rank_log(rank) for rank in start.spec.tee if rank in ranks}
    with ExitStack() as stack:
        if 0 in ranks or shown:
            first = logs.rank_log(0) if 0 in ranks else None
            stack.enter_context(Console(first, shown))
        return agent.run(workload, start, watch)


def show_cause(cause: Cause, logs: RankLogs | None) -> None:
    """The first failure, once, as the last thing on screen."""
    who = f"rank {cause.rank} failed first" if cause.rank is not None else f"node {cause.node} failed first"
    log = logs.of_rank(cause.rank) if logs is not None and cause.rank is not None else ""
    lines = [f"\n{who}{f' (log: {log})' if log else ''}: {cause.kind}", cause.what]
    if cause.text and not has_traceback(cause.text) and not cause.text.startswith("["):
        lines.append("the last lines of its log:" if cause.rank is not None else "its last words:")
    lines += [cause.text] * bool(cause.text) + [f"fix: {cause.fix}"] * bool(cause.fix)
    sys.stdout.flush()
    print("\n".join(lines), file=sys.stderr, flush=True)  # noqa: T201


def again(message: Mapping[str, Any]) -> str:
    """That the ranks are started again, and why."""
    cause, delay = message["cause"], message["delay"]
    when = f" in {delay:g} s" if delay else ""
    number = f"restart {message['number']} of {message['of']}"
    return f"{number}{when}: {cause['what'].splitlines()[0]} ({cause['kind']})"


def show_end(message: Mapping[str, Any], logs: RankLogs | None) -> None:
    """How a job of several nodes ended."""
    if message["error"] is not None:
        print(PacelineError.from_dict(message["error"]), file=sys.stderr, flush=True)  # noqa: T201
    elif message["cause"] is not None:
        show_cause(Cause(**message["cause"]), logs)
    elif message["signal"]:
        interrupted(logs)


def interrupted(logs: RankLogs | None) -> None:
    where = f"; what there is lies in {logs.run.short}" if logs is not None and logs.run else ""
    log.info(f"\ninterrupted{where}")


def show_ledger(logs: RankLogs, status: int) -> None:
    """Closes the account of this launch, and says where the time went if there was a training."""
    if logs.run is None:
        return
    Ledger(logs.run).note("ended", status=status)
    account = goodput.summarize(logs.run)
    if account.training:
        log.info(account.table())


def note_failure(cause: Cause, logs: RankLogs) -> None:
    """In the account of the run: why it failed, and how far it was."""
    done = max((page.step for page in heartbeat.read(logs.folder).values()), default=0)
    Ledger(logs.run).note("failed", cause=cause.kind, rank=cause.rank, step=done)


def suspect(step: int | None) -> dict[str, str]:
    """The step whose samples ranks shall write down, as they are told it."""
    return {} if step is None else {environment.SUSPECT_STEP: str(step)}
