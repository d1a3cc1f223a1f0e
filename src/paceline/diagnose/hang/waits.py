"""Which ranks wait in an operation of torch.distributed, and for which ranks.

torch counts the collectives that each rank has entered in each group. A rank that is in collective number n of a group
waits for those members that have entered fewer than n. A send or receive has a peer, if torch recorded it. Where it
does not (point-to-point on gloo), only the stack tells that a rank waits, and it may wait for any rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.diagnose.hang import wait_graph
from paceline.diagnose.hang.evidence import GroupProgress, Operation, RankEvidence
from paceline.diagnose.hang.stack_place import StackPlace, place_of_stack

_PEERS = re.compile(r"(\d+) ?(?:->|<-) ?(\d+)")  # "send 0->1", "recv 1<-0": own number in the group, then the peer's
_SILENT = 1.0  # seconds after which a thread that writes four times a second is known to be blocked


@dataclass(frozen=True)
class Wait:
    """An operation that a rank is in; None if only its stack tells that it waits."""

    operation: Operation | None = None
    group: GroupProgress | None = None
    awaited: frozenset[int] = frozenset()  # ranks that have not entered it, or about which nothing is known
    for_anyone: bool = False  # nobody knows for whom


class Waits:
    """Who waits for whom. `of` has the ranks that wait.

    A rank may have entered an operation asynchronously and be elsewhere by now, as its stack may tell. But a stack can
    also look like that of `work.wait()` or `tensor.item()`, so it decides only if `trust_stacks`.
    """

    def __init__(self, ranks: Sequence[RankEvidence], *, trust_stacks: bool = False) -> None:
        self.evidence: Mapping[int, RankEvidence] = {
            each.rank: each for each in sorted(ranks, key=lambda each: each.rank)
        }
        self.places: Mapping[int, StackPlace] = {each.rank: place_of_stack(each.stack) for each in ranks}
        members = {rank for each in ranks for group in each.groups for rank in group.ranks}
        self.unseen = members - self.evidence.keys() | {each.rank for each in ranks if _is_unseen(each)}
        self._trust_stacks = trust_stacks
        self.of: Mapping[int, Wait] = {each.rank: wait for each in ranks if (wait := self._wait(each))}
        self.free = [rank for rank in self.evidence if rank not in self.of and rank not in self.unseen]
        self._awaits = {rank: self.awaited_by(rank) for rank in self.of}

    def awaited_by(self, rank: int) -> set[int]:
        """The ranks that this one waits for. If nobody knows for whom: all that don't wait themselves."""
        wait = self.of.get(rank)
        if wait is None:
            return set()
        if not wait.for_anyone:
            return set(wait.awaited)
        running = {each for each in self.free if not has_left(self.evidence[each])}
        return running or set(self.free) or set(self.unseen)

    def to_blame(self) -> list[int]:
        """The ranks that others wait for, directly or through others, and that wait for nobody."""
        found = wait_graph.blamed(self._awaits)
        return [rank for rank in found if rank not in self.unseen] or found

    def cycle(self) -> list[int]:
        """Ranks that wait for each other, in order; empty if there are none."""
        return wait_graph.cycle(self._awaits)

    def _wait(self, evidence: RankEvidence) -> Wait | None:
        if has_left(evidence) or evidence.state == "stopped" or _is_unseen(evidence):
            return None
        place = self.places[evidence.rank]
        in_collective = place.activity == "collective" or not evidence.stack
        elsewhere = place.activity in ("data", "debugger") or place.from_worker or holds_gil(evidence, place)
        if evidence.pending and not elsewhere and (in_collective or not self._trust_stacks):
            waits = [self._in_operation(evidence, operation) for operation in evidence.pending]
            return next((wait for wait in waits if wait.awaited), waits[0])  # the oldest one that a rank is missing in
        # Without an operation in flight, the backward computes.
        computes = place.backward and bool(evidence.groups)
        return Wait(for_anyone=True) if place.activity == "collective" and not computes and not elsewhere else None

    def _in_operation(self, evidence: RankEvidence, operation: Operation) -> Wait:
        group = next((group for group in evidence.groups if group.name == operation.group), None)
        if group is None:
            return Wait(operation)
        members = {rank for rank in group.ranks if rank != evidence.rank}
        if operation.p2p:
            named = _PEERS.search(operation.name)
            peer = int(named[2]) if named else len(group.ranks)
            if peer >= len(group.ranks):
                return Wait(operation, group, for_anyone=True)
            # Both sides count their own sends and receives: the numbers can't be compared.
            met = self._is_in_p2p_with(group.ranks[peer], evidence.rank, group)
            return Wait(operation, group, frozenset() if met else frozenset({group.ranks[peer]}))
        return Wait(operation, group, frozenset(rank for rank in members if self._lacks(rank, group, operation.number)))

    def _lacks(self, rank: int, group: GroupProgress, number: int) -> bool:
        """Whether a rank can't take part in a collective that others are in."""
        if rank in self.unseen:
            return True
        evidence, place = self.evidence[rank], self.places[rank]
        if place.activity != "collective" and (evidence.state == "stopped" or holds_gil(evidence, place)):
            return True  # its counts are of the moment before, and on gloo may include sends and receives
        own = progress_in(evidence, group)
        if own is None or own.entered < number:
            return True
        return own.left < number and (evidence.state == "stopped" or has_left(evidence))

    def _is_in_p2p_with(self, rank: int, other: int, group: GroupProgress) -> bool:
        evidence = self.evidence.get(rank)
        if evidence is None or evidence.state == "stopped" or has_left(evidence):
            return False
        number = group.ranks.index(other)
        pending = (each for each in evidence.pending if each.p2p and each.group == group.name)
        return any((named := _PEERS.search(each.name)) and int(named[2]) == number for each in pending)


def progress_in(evidence: RankEvidence, group: GroupProgress) -> GroupProgress | None:
    """How far a rank is in a group. Different groups may share a name: the halves of a split have one on each rank."""
    return next((each for each in evidence.groups if (each.name, each.ranks) == (group.name, group.ranks)), None)


def has_left(evidence: RankEvidence) -> bool:
    return bool(evidence.ended) or evidence.state == "exited"


def holds_gil(evidence: RankEvidence, place: StackPlace) -> bool:
    """Whether a thread keeps the others of its process from running. A collective releases the GIL, so in one it is
    another thread, or the machine is so busy that none could run."""
    silent = evidence.state == "running" and evidence.silent > _SILENT
    return silent and (bool(evidence.gil_holder) or place.activity != "collective")


def _is_unseen(evidence: RankEvidence) -> bool:
    """Whether nothing at all could be read of it."""
    told = evidence.groups or evidence.stack or evidence.pending or evidence.ended or evidence.state != "running"
    return bool(evidence.missing) and not told
