"""Why ranks make no progress: which rank the others wait for, and where it is.

A pure function of what launchers have read (evidence.py):

    ranks wait for others that wait for nobody          those are to blame  "missing", "left"
    ranks are in one operation, but called it unlike    both sides          "mismatch"
    ranks wait for each other in different operations   both sides          "order"
    all are in one operation, and called it alike       their connections   "network"
    nobody waits                                        every rank          "stands-still"
    others have ended                                   those that are left "exit"
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from paceline.diagnose.hang import hang_advice
from paceline.diagnose.hang.evidence import Hang, RankEvidence
from paceline.diagnose.hang.hang_advice import AT_PLACE, Advice, RankPlace, line_of, place_of_rank
from paceline.diagnose.hang.waits import Wait, Waits, has_left, progress_in
from paceline.text import format_duration, rank_names

_MAX_SIDES = 4  # lines about ranks at different places
# Operations whose tensors may differ between ranks: all_to_all, gather, scatter; but not all_gather, reduce_scatter.
_UNEQUAL = ("all_to_all", "alltoall", "gather", "scatter")


def find_hang(ranks: Sequence[RankEvidence], seconds: float, *, at_exit: bool = False) -> Hang:
    """What can be concluded about ranks that have made no progress for some seconds. `at_exit`: when others have
    ended."""
    waits = Waits(ranks)
    if not waits.to_blame() and (trusting := Waits(ranks, trust_stacks=True)).to_blame():
        waits = trusting
    report = _Report(waits, seconds)
    if not waits.of:
        return report.unable_to_exit() if at_exit else report.stands_still()
    if blamed := waits.to_blame():
        return report.missing(blamed)
    if sides := _different_calls(waits):
        return report.mismatch(sides)
    sides = _grouped(waits.of, report.side_of)
    if report.has_moved_on():
        # A link that breaks leaves some ranks of a ring with the result.
        same_line = len({waits.places[rank].line for rank in waits.of}) == 1
        return report.network() if report.nodes and same_line else report.out_of_step(sides)
    if waits.cycle() or len(sides) > 1:
        return report.order(sides)
    return report.network()


def _different_calls(waits: Waits) -> list[list[int]]:
    """Ranks that are in the same number of the same group, but in another operation or with other tensors."""
    numbers = _grouped(
        [rank for rank, wait in waits.of.items() if wait.group and wait.operation and not wait.operation.p2p],
        lambda rank: _number(waits.of[rank]),
    )
    return next(
        (sides for ranks in numbers if len(sides := _grouped(ranks, lambda rank: _call(waits.of[rank]))) > 1), []
    )


def _number(wait: Wait) -> Hashable:
    operation, group = wait.operation, wait.group
    return (operation.group, group.ranks, operation.number) if operation and group else operation


def _call(wait: Wait) -> Hashable:
    """What all ranks must agree on. Shapes don't matter to a collective, only the number of elements."""
    assert wait.operation
    name = wait.operation.name
    if name.startswith(_UNEQUAL):
        return name, wait.operation.dtypes[:1]
    return name, wait.operation.dtypes, tuple(map(prod, wait.operation.sizes))


def _grouped(ranks: Iterable[int], key: Callable[[int], Hashable]) -> list[list[int]]:
    """Ranks with the same key, fewest first."""
    found: dict[Hashable, list[int]] = {}
    for rank in sorted(ranks):
        found.setdefault(key(rank), []).append(rank)
    return sorted(found.values(), key=len)


