"""The launcher of one node in a job of several: joins the coordinator and executes its messages."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from paceline import log
from paceline.config.launch import Endpoint, LaunchSpec
from paceline.diagnose.cause import Cause
from paceline.diagnose.hang.evidence import RankEvidence
from paceline.diagnose.hang.progress_limits import NoProgress
from paceline.errors import LaunchError, PacelineError
from paceline.launcher.cluster.channel import Channel, ChannelClosed, Message, connect
from paceline.launcher.cluster.coordinator import HEARTBEAT_SECONDS, SILENCE_SECONDS
from paceline.launcher.cluster.fingerprint import fingerprint
from paceline.launcher.cluster.membership import JoinRequest
from paceline.launcher.local import hang_detector, interrupts
from paceline.launcher.local import status as local_status
from paceline.launcher.local.rank_parent import kill_orphans, start_time
from paceline.launcher.local.start import AgentObserver, LocalStart, NodeAssignment, RankLogs, open_logs, shared_logs
from paceline.launcher.workload import Workload
from paceline.run import heartbeat
from paceline.run.folder import short
from paceline.run.ledger import Ledger
from paceline.runtime.network import interface_of

if TYPE_CHECKING:
    from paceline.launcher.local.agent import LocalResult

_COORDINATOR_LOST = 78  # exit status
_RETRY_SECONDS = 0.2
_REJECTED_SECONDS = 2.0  # in which the coordinator closes every connection of a launcher with a wrong token
_ANSWER_SECONDS = 10.0
_FIRST_REMINDER, _REMINDER = 3.0, 30.0
_LEAVE_SECONDS = 4.0  # for ranks to exit when the coordinator is lost
_ORPHAN_SECONDS = 60.0  # for which ranks keep running without a launcher if another one may take over


class Node(AgentObserver):
    """`addresses`: of the coordinator; `number`: of this node, None to get one assigned. `orders`: standard input of a
    launcher started by a front end; when it is closed, the launcher exits."""

    def __init__(
        self,
        workload: Workload,
        spec: LaunchSpec,
        ranks: int,
        addresses: Sequence[Endpoint],
        token: str,
        *,
        number: int | None = None,
        orders: int | None = None,
        is_host: bool = False,
    ) -> None:
        self._workload, self._spec, self._ranks = workload, spec, ranks
        self._addresses, self._token, self._number, self._orders = addresses, token, number, orders
        # Nobody can take over the ranks of a launcher that hosts the coordinator, or without restarts.
        self._orphan_seconds = _ORPHAN_SECONDS if spec.max_restarts and not is_host else 0.0
        self._is_quiet = orders is not None  # the front end prints the messages
        self._logs: RankLogs | None = None
        self._lost_at: float | None = None
        self._heartbeat_at = 0.0
        self._where = " or ".join(f"{host}:{port}" for host, port in addresses)
        self._pending: list[Message] = []
        self._was_stopped = False  # by the coordinator, which then already knows of the signal
        self._has_reported_signal = False
        self._is_ending = False  # the job, after a signal here or on another node
        self._wants_evidence = False  # the coordinator
        self._had_first_rank = False  # whether rank 0 ran on this node in the last start

    def run(self) -> int:
        """Run until the job is over; returns the exit status for the shell."""
        with ExitStack() as stack:
            self._signals = stack.enter_context(interrupts.noted())
            self._channel = self._join()
            stack.callback(self._channel.close)
            try:
                while (status := self._handle(self._next(), stack)) is None:
                    pass
            except LaunchError as error:
                if error.code != "launch.coordinator-lost":
                    raise
                if not self._is_quiet:
                    print(error, file=sys.stderr, flush=True)  # noqa: T201
                return _COORDINATOR_LOST
            return status

    def _join(self) -> Channel:
        """Connect, and join. A coordinator whose port is flooded may close a connection, so that a single one that was
        closed does not prove a wrong token."""
        # Before connecting: reading the code takes time, which connections that have not joined do not get.
        own_fingerprint = fingerprint(script=self._workload.script, recipe=self._workload.recipe)
        nodes, host = self._spec.node_range, socket.gethostname()
        request = JoinRequest(host, self._ranks, nodes, self._number, own_fingerprint).to_message()
        rejected_at: float | None = None
        while True:
            channel = self._connect()
            try:
                channel.send(request)
                self._heartbeat_at = time.monotonic()
                self._pending += self._wait_for_answer(channel)
                return channel
            except ChannelClosed:
                channel.close()
                rejected_at = rejected_at or time.monotonic()
                if time.monotonic() > rejected_at + _REJECTED_SECONDS:
                    raise _wrong_token(self._where) from None
                time.sleep(_RETRY_SECONDS)

    def _connect(self) -> Channel:
        begin = time.monotonic()
        deadline, remind_at = begin + self._spec.wait, begin + _FIRST_REMINDER
        while (channel := connect(self._addresses, self._token)) is None:
            self._check_whether_to_leave()
            if time.monotonic() > remind_at:
                self._log(f"waiting for a coordinator at {self._where}")
                remind_at = time.monotonic() + _REMINDER
            if time.monotonic() > deadline:
                raise LaunchError(
                    "no-coordinator", f"No coordinator reachable at {self._where} after {self._spec.wait:g} s."
                )
            time.sleep(_RETRY_SECONDS)
        return channel

    def _wait_for_answer(self, channel: Channel) -> list[Message]:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not (messages := channel.receive()):
            self._check_whether_to_leave()
            if time.monotonic() > deadline:
                raise ChannelClosed("no answer")
            select.select([channel], [], [], 0.1)
        return messages

    def _check_whether_to_leave(self) -> None:
        """Before the coordinator knows this node, a signal ends it at once."""
        self._check_orders()
        if self._signals:
            raise SystemExit(128 + self._signals[0])

    def _next(self) -> Message:
        """Wait for the next message."""
        while not self._pending:
            self._check_orders()
            self._check_signals()
            select.select([self._channel], [], [], 0.1)
            self._pending += self._receive()
            if self._lost_at is not None and not self._pending:
                raise _coordinator_lost()
        return self._pending.pop(0)

    def _receive(self) -> list[Message]:
        """New messages. Also sends heartbeats, and detects the loss of the coordinator."""
        try:
            messages = [message for message in self._channel.receive() if message["kind"] != "heartbeat"]
        except ChannelClosed:
            messages = []
            self._lost_at = self._lost_at or time.monotonic()
        now = time.monotonic()
        if now - self._heartbeat_at > HEARTBEAT_SECONDS:
            self._heartbeat_at = now
            self._send({"kind": "heartbeat"})
        if now - self._channel.last_received > SILENCE_SECONDS:
            self._lost_at = self._lost_at or now
        return messages

    def _check_signals(self) -> None:
        """Without running ranks, a signal ends the job; a second one ends this launcher immediately."""
        if len(self._signals) > 1:
            raise SystemExit(128 + self._signals[0])
        if self._signals and not self._has_reported_signal:
            self._has_reported_signal = True
            again = self._is_ending and self._signals[0] == signal.SIGINT  # ranks of other nodes still run
            self._send({"kind": "interrupted", "signal": signal.SIGKILL if again else self._signals[0]})

    def _check_orders(self) -> None:
        if self._orders is not None and is_at_end(self._orders):
            raise SystemExit(128 + signal.SIGHUP)

    def _handle(self, message: Message, stack: ExitStack) -> int | None:
        match message["kind"]:
            case "rejected":
                raise PacelineError.from_dict(message["error"])
            case "joined":
                self._number = int(message["node"])
            case "waiting" | "notice":
                self._log(local_status.describe_progress(message))
            case "open":
                self._open(message["folder"], stack)
            case "start":
                self._start(message, stack)
            case "restart":
                if self._had_first_rank and self._logs is not None:
                    local_status.note_failure(Cause(**message["cause"]), self._logs)
                self._log(local_status.describe_progress(message))
            case "end":
                self._finish(message)
                return int(message["status"])
        return None

    def _open(self, folder: str | None, stack: ExitStack) -> None:
        """Create the run folder on the first node, or open it if that node was replaced."""
        try:
            if self._logs is None:
                opened = open_logs(self._spec) if folder is None else shared_logs(folder)
                self._logs = stack.enter_context(opened)
        except PacelineError as error:
            self._send({"kind": "error", "error": error.to_dict()})
            return
        self._channel.send({"kind": "opened", "folder": None if self._logs.run is None else str(self._logs.run)})

    def _start(self, order: Message, stack: ExitStack) -> None:
        if self._logs is None or (order["folder"] is not None and str(self._logs.run) != order["folder"]):
            self._logs = stack.enter_context(shared_logs(order["folder"]))
        kill_orphans({int(pid): born for pid, born in order["leftovers"].items()})
        first, last = order["first_rank"], order["first_rank"] + order["ranks"] - 1
        of = f"ranks {first} to {last}" if last > first else f"rank {first}"
        where = f"; logs in {short(self._logs.folder.logs)}" if self._logs.run else ""
        self._log(f"node {order['node']} of {order['nodes']}: {of} of {order['world']}{where}")
        interface = self._spec.interface or interface_of(order["address"] or self._channel.own_address)
        node = NodeAssignment(
            ranks=order["ranks"],
            world=order["world"],
            number=order["node"],
            nodes=order["nodes"],
            first_rank=first,
            store=Endpoint(order["address"] or self._channel.peer_address, order["store_port"]),
            interface=interface,
            orphan_seconds=self._orphan_seconds,
        )
        start = LocalStart(self._spec, self._logs, node, order["generation"], order["suspect"])
        self._had_first_rank, self._was_stopped, self.others_ended = order["node"] == 0, False, False
        ledger = Ledger(self._logs.run if self._had_first_rank else None)
        facts = {key: order[key] for key in ("nodes", "generation")}
        resumed = 0 < order["generation"] == self._spec.prior_starts
        ledger.note("launched", ranks=order["world"], resumed=resumed, **facts)
        outcome = local_status.run_shown(self._workload, start, self)
        if self._lost_at is not None:
            raise _coordinator_lost()
        self._report(outcome)

    def _report(self, outcome: LocalResult) -> None:
        assert self._logs is not None
        suspects = heartbeat.read_suspects(self._logs.folder)
        own = {each.rank for each in outcome.ends}
        self._send(
            {
                "kind": "exited",
                "now": time.time(),
                "exits": [each.to_json() for each in outcome.ends],
                "oom_killed": outcome.oom_killed,
                "suspects": {rank: list(each.samples) for rank, each in suspects.items() if rank in own},
            }
        )

    def _finish(self, message: Message) -> None:
        if self._logs is not None and self._had_first_rank:
            if message["cause"] is not None:
                local_status.note_failure(Cause(**message["cause"]), self._logs)
            local_status.show_ledger(self._logs, int(message["status"]))
        if not self._is_quiet:
            local_status.show_end(message, self._logs)

    # AgentObserver

    def started(self, pids: Collection[int]) -> None:
        self._send({"kind": "started", "pids": {pid: start_time(pid) for pid in pids}})

    def failing(self) -> None:
        self._send({"kind": "failed"})

    def interrupted(self, number: int) -> None:
        # Stopping ranks because the coordinator seems lost is no signal, and the connection may work again by now.
        if self._lost_at is None and (number == signal.SIGKILL or not self._was_stopped):
            self._is_ending = True
            self._send({"kind": "interrupted", "signal": number})

    def order(self) -> int | None:
        if self._orders is not None and is_at_end(self._orders):
            self._lost_at = self._lost_at or time.monotonic()
        if self._lost_at is None:
            self._pending += self._receive()
            for message in list(self._pending):
                if message["kind"] in ("notice", "inquire", "ended", "hang", "continued", "stop"):
                    self._pending.remove(message)
                if message["kind"] == "notice":
                    self._log(message["text"])
                elif message["kind"] == "inquire":
                    self._wants_evidence = True
                    self.others_ended = self.others_ended or bool(message["at_exit"])
                elif message["kind"] == "ended":
                    self.others_ended = True
                elif message["kind"] in ("hang", "continued"):
                    self._note_hang(message)
                elif message["kind"] == "stop":
                    number = int(message["signal"])
                    self._was_stopped = self._was_stopped or number not in (0, signal.SIGUSR1)
                    self._is_ending = self._is_ending or self._was_stopped
                    return number
        if self._lost_at is None:
            return None
        return signal.SIGKILL if time.monotonic() > self._lost_at + _LEAVE_SECONDS else signal.SIGTERM

    def standstill(self, found: NoProgress, ranks: Sequence[RankEvidence]) -> None:
        self._send({"kind": "standstill", **found._asdict(), "ranks": [each.to_json() for each in ranks]})

    def continued(self, seconds: float) -> None:
        self._send({"kind": "continued", "seconds": seconds})

    def wants_evidence(self) -> bool:
        wanted, self._wants_evidence = self._wants_evidence, False
        return wanted

    def evidence(self, ranks: Sequence[RankEvidence], still: float, limit: float) -> None:
        known = [each.to_json() for each in ranks]
        self._send({"kind": "evidence", "ranks": known, "still": still, "limit": limit})

    def _note_hang(self, message: Message) -> None:
        """What the coordinator found out about ranks that make no progress. The first node records it."""
        if not self._is_quiet:
            hang_detector.show(message, self._logs)
        if "record" in message and self._logs is not None:
            hang_detector.record(message, self._logs)

    def _send(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except ChannelClosed:
            self._lost_at = self._lost_at or time.monotonic()

    def _log(self, text: str) -> None:
        if not self._is_quiet:
            log.info(text)


def is_at_end(descriptor: int) -> bool:
    """Whether a pipe to which nothing is written was closed on the other side."""
    ready, _, _ = select.select([descriptor], [], [], 0)
    return bool(ready) and os.read(descriptor, 1) == b""


def _wrong_token(where: str) -> LaunchError:
    return LaunchError("wrong-token", f"The coordinator at {where} rejected this launcher.")


def _coordinator_lost() -> LaunchError:
    return LaunchError("coordinator-lost", "Lost the connection to the coordinator on the first node.")
