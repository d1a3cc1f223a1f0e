"""What a launch shows: the output of ranks, the first failure, and where the time went."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import log
from paceline.diagnose import goodput
from paceline.diagnose.cause import Cause
from paceline.diagnose.exits import has_traceback
from paceline.errors import PacelineError
from paceline.launcher.local.console import Console
from paceline.launcher.local.start import AgentObserver, LocalStart, RankLogs
from paceline.launcher.workload import Workload
from paceline.run import heartbeat, requested_report
from paceline.run.ledger import RunEnd
from paceline.run.user_frame import hide_library_frames

if TYPE_CHECKING:
    from paceline.launcher.local.agent import LocalResult


def run_shown(workload: Workload, start: LocalStart, watch: AgentObserver | None = None) -> LocalResult:
    """Run the ranks of this node, with rank 0 and those of `--tee` on screen."""
    from paceline.launcher.local import agent

    ranks, logs = start.node.rank_range, start.logs.folder
    shown = {rank: logs.rank_log(rank) for rank in start.spec.tee if rank in ranks}
    with ExitStack() as stack:
        if 0 in ranks or shown:
            first = logs.rank_log(0) if 0 in ranks else None
            stack.enter_context(Console(first, shown))
        return agent.run(workload, start, watch)


def show_cause(cause: Cause, logs: RankLogs | None) -> None:
    """Print the first failure, as the last output."""
    failed = f"rank {cause.rank} failed first" if cause.rank is not None else f"node {cause.node} failed first"
    who = "ranks made no progress" if cause.kind == "hang" else failed
    log = _log_of(cause, logs)
    sys.stdout.flush()
    lines = [f"\n{who}{f' (log: {log})' if log else ''}: {cause.kind}", *_end_of(cause, logs).lines()]
    print("\n".join(lines), file=sys.stderr, flush=True)  # noqa: T201


def _log_of(cause: Cause, logs: RankLogs | None) -> str:
    return logs.of_rank(cause.rank) if logs is not None and cause.rank is not None else ""


def _end_of(cause: Cause, logs: RankLogs | None) -> RunEnd:
    """The record of a failure, with the last step and the text that is shown."""
    log, text = _log_of(cause, logs), cause.text
    if log:
        # Of these kinds, the text is that of a rank that waited for the one to blame.
        file = str(Path(log).parent) if cause.kind in ("timeout", "lost-connection") else log
        text = hide_library_frames(f"{text}\n", file).rstrip()
    if text and cause.kind != "exception" and not has_traceback(text) and not text.startswith("["):
        text = f"last lines of its {'log' if cause.rank is not None else 'output'}:\n{text}"
    pages = {} if logs is None else heartbeat.read(logs.folder)
    return replace(cause, text=text).to_end(max((page.step for page in pages.values()), default=0))


def describe_progress(message: Mapping[str, Any], names: Sequence[str] = ()) -> str:
    """The log line of a message of the coordinator, with the names of nodes if there are any; empty if none."""
    if message["kind"] == "waiting":
        missing = ", ".join(names[node] if names else str(node) for node in message["missing"])
        return f"waiting for nodes: {message['joined']} of {message['nodes']} joined, missing: {missing}"
    if message["kind"] == "restart":
        cause, delay = message["cause"], message["delay"]
        when = f" in {delay:g} s" if delay else ""
        number = f"restart {message['number']} of {message['of']}"
        return f"{number}{when}: {cause['what'].splitlines()[0]} ({cause['kind']})"
    return str(message.get("text", ""))


def show_end(message: Mapping[str, Any], logs: RankLogs | None) -> None:
    """Print how a job of several nodes ended."""
    if message["error"] is not None:
        print(PacelineError.from_dict(message["error"]), file=sys.stderr, flush=True)  # noqa: T201
    elif message["cause"] is not None:
        show_cause(Cause(**message["cause"]), logs)
    elif message["signal"]:
        interrupted(logs)


def interrupted(logs: RankLogs | None) -> None:
    where = f"; partial results are in {logs.run.short}" if logs is not None and logs.run else ""
    log.info(f"\ninterrupted{where}")


def show_ledger(logs: RankLogs, status: int) -> None:
    """Complete the ledger of this launch, and log where the time went if anything was trained."""
    logs.note("ended", status=status)
    if logs.run is None:
        return
    account = goodput.summarize(logs.run)
    if account.training:
        log.info(account.table())
    requested_report.write_all(logs.run)


def note_failure(cause: Cause, logs: RankLogs) -> None:
    """Record the cause of a failure and the last step."""
    logs.note("failed", **_end_of(cause, logs).to_event())
