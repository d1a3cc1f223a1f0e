"""The coordinator: decides for all nodes of a job.

    joining      nodes join; one that differs is rejected; missing ones are named
    opening      the first node creates the run folder
    running      every node runs its ranks; the store for their rendezvous is here
    stopping     a rank failed, a node was lost or joined, or a signal arrived: all nodes stop their ranks
    over         all nodes are told how the job ended

One start of all ranks is a generation. After `stopping` comes the next one, or the end (restart_policy.py). The
coordinator is single-threaded and knows the nodes only through their channels: a launcher that is killed closes its
connection and is lost at once; a machine that loses power falls silent and is lost after some seconds.

A launcher that is killed leaves orphaned ranks behind, which keep training (rank_parent.py). If restarts are allowed,
they may do so until another launcher has joined for their node: then the run pauses for a restart of the ranks only.

Messages from a node: join, opened, started, failed, exited, interrupted, error, heartbeat; standstill, evidence,
continued (inquiry.py). From the coordinator: joined, rejected, waiting, notice, open, start, stop, restart, end,
heartbeat; inquire, hang, continued.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal

from paceline.config.launch import LaunchSpec
from paceline.diagnose.cause import Cause
from paceline.diagnose.exits import RankExit
from paceline.errors import LaunchError, PacelineError
from paceline.launcher.cluster import membership
from paceline.launcher.cluster.channel import Channel, ChannelClosed, InvalidMessage, Message
from paceline.launcher.cluster.fingerprint import Fingerprint
from paceline.launcher.cluster.hang_vote import HangVote
from paceline.launcher.cluster.membership import JoinRequest, NodeMember, OrphanedRanks
from paceline.launcher.cluster.server import ConnectionServer, RejectionLog
from paceline.launcher.restart_policy import Restart, Supervisor
from paceline.runtime.network import listen

HEARTBEAT_SECONDS = 1.0  # between two heartbeats
SILENCE_SECONDS = 5.0  # without a heartbeat, after which a node is lost
_LAST_CALL_SECONDS = 2.0  # for more nodes to join once there are enough
_ORPHAN_SECONDS = 45.0  # for which ranks keep running without a launcher before all are stopped
_END_SECONDS = 5.0  # for the nodes to disconnect in the end
_FIRST_REMINDER, _REMINDER = 3.0, 30.0

Phase = Literal["joining", "opening", "running", "stopping", "over"]


class Coordinator:
    """`notify` is called with messages to show: waiting, notice, restart and end. All nodes must have `fingerprint`, or
    that of the first to join."""

    def __init__(
        self, listener: socket.socket, token: str, spec: LaunchSpec, notify: Callable[[Message], None],
        fingerprint: Fingerprint | None = None, *, store_port: int | None = None,
    ) -> None:  # fmt: skip
        self._server, self._spec, self._notify = ConnectionServer(listener, token), spec, notify
        self._nodes, self._store_port = spec.node_range, store_port
        self._supervisor = Supervisor(spec.max_restarts, spec.on_hang)
        self._hangs = HangVote(spec, self._in_order, self._send, notify)
        self._members: dict[Channel, NodeMember] = {}
        self._fingerprint = fingerprint
        self._phase: Phase = "joining"
        self._generation = spec.prior_starts
        self._store: Any = None
        self._lost: dict[int, str] = {}  # nodes lost in this generation, each with the reason
        self._lost_exits: list[RankExit] = []  # that they had reported
        self._orphans: dict[int, OrphanedRanks] = {}
        self._leftovers: dict[int, OrphanedRanks] = {}  # orphans of the previous generation, to be killed
        self._signal = 0
        self._folder: str | None = None  # of the run, once the first node has created it
        self._has_new_node = False
        self._suspect: int | None = None
        self._is_failure = True
        self._rejections = RejectionLog()
        self._heartbeat_at = time.monotonic()
        self.status: int | None = None
        self._wait_for_nodes(0.0)

    @property
    def is_over(self) -> bool:
        return self._phase == "over" and (not self._members or time.monotonic() > self._deadline)

    @property
    def missing(self) -> list[int]:
        """Nodes that have not joined."""
        joined = {member.node for member in self._members.values()}
        return [node for node in range(self._nodes.most) if node not in joined]

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal is ending the job."""
        return bool(self._signal)

    @property
    def nodes_to_start(self) -> list[int]:
        """Nodes whose launcher must be started now."""
        return self.missing if self._phase == "joining" else sorted(self._orphans)

    def step(self, timeout: float = 0.1) -> None:
        """Process the messages that arrive within `timeout` seconds, and act on them."""
        for channel, message in self._server.receive(timeout):
            try:
                self._receive(channel, message)
            except ChannelClosed as closed:
                self._disconnect(channel, closed)
            except Exception as error:  # an invalid message ends its connection, never the coordinator
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                self._disconnect(channel, InvalidMessage(reason))
        self._check_heartbeats()
        self._advance()

    def interrupt(self, number: int) -> None:
        """Forward a signal to all nodes, and end the job."""
        self._signal = self._signal or number
        if self._phase in ("running", "stopping"):
            self._stop(number)
        elif self._phase != "over":
            self._end(128 + number)

    def forward_signal(self, number: int) -> None:
        """Forward a signal that does not end the ranks."""
        self._broadcast({"kind": "stop", "signal": number})

    def fail(self, error: PacelineError) -> None:
        """End the job because of an error that a restart would not fix."""
        self._end(2, error=error)

    def lose(self, node: int, reason: str) -> None:
        """The launcher of a node exited, as reported by whoever started it."""
        for member in [each for each in self._all() if each.node == node]:
            self._drop(member, reason)

    def close(self) -> None:
        self._server.close()
        self._store = None

    # Messages

    def _receive(self, channel: Channel, message: Message | ChannelClosed) -> None:
        if isinstance(message, ChannelClosed):
            raise message
        if channel in self._members:
            self._handle(self._members[channel], message)
        else:
            self._admit(channel, message)

    def _disconnect(self, channel: Channel, closed: ChannelClosed) -> None:
        if channel in self._members:
            is_invalid = isinstance(closed, InvalidMessage)
            what = "it sent an invalid message" if is_invalid else "its launcher closed the connection"
            self._drop(self._members[channel], f"{what} ({closed})")
        else:
            self._server.drop(channel)
            if text := self._rejections.note(channel, closed):
                self._announce(text)

    def _admit(self, channel: Channel, message: Message) -> None:
        request = JoinRequest.from_message(message)
        try:
            node = membership.assign_node(request, self._nodes, self.missing, self._fingerprint)
        except LaunchError as error:
            self._announce(f"rejected: {error.what}")
            channel.send({"kind": "rejected", "error": error.to_dict()})
            return  # it closes the connection itself: closing it here could discard the message
        self._server.admit(channel)
        self._fingerprint = self._fingerprint or request.fingerprint
        self._members[channel] = NodeMember(channel, node, request.host, request.ranks)
        channel.send({"kind": "joined", "node": node, "nodes": self._nodes.most})
        self._changed_at = time.monotonic()
        if self._phase == "running":
            self._has_new_node = True
            self._announce(f"node {node} joined: ranks save a checkpoint, and all nodes restart")

    def _handle(self, member: NodeMember, message: Message) -> None:
        match message["kind"]:
            case "opened" if self._phase == "opening":
                folder = message["folder"]
                self._start(None if folder is None else str(folder))
            case "started":
                member.record_start(message)
            case "standstill" | "evidence" | "continued" if self._phase == "running":
                self._hangs.handle(member, message)
            case "failed":
                self._stop(0)
            case "exited" if member.is_busy:
                member.record_exits(message)
                if self._phase == "running":
                    self._broadcast({"kind": "ended"}) if member.succeeded else self._stop(0)
            case "interrupted":
                number = signal.Signals(message["signal"])
                self._signal = self._signal or number
                if self._phase in ("joining", "opening"):
                    self._end(128 + self._signal)
                else:
                    self._stop(number, skip=member)
            case "error":
                self._end(2, error=PacelineError.from_dict(message["error"]))
            case "heartbeat" | "opened" | "exited" | "standstill" | "evidence" | "continued":  # out of date
                pass
            case unknown:
                raise InvalidMessage(f"unknown kind {unknown[:40]!r}")

    def _drop(self, member: NodeMember, reason: str, *, ranks_may_live: bool = True) -> None:
        """A launcher was lost. Its ranks may keep running until a new launcher joins, or until a rank fails."""
        del self._members[member.channel]
        self._server.drop(member.channel)
        self._changed_at, may_restart = time.monotonic(), self._supervisor.is_restart_left
        if self._phase == "running" and member.is_busy and member.pids and ranks_may_live and may_restart:
            self._orphans[member.node] = OrphanedRanks(member.host, member.pids, reason, self._changed_at)
            self._announce(
                f"lost the launcher of node {member.node} ({member.host}); "
                "its ranks keep running until a new launcher takes over"
            )
        elif self._phase in ("opening", "running", "stopping"):
            has_cause = self._phase == "stopping" and any(each.has_cause for each in self._all())
            if (member.is_busy or self._phase == "opening") and not has_cause:
                self._lost[member.node] = f"{member.host}: {reason}"
            self._lost_exits += member.exits
            if not member.succeeded:
                self._stop(0)

    def _announce(self, text: str) -> None:
        """Log a line on every node."""
        self._publish({"kind": "notice", "text": text})

    def _all(self) -> list[NodeMember]:
        return list(self._members.values())

    def _check_heartbeats(self) -> None:
        now = time.monotonic()
        if now - self._heartbeat_at > HEARTBEAT_SECONDS:
            self._heartbeat_at = now
            self._broadcast({"kind": "heartbeat"})
            if self._phase != "stopping":  # a launcher that stops its ranks may be too busy to answer
                for member in self._all():
                    is_starting = member.is_busy and not member.pids  # and may import or build a model for long
                    if now - member.channel.last_received > SILENCE_SECONDS and not is_starting:
                        self._drop(member, f"no heartbeat for {SILENCE_SECONDS:g} s", ranks_may_live=False)

    def _advance(self) -> None:
        now = time.monotonic()
        if self._phase == "joining":
            self._check_nodes(now)
        elif self._phase == "running":
            self._check_ranks(now)
        elif self._phase == "stopping":
            busy = [member for member in self._all() if member.is_busy]
            for member in busy:  # after Ctrl-C ranks may save for as long as they need, until it is pressed again
                waits = self._signal == signal.SIGINT and now - member.channel.last_received < SILENCE_SECONDS
                if now > self._deadline and not waits:
                    self._drop(member, "it did not stop its ranks in time")
            if not busy:
                self._decide()

    def _check_ranks(self, now: float) -> None:
        started = [member for member in self._all() if member.is_busy or member.exits]
        is_done = not any(member.is_busy for member in started)
        if is_done and started and not self._orphans and all(member.succeeded for member in started):
            self._end(0)
        elif is_done or any(now > each.since + _ORPHAN_SECONDS for each in self._orphans.values()):
            self._stop(0)  # nobody knows how the orphaned ranks ended
        elif self._has_new_node:
            self._stop(15, is_failure=False)
        elif self._hangs.conclude(self._generation, self._supervisor.restarts):
            self._stop(0)

    def _wait_for_nodes(self, delay: float) -> None:
        self._phase = "joining"
        self._has_new_node = False
        self._hangs.reset()
        now = time.monotonic()
        self._changed_at, self._not_before, self._deadline = now, now + delay, now + delay + self._spec.wait
        self._remind_at = now + delay + _FIRST_REMINDER
        for member in self._all():
            member.reset()

    def _check_nodes(self, now: float) -> None:
        joined = len(self._members)
        is_last_call_over = now > self._changed_at + _LAST_CALL_SECONDS
        if now < self._not_before:
            return
        if joined == self._nodes.most or (joined >= self._nodes.fewest and is_last_call_over):
            self._phase = "opening"
            self._lost, self._lost_exits = {}, []
            self._send(self._in_order()[0], {"kind": "open", "folder": self._folder})
        elif now > self._deadline:
            self._end(2, error=membership.nodes_missing(self.missing, self._spec.wait))
        elif now > self._remind_at:
            self._remind_at = now + _REMINDER
            waiting = {"kind": "waiting", "joined": joined, "nodes": self._nodes.most, "missing": self.missing}
            self._publish(waiting)

    def _in_order(self) -> list[NodeMember]:
        return sorted(self._members.values(), key=lambda member: member.node)

    def _start(self, folder: str | None) -> None:
        """Start all ranks, on the nodes that have joined."""
        from paceline.runtime.process_group import open_store

        members = self._in_order()
        address = membership.store_address(members, self._server.address)
        self._folder = folder
        self._store = None  # frees its port
        try:
            self._store = open_store(listen(address, self._store_port))
        except LaunchError as error:
            what = f"Cannot open the store of the ranks on the port after that of --master: {error.what}"
            self.fail(LaunchError("port-in-use", what, fix="use another port in --master, or --port"))
            return
        self._phase = "running"
        for member, place in zip(members, membership.place_ranks(members), strict=True):
            if self._lost:  # a node could not be reached, so this start has failed
                return
            member.is_busy, member.first_rank = True, place["first_rank"]
            leftovers = membership.pids_on(member.host, self._leftovers.values())
            start = {
                "kind": "start", "generation": self._generation, "folder": folder, "store_port": self._store.port,
                "suspect": self._suspect, "leftovers": leftovers, **place,
            }  # fmt: skip
            self._send(member, start)

    def _stop(self, number: int, *, skip: NodeMember | None = None, is_failure: bool = True) -> None:
        """Stop all ranks: with a signal, or with 0 because others have failed."""
        if self._phase == "over":
            return
        if self._phase != "stopping":
            self._phase = "stopping"
            self._lost |= {node: f"{each.host}: {each.reason}" for node, each in self._orphans.items()}
            self._leftovers, self._orphans = self._orphans, {}
            self._is_failure = is_failure and not self._signal
            self._deadline = time.monotonic() + self._spec.grace + 2 * SILENCE_SECONDS
        for member in self._all():
            if member.is_busy and member is not skip:
                self._send(member, {"kind": "stop", "signal": number})

    def _decide(self) -> None:
        """All ranks have exited: restart them, or end the job."""
        self._generation += 1
        members = self._all()
        exits = [*(each for member in members for each in member.exits), *self._lost_exits]
        if self._signal:
            self._end(128 + self._signal)
        elif not self._lost and not (self._is_failure and exits):  # stopped because a node joined
            self._wait_for_nodes(0.0)
        else:
            decision = self._supervisor.decide(
                exits,
                oom_killed=[rank for member in members for rank in member.oom_killed],
                lost_nodes=self._lost,
                several_nodes=True,
                suspects={rank: samples for member in members for rank, samples in member.suspects.items()},
                hang=self._hangs.hang,
            )
            if isinstance(decision, Restart):
                self._suspect = decision.suspect
                restart = {
                    "kind": "restart", "cause": asdict(decision.cause), "delay": decision.delay,
                    "number": self._supervisor.restarts, "of": self._spec.max_restarts,
                }  # fmt: skip
                self._publish(restart)
                self._wait_for_nodes(decision.delay)
            else:
                self._end(decision.cause.status, cause=decision.cause)

    def _end(self, status: int, *, cause: Cause | None = None, error: PacelineError | None = None) -> None:
        if self._phase == "over":
            return
        self._phase, self.status = "over", status
        self._deadline = time.monotonic() + _END_SECONDS
        end = {
            "kind": "end", "status": status, "signal": self._signal,
            "cause": None if cause is None else asdict(cause),
            "error": None if error is None else error.to_dict(),
        }  # fmt: skip
        self._publish(end)

    def _publish(self, message: Message) -> None:
        """Send to every node, and show it here."""
        self._broadcast(message)
        self._notify(message)

    def _broadcast(self, message: Message) -> None:
        for member in self._all():
            self._send(member, message)

    def _send(self, member: NodeMember, message: Message) -> None:
        try:
            member.channel.send(message)
        except ChannelClosed as error:
            if member.channel in self._members:
                self._drop(member, f"not reachable ({error})")
