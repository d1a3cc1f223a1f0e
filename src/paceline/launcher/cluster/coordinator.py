"""Where the launchers of several nodes meet, and who decides for all of them.

    gathering    nodes arrive; one that does not fit is refused by name; who is missing is said
    opening      the first node makes the run folder
    running      every node runs its ranks; the store that they meet in is here
    stopping     a rank failed, a node was lost or has come, or somebody sent a signal: all nodes end their ranks
    over         all are told how it ended

One start of all ranks is a generation. After `stopping` comes the next one, or the end (supervision.py). The meeting is
single-threaded and knows the nodes only through their channels: a launcher that is killed closes its connection, and is
missed at once; a machine that loses power falls silent, and is missed after some seconds.

A launcher that is killed leaves ranks behind that go on training (keeper.py). Where restarts are allowed they may do so
until another launcher has come for their node: so the run stands still for a restart, not for a launcher's start.

Messages of a node: hello, opened, running, failing, ended, interrupted, error, beat. Of the meeting: welcome, refused,
waiting, open, start, stop, again, end, beat.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal

from paceline.config.launch import LaunchSpec
from paceline.diagnose.cause import Cause
from paceline.diagnose.exits import RankExit
from paceline.errors import LaunchError, PacelineError
from paceline.launcher.cluster import admission
from paceline.launcher.cluster.channel import Channel, Closed, Message
from paceline.launcher.cluster.fingerprint import Identity
from paceline.launcher.cluster.membership import NodeMember, OrphanedRanks
from paceline.launcher.cluster.server import ConnectionServer
from paceline.launcher.network import is_loopback, listen
from paceline.launcher.restart_policy import Restart, Supervisor

BEAT = 1.0  # seconds between signs of life
SILENCE = 5.0  # after which a node that gave none is lost
_LAST_CALL = 2.0  # seconds in which more nodes may come when there are enough
ORPHANS = 45.0  # seconds that ranks go on without their launcher before all are ended
_FAREWELL = 5.0
_FIRST_REMINDER, _REMINDER = 3.0, 30.0

Phase = Literal["gathering", "opening", "running", "stopping", "over"]


class Coordinator:
    """`tell` is called with what people should know: waiting and end messages, and `again` before a restart. All nodes
    have to be as `identity` says, else as the first that comes."""

    def __init__(
        self, listener: socket.socket, token: str, spec: LaunchSpec, tell: Callable[[Message], None],
        identity: Identity | None = None, *, store_port: int | None = None,
    ) -> None:  # fmt: skip
        self._door, self._spec, self._tell = ConnectionServer(listener, token), spec, tell
        self._fewest, self._most = spec.node_range
        self._store_port = store_port
        self._supervisor = Supervisor(spec.max_restarts)
        self._members: dict[Channel, NodeMember] = {}
        self._identity = identity
        self._phase: Phase = "gathering"
        self._generation = spec.prior_starts
        self._store: Any = None
        self._lost: dict[int, str] = {}  # nodes that went in this generation
        self._gone: list[RankExit] = []  # what they had said of their ranks
        self._orphans: dict[int, OrphanedRanks] = {}
        self._leftovers: dict[int, OrphanedRanks] = {}  # what became of them in the next start
        self._signal = 0
        self._folder: str | None = None  # of the run, once the first node has made it
        self._has_newcomer = False
        self._suspect: int | None = None
        self._is_failure = True
        self._beat_at = time.monotonic()
        self.status: int | None = None
        self._gather(0.0)

    @property
    def is_over(self) -> bool:
        return self._phase == "over" and (not self._members or time.monotonic() > self._deadline)

    @property
    def missing(self) -> list[int]:
        """Numbers of nodes that are not here."""
        here = {member.node for member in self._members.values()}
        return [node for node in range(self._most) if node not in here]

    @property
    def signalled(self) -> bool:
        """Whether a signal has begun to end it."""
        return bool(self._signal)

    @property
    def wanted(self) -> list[int]:
        """Nodes whose launcher is to be started now."""
        return self.missing if self._phase == "gathering" else sorted(self._orphans)

    def step(self, timeout: float = 0.1) -> None:
        """Hear what there is to hear, for at most `timeout` seconds, and act on it."""
        for channel, message in self._door.hear(timeout):
            try:
                self._hear(channel, message)
            except Exception as error:  # whatever makes no sense ends that connection, never the meeting
                self._forget(channel, f"its launcher closed the connection ({error})")
        self._look_for_silence()
        self._advance()

    def interrupt(self, number: int) -> None:
        """Somebody sent a signal: to all nodes, and then it is over."""
        self._signal = self._signal or number
        if self._phase in ("running", "stopping"):
            self._stop(number)
        elif self._phase != "over":
            self._end(128 + number)

    def signal(self, number: int) -> None:
        """A signal for the ranks that does not end them."""
        self._broadcast({"kind": "stop", "signal": number})

    def fail(self, error: PacelineError) -> None:
        """Something that no restart would mend."""
        self._end(2, error=error)

    def lose(self, node: int, words: str) -> None:
        """The launcher of a node is gone, as whoever started it knows."""
        for member in [each for each in self._members.values() if each.node == node]:
            self._drop(member, words)

    def close(self) -> None:
        self._door.shut()
        self._store = None

    # Hearing

    def _hear(self, channel: Channel, message: Message | Closed) -> None:
        if isinstance(message, Closed):
            raise message
        if channel in self._members:
            self._handle(self._members[channel], message)
        else:
            self._admit(channel, message)

    def _forget(self, channel: Channel, words: str) -> None:
        if channel in self._members:
            self._drop(self._members[channel], words)
        else:
            if "token" in words:
                self._notice(f"refused: somebody at {channel.peer_address}, without this job's token")
            self._door.close(channel)

    def _admit(self, channel: Channel, message: Message) -> None:
        hello = admission.JoinRequest.read(message)
        try:
            node = admission.place(hello, self._fewest, self._most, self.missing, self._identity)
        except LaunchError as error:
            self._notice(f"refused: {error.what}")
            channel.send({"kind": "refused", "error": error.to_dict()})
            return  # it stays a stranger, and leaves: who closes a connection too soon takes the last word back
        self._door.let_in(channel)
        self._identity = self._identity or hello.identity
        self._members[channel] = NodeMember(channel, node, hello.host, hello.ranks)
        channel.send({"kind": "welcome", "node": node, "nodes": self._most})
        self._changed_at = time.monotonic()
        if self._phase == "running":
            self._has_newcomer = True
            self._notice(f"node {node} is here: the ranks save, and all start again")

    def _handle(self, member: NodeMember, message: Message) -> None:
        match message["kind"]:
            case "opened" if self._phase == "opening":  # else something happened meanwhile
                self._start(message["folder"])
            case "running":
                member.pids = dict(message["pids"])
            case "failing":
                self._stop(0)
            case "ended":
                self._note(member, message)
            case "interrupted":
                self._signal = self._signal or int(message["signal"])
                if self._phase in ("gathering", "opening"):
                    self._end(128 + self._signal)
                else:
                    self._stop(int(message["signal"]), but=member)
            case "error":
                self._end(2, error=PacelineError.from_dict(message["error"]))
            case "beat":
                pass

    def _note(self, member: NodeMember, message: Message) -> None:
        member.is_busy = False
        offset = time.time() - float(message["now"])  # of its clock to ours
        member.ends = [RankExit.from_json(each, node=member.node, clock_offset=offset) for each in message["ends"]]
        member.oom_killed = list(message["oom_killed"])
        member.suspects = {int(rank): samples for rank, samples in message["suspects"].items()}
        if not member.is_good and self._phase == "running":
            self._stop(0)

    def _drop(self, member: NodeMember, words: str, *, may_live: bool = True) -> None:
        """A launcher is gone. Its ranks may live on: then they train until somebody comes for them, or fails."""
        del self._members[member.channel]
        self._door.close(member.channel)
        self._changed_at = time.monotonic()
        if self._phase == "running" and member.is_busy and member.pids and may_live and self._may_start_again:
            self._orphans[member.node] = OrphanedRanks(member.host, member.pids, words, self._changed_at)
            self._notice(
                f"the launcher of node {member.node} ({member.host}) is gone; its ranks go on until a new one is there"
            )
        elif self._phase in ("opening", "running", "stopping"):
            explained = self._phase == "stopping" and any(end.code for each in self._all() for end in each.ends)
            if (member.is_busy or self._phase == "opening") and not explained:
                self._lost[member.node] = f"{member.host}: {words}"
            self._gone += member.ends
            if not member.is_good:
                self._stop(0)

    def _notice(self, words: str) -> None:
        """What people should know, at every node."""
        self._broadcast({"kind": "notice", "words": words})
        self._tell({"kind": "notice", "words": words})

    def _all(self) -> list[NodeMember]:
        return list(self._members.values())

    @property
    def _may_start_again(self) -> bool:
        return self._supervisor.restarts < self._spec.max_restarts

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        if now - self._beat_at > BEAT:
            self._beat_at = now
            self._broadcast({"kind": "beat"})
            if self._phase != "stopping":  # a launcher that ends its ranks may have no time for us
                for member in self._all():
                    is_starting = member.is_busy and not member.pids  # and may import or build a model for long
                    if now - member.channel.heard > SILENCE and not is_starting:
                        self._drop(member, f"nothing was heard of it for {SILENCE:g} s", may_live=False)

    # Acting

    def _advance(self) -> None:
        now = time.monotonic()
        if self._phase == "gathering":
            self._look_who_is_missing(now)
        elif self._phase == "running":
            self._look_at_ranks(now)
        elif self._phase == "stopping":
            busy = [member for member in self._members.values() if member.is_busy]
            if busy and now > self._deadline:
                for member in busy:
                    self._drop(member, "it did not end its ranks in time")
            elif not busy:
                self._decide()

    def _look_at_ranks(self, now: float) -> None:
        started = [member for member in self._members.values() if member.is_busy or member.ends]
        over = not any(member.is_busy for member in started)
        if over and started and not self._orphans and all(member.is_good for member in started):
            self._end(0)
        elif over or any(now > each.since + ORPHANS for each in self._orphans.values()):
            self._stop(0)  # what ranks without a launcher came to, nobody knows
        elif self._has_newcomer:
            self._stop(15, is_failure=False)

    def _gather(self, delay: float) -> None:
        self._phase = "gathering"
        self._has_newcomer = False
        now = time.monotonic()
        self._changed_at, self._not_before, self._deadline = now, now + delay, now + delay + self._spec.wait
        self._remind_at = now + delay + _FIRST_REMINDER
        for member in self._members.values():
            member.begin_anew()

    def _look_who_is_missing(self, now: float) -> None:
        number = len(self._members)
        enough = number == self._most or (number >= self._fewest and now > self._changed_at + _LAST_CALL)
        if now < self._not_before:
            return
        if enough:
            self._phase = "opening"
            self._lost, self._gone = {}, []
            self._send(self._in_order()[0], {"kind": "open", "folder": self._folder})
        elif now > self._deadline:
            self._end(2, error=admission.nodes_missing(self.missing, self._spec.wait))
        elif now > self._remind_at:
            self._remind_at = now + _REMINDER
            message = {"kind": "waiting", "here": number, "of": self._most, "missing": self.missing}
            self._broadcast(message)
            self._tell(message)

    def _in_order(self) -> list[NodeMember]:
        return sorted(self._members.values(), key=lambda member: member.node)

    def _start(self, folder: str | None) -> None:
        """All ranks, on the nodes that are here."""
        from paceline.launcher.local.rendezvous import open_store

        members = self._in_order()
        self._folder = folder
        self._store = None  # its port is to be free
        try:
            self._store = open_store(listen(self._door.address, self._store_port))
        except LaunchError as error:
            what = f"The ranks' store, at the port after --master's, can't listen on the first node: {error.what}"
            self.fail(LaunchError("port-in-use", what, fix="give another port in --master, or --port"))
            return
        first, world = 0, sum(member.ranks for member in members)
        seen = [each.channel.own_address for each in members if not is_loopback(each.channel.peer_address)]
        self._phase = "running"
        for index, member in enumerate(members):
            if self._lost:  # one could not be reached, so this start is over already
                return
            alone = is_loopback(member.channel.peer_address)
            start = {
                "kind": "start", "generation": self._generation, "node": index, "nodes": len(members),
                "ranks": member.ranks, "first_rank": first, "world": world, "folder": folder,
                "store_port": self._store.port, "suspect": self._suspect, "leftovers": self._left_on(member.host),
                # What the others reach this machine at, where it came here by loopback.
                "address": seen[0] if alone and seen else None,
            }  # fmt: skip
            member.is_busy = True
            first += member.ranks
            self._send(member, start)

    def _left_on(self, host: str) -> dict[str, str | None]:
        """Ranks of the start before whose launcher was lost on that machine."""
        left = [each.pids for each in self._leftovers.values() if each.host == host]
        return {pid: birth for pids in left for pid, birth in pids.items()}

    def _stop(self, number: int, *, but: NodeMember | None = None, is_failure: bool = True) -> None:
        """All ranks are to end: by a signal, or, with 0, because others have failed."""
        if self._phase == "over":
            return
        if self._phase != "stopping":
            self._phase = "stopping"
            self._lost |= {node: f"{each.host}: {each.words}" for node, each in self._orphans.items()}
            self._leftovers, self._orphans = self._orphans, {}
            self._is_failure = is_failure and not self._signal
            self._deadline = time.monotonic() + self._spec.grace + 2 * SILENCE
        for member in self._all():
            if member.is_busy and member is not but:
                self._send(member, {"kind": "stop", "signal": number})

    def _decide(self) -> None:
        """All ranks have ended."""
        self._generation += 1
        members = self._all()
        ends = [*(end for member in members for end in member.ends), *self._gone]
        if self._signal:
            self._end(128 + self._signal)
        elif not self._lost and not (self._is_failure and ends):  # a node came: this was no accident
            self._gather(0.0)
        else:
            verdict = self._supervisor.decide(
                ends,
                oom_killed=[rank for member in members for rank in member.oom_killed],
                lost_nodes=self._lost,
                several_nodes=True,
                suspects={rank: samples for member in members for rank, samples in member.suspects.items()},
            )
            if isinstance(verdict, Restart):
                self._suspect = verdict.suspect
                again = {
                    "kind": "again", "cause": asdict(verdict.cause), "delay": verdict.delay,
                    "number": self._supervisor.restarts, "of": self._spec.max_restarts,
                }  # fmt: skip
                self._broadcast(again)
                self._tell(again)
                self._gather(verdict.delay)
            else:
                self._end(verdict.cause.status, cause=verdict.cause)

    def _end(self, status: int, *, cause: Cause | None = None, error: PacelineError | None = None) -> None:
        if self._phase == "over":
            return
        self._phase, self.status = "over", status
        self._deadline = time.monotonic() + _FAREWELL
        message: Message = {
            "kind": "end", "status": status, "signal": self._signal,
            "cause": None if cause is None else asdict(cause),
            "error": None if error is None else error.to_dict(),
        }  # fmt: skip
        self._broadcast(message)
        self._tell(message)

    def _broadcast(self, message: Message) -> None:
        for member in self._all():
            self._send(member, message)

    def _send(self, member: NodeMember, message: Message) -> None:
        try:
            member.channel.send(message)
        except Closed as error:
            if member.channel in self._members:
                self._drop(member, f"it can't be reached ({error})")
