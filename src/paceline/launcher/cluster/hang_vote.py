"""Hangs of several nodes: one says that its ranks make no progress, and the coordinator asks all for their evidence.

A rank may wait for one on another node, so no node can tell alone which rank is to blame, nor whether it may take that
long: the other one may still make progress, or save. Then all are asked again later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.config.launch import LaunchSpec
from paceline.diagnose.hang.evidence import Hang, RankEvidence, ranks_from_json
from paceline.diagnose.hang.progress_limits import EXIT, NoProgress
from paceline.launcher.cluster.channel import Message
from paceline.launcher.cluster.membership import NodeMember
from paceline.launcher.local.hang_detector import HangReporter

_ANSWER_SECONDS = 2.0  # for the nodes to answer
_SILENT_SECONDS = 2.0  # without a heartbeat, after which a node may be about to be lost


class HangVote:
    """`members`: the nodes of the job; `send` sends a message to a node, `notify` shows one here."""

    def __init__(
        self,
        spec: LaunchSpec,
        members: Callable[[], Sequence[NodeMember]],
        send: Callable[[NodeMember, Message], None],
        notify: Callable[[Message], None],
    ) -> None:
        self._spec, self._members, self._send, self._notify = spec, members, send, notify
        self.reset()

    def reset(self) -> None:
        """Before a generation starts."""
        self._open: _OpenVote | None = None
        self._reporter = HangReporter(self._spec, self._publish)

    @property
    def hang(self) -> Hang | None:
        """For which all ranks are being stopped."""
        return self._reporter.hang

    def handle(self, member: NodeMember, message: Message) -> None:
        """`standstill`, `evidence` or `continued` of a node."""
        if message["kind"] == "standstill":
            if self._open is None and self._reporter.is_due(lasts=bool(message["lasts"])):
                self._open = _OpenVote(member, message)
                self._ask(self._open)
        elif message["kind"] == "evidence" and self._open is not None:
            self._open.add(member, message)
        elif message["kind"] == "continued":
            if self._open is not None and member is self._open.first:
                self._open = None
            self._reporter.continued(float(message["seconds"]))

    def conclude(self, generation: int, restarts: int) -> bool:
        """Report a hang, once all nodes have answered or had the time to; returns whether to stop the ranks."""
        inquiry = self._open
        if inquiry is None or not inquiry.is_due:
            return False
        if inquiry.is_asleep:
            self._ask(inquiry)
        elif not inquiry.sleep():
            self._open = None
            # A node that cannot be reached is found to be lost by its heartbeats, and is then the cause.
            is_cut_off = any(map(_is_silent, inquiry.missing))
            self._reporter.report(inquiry.found, inquiry.ranks(), generation, restarts, may_stop=not is_cut_off)
            return self.hang is not None
        return False

    def _ask(self, inquiry: _OpenVote) -> None:
        for member in inquiry.ask([each for each in self._members() if each.is_busy]):
            self._send(member, {"kind": "inquire", "at_exit": inquiry.found.phase == EXIT})

    def _publish(self, message: Message) -> None:
        """To all nodes and here. Only the node of rank 0 records it."""
        shown = {name: value for name, value in message.items() if name != "record"}
        for member in list(self._members()):
            self._send(member, message if member.is_busy and member.first_rank == 0 else shown)
        self._notify(shown)


class _OpenVote:
    """Opened by the message `standstill` of a node, which includes its evidence."""

    def __init__(self, first: NodeMember, message: Message) -> None:
        seconds, limit = float(message["seconds"]), float(message["limit"])
        self.first = first
        self.found = NoProgress(seconds, limit, str(message["why"]), str(message["phase"]), bool(message["lasts"]))
        self._began = time.monotonic() - seconds
        self._evidence = {first: _evidence(first, message)}
        self._asked: list[NodeMember] = []
        self._due, self._pause = 0.0, limit
        self._limit, self._last_progress = limit, self._began
        self.is_asleep = False

    def ask(self, members: Sequence[NodeMember]) -> list[NodeMember]:
        """The nodes to ask now."""
        if self.is_asleep:
            self._evidence, self._last_progress = {}, self._began
        self._asked, self.is_asleep, self._due = list(members), False, time.monotonic() + _ANSWER_SECONDS
        return self.missing

    def add(self, member: NodeMember, message: Message) -> None:
        """An answer; `still`: for how long the ranks of the node have made no progress, `limit`: how long they may."""
        if not self.is_asleep:
            self._evidence[member] = _evidence(member, message)
            self._limit = max(self._limit, float(message["limit"]))
            self._last_progress = max(self._last_progress, time.monotonic() - float(message["still"]))

    @property
    def missing(self) -> list[NodeMember]:
        """Nodes that have not answered."""
        return [member for member in self._asked if member not in self._evidence]

    @property
    def is_due(self) -> bool:
        if time.monotonic() > self._due:
            return True
        # Nodes that have fallen silent before they were asked will not answer, and are soon found to be lost.
        return not self.is_asleep and all(map(_is_silent, self.missing))

    def sleep(self) -> bool:
        """Wait if that is no hang yet; returns whether to."""
        now = time.monotonic()
        seconds = now - self._began
        # Ranks of different nodes do not stop at the same moment: those that nobody waits for yet continue for a step.
        if self._last_progress > self._began + seconds / 2:
            self._due = now + self._pause
        elif seconds < self._limit:
            self._due = self._began + self._limit
        else:
            longest = "longest limit of the nodes" if self._limit > self.found.limit else self.found.why
            self.found = self.found._replace(seconds=seconds, limit=self._limit, why=longest)
            return False
        self.is_asleep, self._pause = True, 2 * self._pause
        return True

    def ranks(self) -> list[RankEvidence]:
        """The evidence of all ranks."""
        known = [each for ranks in self._evidence.values() for each in ranks]
        for member in self.missing:
            silent = time.monotonic() - member.channel.last_received
            why = (
                f"has sent nothing for {silent:.1f} s"
                if _is_silent(member)
                else f"did not answer in {_ANSWER_SECONDS:g} s"
            )
            missing = f"node {member.node} {why}"
            known += [RankEvidence(rank, node=member.node, missing=missing) for rank in member.rank_range]
        return sorted(known, key=lambda each: each.rank)


def _is_silent(member: NodeMember) -> bool:
    return time.monotonic() - member.channel.last_received > _SILENT_SECONDS


def _evidence(member: NodeMember, message: Message) -> list[RankEvidence]:
    ranks = ranks_from_json(message["ranks"])
    if any(each.rank not in member.rank_range for each in ranks):
        raise ValueError("evidence of ranks of another node")
    return [replace(each, node=member.node) for each in ranks]
