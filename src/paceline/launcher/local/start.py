"""One start of the ranks of this node: where their logs are, and the environment variables of launcher and ranks."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline import log
from paceline.config.launch import Endpoint, LaunchSpec
from paceline.diagnose.hang.evidence import Hang, RankEvidence
from paceline.diagnose.hang.progress_limits import NoProgress
from paceline.errors import PacelineError
from paceline.run import folder, ledger
from paceline.run.folder import RunFolder
from paceline.run.lock import require_free
from paceline.runtime import environment


@dataclass(frozen=True)
class RankLogs:
    """`folder` is where this node keeps its ranks' logs: in the run folder, or in a temporary one if the launch has no
    run folder or this node can't access it."""

    folder: RunFolder
    run: RunFolder | None

    @property
    def environment(self) -> dict[str, str]:
        """The variables that tell ranks where their heartbeats belong, and about the run folder."""
        run = {} if self.run is None else {environment.RUN_FOLDER: str(self.run)}
        return {environment.LOG_FOLDER: str(self.folder), **run}

    def note(self, event: str, **values: Any) -> None:
        """In the ledgers of this launch and of all runs of its ranks. Those that have finished stay so."""
        own = {} if self.run is None else {self.run.current: False}
        for each, has_finished in {**ledger.opened(self.folder), **own}.items():
            if not has_finished:
                ledger.Ledger(each).note(event, **values)
            elif event == "ended":
                ledger.Ledger(each).note(event, **{**values, "status": 0})

    def of_rank(self, rank: int) -> str:
        """The path of a rank's log for display; empty if the log is temporary."""
        return "" if self.run is None else folder.short(self.folder.current.rank_log(rank))


class NodeAssignment(NamedTuple):
    """Which ranks this node runs, and how they reach the others."""

    ranks: int  # on this node
    world: int  # ranks on all nodes
    number: int = 0  # of this node
    nodes: int = 1
    first_rank: int = 0  # of this node
    store: Endpoint | None = None  # of several nodes; a single one opens its own
    interface: str | None = None  # network interface to the other nodes
    orphan_seconds: float = 0.0  # that ranks may continue without this launcher

    @property
    def rank_range(self) -> range:
        return range(self.first_rank, self.first_rank + self.ranks)


class LocalStart(NamedTuple):
    """One start of the ranks of this node."""

    spec: LaunchSpec
    logs: RankLogs
    node: NodeAssignment
    generation: int = 0  # number of earlier starts
    suspect: int | None = None  # a step whose samples ranks record


class AgentObserver:
    """Connects the agent to whoever decides about its ranks; this one to nobody."""

    hang: Hang | None = None  # for which the ranks of this node are being stopped
    others_ended = False  # ranks of other nodes have, or one of theirs is unable to exit

    def started(self, pids: Collection[int]) -> None:
        """The ranks are running."""

    def failing(self) -> None:
        """A rank of this node failed; the others get a moment to exit."""

    def interrupted(self, number: int) -> None:
        """This launcher received a signal that ends the run; SIGKILL: a second Ctrl-C."""

    def standstill(self, found: NoProgress, ranks: Sequence[RankEvidence]) -> None:
        """The ranks make no progress. Called again if that lasts."""

    def continued(self, seconds: float) -> None:
        """They make progress again, after so long."""

    def wants_evidence(self) -> bool:
        """Whether to call `evidence` with what is known of the ranks now."""
        return False

    def evidence(self, ranks: Sequence[RankEvidence], still: float, limit: float) -> None:
        """`still`: for how long none of them has made progress; `limit`: how long they may."""

    def order(self) -> int | None:
        """A signal to send to the ranks; 0 if ranks of another node failed; None to continue."""
        return None


def prepare_environment(spec: LaunchSpec) -> None:
    """Call before torch is imported, which reads them."""
    os.environ.update(spec.env)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    # Divide the cores among the ranks unless the user decided otherwise; torchrun sets 1.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // (spec.ranks or spec.default_cpu_ranks))))