@dataclass(frozen=True)
class _Report:
    waits: Waits
    seconds: float

    @property
    def nodes(self) -> dict[int, int]:
        """The node of each rank, if there are several."""
        nodes = {rank: each.node for rank, each in self.waits.evidence.items()}
        return nodes if len(set(nodes.values())) > 1 else {}

    def missing(self, blamed: list[int]) -> Hang:
        """Ranks wait for others that wait for nobody."""
        wait = self._wait_for(blamed)
        left = [rank for rank in blamed if rank in self.waits.evidence and has_left(self.waits.evidence[rank])]
        if left:
            return self._left(left, wait)
        if blamed[0] in self.waits.unseen:
            return self._unseen(blamed, wait)
        where = {rank: place_of_rank(self.waits.evidence[rank]) for rank in blamed}
        does = f"never entered {self._name(wait)}" if wait and wait.operation and self._lacks(blamed, wait) else ""
        operation = f" in {self._name(wait)}" if wait and wait.operation else ""
        does = does or ("keep" if len(blamed) > 1 else "keeps") + f" the others waiting{operation}"
        first = f"{self._names(blamed)} {does}{self._step()}: {self._places(blamed, where)}"
        return self._hang("missing", blamed, [first], self._advice(blamed[0], where[blamed[0]]), wait)

    def _left(self, left: list[int], wait: Wait | None) -> Hang:
        how = _grouped(left, lambda rank: self.waits.evidence[rank].ended)
        ended = "; ".join(
            f"{self._names(ranks)} {self.waits.evidence[ranks[0]].ended or 'has exited'}" for ranks in how
        )
        operation = f" in {self._name(wait)}" if wait and wait.operation else ""
        first = f"{ended}, but other ranks still wait for {'it' if len(left) == 1 else 'them'}{operation}{self._step()}"
        return self._hang("left", left, [first, *self._behind(left, wait)], hang_advice.LEFT, wait)

    def _unseen(self, unseen: list[int], wait: Wait | None) -> Hang:
        reasons = {each.missing for rank in unseen if (each := self.waits.evidence.get(rank))}
        operation = f"in {self._name(wait)} " if wait and wait.operation else ""
        why = "; ".join(sorted(reasons)) or "nothing is known about their state"
        first = f"all other ranks wait {operation}for {self._names(unseen)}{self._step()}: {why}"
        return self._hang("missing", unseen, [first], hang_advice.UNSEEN, wait)

    def mismatch(self, sides: list[list[int]]) -> Hang:
        """Ranks are in the same number of a group with different calls."""
        wait = self.waits.of[sides[-1][0]]
        assert wait.operation
        what = f"collective #{wait.operation.number}{_of_group(wait)}"
        first = f"ranks called {what} differently{self._step()}:"
        calls = [f"  {self._names(side)}: {self._call(side[0])}{self._at(side[0])}" for side in sides[:_MAX_SIDES]]
        return self._hang("mismatch", _minority(sides), [first, *calls], hang_advice.MISMATCH, wait, waiting=False)

    def out_of_step(self, sides: list[list[int]]) -> Hang:
        """Some ranks are in an operation that others have left: those called something else with its number."""
        wait = next(wait for wait in self.waits.of.values() if self._left_by_others(wait))
        first = f"ranks disagree about {self._name(wait)}: some have left it, and others are still in it{self._step()}"
        return self._hang(
            "mismatch", _minority(sides), [first, *self._sides(sides)], hang_advice.MISMATCH, wait, waiting=False
        )

    def order(self, sides: list[list[int]]) -> Hang:
        """Ranks wait for each other."""
        cycle = self.waits.cycle()
        involved = [side for side in sides if not cycle or set(side) & set(cycle)] or sides
        waits = [self.waits.of[side[0]] for side in reversed(involved)]
        wait = next((wait for wait in waits if wait.operation), waits[0])
        ranks = sorted(rank for side in involved for rank in side)
        first = f"{self._names(ranks)} wait for each other, at different places{self._step()}:"
        return self._hang(
            "order", _minority(involved), [first, *self._sides(sides)], hang_advice.ORDER, wait, waiting=False
        )

    def network(self) -> Hang:
        """All ranks are in the same operation."""
        wait = next(iter(self.waits.of.values()))
        ranks = self._names(self.waits.of)
        nodes = sorted({self.nodes[rank] for rank in self.waits.of}) if self.nodes else []
        between = f" between nodes {', '.join(map(str, nodes))}" if len(nodes) > 1 else ""
        name = self._name(wait) if wait.operation else "the same call"
        first = f"{ranks} are all in {name}{self._step()}, with the same arguments, and it does not complete"
        second = f"no rank is missing: the connection{between} is cut or very slow" if between else "no rank is missing"
        advice = hang_advice.NETWORK if between else hang_advice.LOCAL_NETWORK
        return self._hang("network", [], [first, second], advice, wait)

    def stands_still(self) -> Hang:
        """Nobody waits in a collective."""
        running = [rank for rank in self.waits.free if not has_left(self.waits.evidence[rank])]
        where = {rank: place_of_rank(self.waits.evidence[rank]) for rank in running}
        stopped = [rank for rank in running if where[rank].kind == "stopped"]
        blamed = stopped or running
        if not blamed:
            why = "; ".join(sorted({each.missing for each in self.waits.evidence.values() if each.missing}))
            return Hang("unknown", (), f"no rank makes progress, and none can be seen: {why or 'all have ended'}")
        stood = format_duration(self.seconds)
        first = f"no rank has made progress for {stood}{self._step()}, and none waits in a collective"
        sides = _grouped(running, lambda rank: where[rank].text)
        places = [f"  {self._names(side)}: {_are(len(side), where[side[0]].text)}" for side in sides[:_MAX_SIDES]]
        advice = self._advice(blamed[0], where[blamed[0]])
        return self._hang("stands-still", blamed, [first, *places], advice, None, waiting=False)

    def unable_to_exit(self) -> Hang:
        """Other ranks have ended, or the code of all has returned."""
        seen = self.waits.evidence
        left = [rank for rank, each in seen.items() if each.state != "exited"]
        if not left:
            return self.stands_still()
        where = {rank: place_of_rank(seen[rank]) for rank in left}
        have = "has" if len(left) == 1 else "have"
        others = "" if len(left) == len(seen) and not self.nodes else ", but other ranks have ended"
        idle = f"idle for {format_duration(self.seconds)}"
        first = f"{self._names(left)} {have} not exited, {idle}{others}: {self._places(left, where)}"
        told = [f"  {self._names([rank])} {seen[rank].ended}" for rank in left[:_MAX_SIDES] if seen[rank].ended]
        advice = hang_advice.EXIT._replace(fix=hang_advice.EXIT.fix.format(pid=seen[left[0]].pid))
        return self._hang("exit", left, [first, *told], advice, None, waiting=False)

    # ---- parts of the text

    def _hang(
        self,
        kind: str,
        ranks: Collection[int],
        lines: list[str],
        advice: Advice,
        wait: Wait | None,
        *,
        waiting: bool = True,
    ) -> Hang:
        waiters = self._waiters(wait) if waiting else []
        seen = self.waits.evidence.values()
        unread = [rank for rank in sorted(self.waits.unseen) if rank not in ranks]
        unknown = [f"nothing could be read of {self._names(unread)}"] if unread else []
        places = {each.rank: line for each in seen if (line := line_of(each))}
        operation = wait.operation if wait else None
        return Hang(kind, tuple(ranks), "\n".join([*lines, *waiters, *unknown, str(advice)]), operation, places)

    def _waiters(self, wait: Wait | None) -> list[str]:
        sides = _grouped(self.waits.of, self.side_of)[::-1]
        lines = []
        for side in sides[:_MAX_SIDES]:
            have = "has" if len(side) == 1 else "have"
            other = self.waits.of[side[0]]
            same = wait is None or other.operation is None or _number(other) == _number(wait)
            inside = self._in_p2p(side[0]) if same else f" in {self._name(other)}"
            lines.append(
                f"{self._names(side)} {have} waited for {format_duration(self.seconds)}{inside}{self._at(side[0])}"
            )
        others = sum(map(len, sides[_MAX_SIDES:]))
        return lines + ([f"{others} other ranks wait elsewhere"] if others else [])

    def _sides(self, sides: list[list[int]]) -> list[str]:
        """Both sides of ranks that wait for each other."""
        lines = []
        for side in sides[:_MAX_SIDES]:
            wait = self.waits.of[side[0]]
            verb = "waits" if len(side) == 1 else "wait"
            awaited = sorted(self.waits.awaited_by(side[0]))
            operation = f" in {self._name(wait)}" if wait.operation else self._in_p2p(side[0])
            whom = f" for {self._names(awaited)}" if awaited and wait.operation else ""
            lines.append(f"  {self._names(side)} {verb}{operation}{whom}{self._at(side[0])}{self._count(side)}")
        return lines

    def _in_p2p(self, rank: int) -> str:
        """For a send or receive that torch has not recorded."""
        is_known = self.waits.of[rank].operation is not None or not self.waits.places[rank].p2p
        return "" if is_known else " in a send or receive"

    def _places(self, ranks: list[int], where: dict[int, RankPlace]) -> str:
        """Where ranks are, after a colon."""
        sides = _grouped(ranks, lambda rank: where[rank].text)[::-1]
        if len(sides) == 1:
            return ("it " if len(ranks) == 1 else "they ") + _are(len(ranks), where[ranks[0]].text)
        shown = [f"{self._names(side)} {_are(len(side), where[side[0]].text)}" for side in sides[:_MAX_SIDES]]
        return "; ".join(shown)

    def _advice(self, rank: int, place: RankPlace) -> Advice:
        advice = AT_PLACE[place.kind]
        pid = place.stopped_pid or self.waits.evidence[rank].pid
        node = f" on node {self.nodes[rank]}" if rank in self.nodes and "{pid}" in advice.fix else ""
        return advice._replace(fix=advice.fix.format(pid=pid) + node)

    def _names(self, ranks: Iterable[int]) -> str:
        return rank_names(ranks, self.nodes)

    def _name(self, wait: Wait) -> str:
        """ "all_reduce #418 of the shard group" """
        assert wait.operation
        if wait.operation.p2p:  # numbered by each side for itself
            return f"{wait.operation.name}{_of_group(wait)}"
        return f"{wait.operation.name} #{wait.operation.number}{_of_group(wait)}"

    def _call(self, rank: int) -> str:
        """ "all_reduce of Float[2, 3]" """
        operation = self.waits.of[rank].operation
        assert operation
        dtypes = operation.dtypes + ("",) * (len(operation.sizes) - len(operation.dtypes))
        tensors = [f"{dtype}{list(size)}" for dtype, size in zip(dtypes, operation.sizes, strict=False)]
        more = ", …" if len(tensors) > 2 else ""
        return operation.name + (f" of {', '.join(tensors[:2])}{more}" if tensors else "")

    def _at(self, rank: int) -> str:
        """Where a rank waits: ", in trainer.train() at train.py:12"; or nothing if its stack is not known."""
        return hang_advice.after(hang_advice.at_line(self.waits.places[rank]))

    def _step(self) -> str:
        """The step that most of the ranks that wait are in."""
        asked = self.waits.of or self.waits.evidence
        steps = Counter(step for rank in asked if (step := self.waits.evidence[rank].step) is not None)
        return f" (step {steps.most_common(1)[0][0]})" if steps else ""

    def _count(self, ranks: list[int]) -> str:
        """How many collectives ranks have entered in the group that another one waits in, if they are not there."""
        rank, are = ranks[0], "it is" if len(ranks) == 1 else "they are"
        wait = next((wait for wait in self.waits.of.values() if wait.group and rank in wait.awaited), None)
        if wait is None or wait.operation is None or wait.group is None or wait.operation.p2p:
            return ""
        own = progress_in(self.waits.evidence[rank], wait.group)
        behind = wait.operation.number - (own.entered if own else 0)
        return f"; {are} {_collectives(behind)} behind{_of_group(wait).replace(' of', ' in')}" if behind > 0 else ""

    def _behind(self, ranks: list[int], wait: Wait | None) -> list[str]:
        """How many collectives a rank that has left did not make."""
        if wait is None or wait.operation is None or wait.group is None or wait.operation.p2p:
            return []
        lines = []
        for rank in ranks[:_MAX_SIDES]:
            own = progress_in(self.waits.evidence[rank], wait.group)
            if own is not None and own.entered < wait.operation.number:
                missing = _collectives(wait.operation.number - own.entered)
                lines.append(f"{self._names([rank])} made {missing} fewer than the ranks that wait")
        return lines

    # ---- what follows from the waits

    def side_of(self, rank: int) -> Hashable:
        """Ranks of the same side wait in the same operation, at the same line."""
        return _number(self.waits.of[rank]), self.waits.places[rank].line

    def has_moved_on(self) -> bool:
        return any(map(self._left_by_others, self.waits.of.values()))

    def _left_by_others(self, wait: Wait) -> bool:
        """Whether some ranks have left a collective that others are still in, although all have entered it."""
        if wait.operation is None or wait.group is None or wait.operation.p2p or wait.awaited:
            return False
        members = (progress_in(self.waits.evidence[rank], wait.group) for rank in wait.group.ranks)
        return any(each is not None and each.left >= wait.operation.number for each in members)

    def _wait_for(self, blamed: Collection[int]) -> Wait | None:
        """The operation in which most ranks wait for those to blame; the earliest one if there are several."""
        direct = [wait for wait in self.waits.of.values() if wait.operation and wait.awaited & set(blamed)]
        if not direct:
            return None
        counts = Counter(map(_number, direct))
        return max(direct, key=lambda wait: (counts[_number(wait)], -(wait.operation.number if wait.operation else 0)))

    def _lacks(self, blamed: Collection[int], wait: Wait) -> bool:
        """Whether none of them has entered the operation. A rank that was stopped may have."""
        if wait.group is None or wait.operation is None or wait.operation.p2p:
            return False
        own = [progress_in(self.waits.evidence[rank], wait.group) for rank in blamed if rank in wait.awaited]
        return len(own) == len(blamed) and all(each is None or each.entered < wait.operation.number for each in own)


def _minority(sides: list[list[int]]) -> list[int]:
    """The ranks that differ from most others; all of them if that can't be told."""
    if len(sides) > 1 and len(sides[0]) < len(sides[-1]):
        most = len(sides[-1])
        return sorted(rank for side in sides if len(side) < most for rank in side)
    return sorted(rank for side in sides for rank in side)


def _of_group(wait: Wait) -> str:
    return f" of the {wait.group.label} group" if wait.group and wait.group.label else ""


def _collectives(number: int) -> str:
    return "one collective" if number == 1 else f"{number} collectives"


def _are(number: int, text: str) -> str:
    return text if number == 1 else "are" + text.removeprefix("is")