def rank_environment(start: LocalStart, rendezvous: Endpoint, error_folder: str) -> list[dict[str, str]]:
    """The variables of each rank of this node: torchrun's, and ours."""
    node, spec, run_id = start.node, start.spec, uuid.uuid4().hex
    common = {
        environment.LAUNCHED: "1",
        **start.logs.environment,
        **({environment.RUN_NAMED: "1"} if spec.is_named else {}),
        **({} if start.suspect is None else {environment.SUSPECT_STEP: str(start.suspect)}),
        "GROUP_RANK": str(node.number),
        "GROUP_WORLD_SIZE": str(node.nodes),
        "ROLE_NAME": "rank",
        "ROLE_WORLD_SIZE": str(node.world),
        "MASTER_ADDR": rendezvous.host,
        "MASTER_PORT": str(rendezvous.port),
        environment.RESTART_COUNT: str(start.generation),
        "TORCHELASTIC_MAX_RESTARTS": str(max(spec.max_restarts, start.generation)),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if sys.platform == "linux" and (interface := node.interface or ("lo" if node.nodes == 1 else None)):
        # A value set by the user takes precedence.
        common |= {name: os.environ.get(name, value) for name, value in environment.interfaces(interface).items()}
    each = []
    for local, rank in enumerate(node.rank_range):
        own = environment.variables(environment.RankInfo(rank, node.world, local, node.ranks))
        # Where torch's @record, which many scripts use, writes an exception.
        error_file = f"{error_folder}/{local}.json"
        each.append({**common, **own, "ROLE_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": error_file})
    return each


@contextmanager
def open_logs(spec: LaunchSpec) -> Iterator[RankLogs]:
    """The run folder of a launch: a new one or, for `resume`, an existing one, whose logs are appended to. Without a
    name, a temporary folder."""
    run, resume = spec.run, spec.resume
    if run is None:
        with temporary_logs() as logs:
            yield logs
        return
    if resume not in (None, "auto"):
        folder.require_exists(str(resume))
    # A script may train in another folder; the folder of its launch then contains logs and a ledger that refers to it.
    newest = RunFolder.newest_launch(run) if spec.prior_starts else RunFolder.newest(run)
    resumed = newest if resume == "auto" else RunFolder.at(resume) if resume else None
    if resumed is not None:
        require_free(resumed)  # another job may be writing to its logs
        resumed.logs.mkdir(exist_ok=True)
    opened = resumed or RunFolder.create(run)
    is_link = opened.path.is_symlink()
    try:
        yield RankLogs(opened, opened)
    except PacelineError:
        if resumed is None and _is_unused(opened):  # no rank was started
            shutil.rmtree(opened.path)
        raise
    finally:
        if opened.path.is_symlink() and not is_link:  # a Trainer has given it another name
            log.info(f"run folder: {opened.short}")
            opened.path.unlink()


@contextmanager
def temporary_logs(run: RunFolder | None = None) -> Iterator[RankLogs]:
    """Logs of a launch without a run folder, or of a node that can't write to it, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as path:
        made = RunFolder(Path(path))
        made.logs.mkdir()
        yield RankLogs(made, run)


@contextmanager
def shared_logs(run: str | None) -> Iterator[RankLogs]:
    """The logs of another node than the first: in the run folder, or in a temporary one if it can't write there."""
    shared_run = None if run is None else RunFolder(Path(run))
    if shared_run is not None and _can_log_to(shared_run):
        yield RankLogs(shared_run, shared_run)
        return
    with temporary_logs(shared_run) as logs:
        yield logs


def _can_log_to(run: RunFolder) -> bool:
    try:
        run.logs.mkdir(parents=True, exist_ok=True)
    except OSError:  # this node has no such disk, or no permission to write there
        return False
    return True


def _is_unused(run: RunFolder) -> bool:
    """Whether the folder holds only what the launcher writes before it starts ranks."""
    files = [path for path in run.path.rglob("*") if not path.is_dir()]
    return all(path == run.ledger or path.stat().st_size == 0 for path in files)
