"""One barrier over the store of the process group, for ranks that are about to wait for each other.

They can't ask each other with a collective, which could hang itself, or be taken for another one. Each call has a
number in its sequence: the collectives of a group, the methods of the Trainer, the departures from a common order. The
first rank at a number writes its value there, and the others compare theirs with it. A rank that waits for others posts
where it waits, and reads what they have posted. It leaves as soon as it is certain that they will not come:

    different       one of them has come with another value
    stuck           they wait elsewhere for ranks that wait for them, or have ended
    ended           the process of one has died: what comes next fails, and the launcher knows why
    late            not in time

Where only a stack tells that a rank waits, idle in a collective, a thread posts it (train/standstill.py)."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple

from paceline.diagnose.hang import wait_graph
from paceline.diagnose.hang.process_stacks import has_exited, machine
from paceline.diagnose.hang.stack_place import place_of
from paceline.run.heartbeat import Counters

METHODS = "methods"  # the sequence of the methods of the Trainer, between which are micro-batches
_FIRST_LOOK, _LONGEST_LOOK = 0.05, 0.5  # seconds between looks at the others
_SHORTEST_POLL, _LONGEST_POLL = 0.0001, 0.01
_CONFIRMATIONS = 2  # looks in which every rank that can't continue has posted again
_GRACE = 1.0  # seconds in which the other members may add their side
_COMPARED = 1.5  # seconds in which a rank that compares the call of a collective enters that collective
_STALE, _STALE_IDLE = 2.0, 5.0  # seconds after which a rank that has not posted again is assumed to run

Outcome = Literal["all", "different", "stuck", "late", "ended"]


class Call(NamedTuple):
    """A call of `arrive`."""

    sequence: str
    number: int
    value: str
    place: str
    members: list[int]
    leaves: bool = False  # without an error
    sees_idle: bool = False
    attempt: int = 0  # increases whenever this rank has been refused


class Post(NamedTuple):
    """What a rank has posted last."""

    serial: int  # increases with each
    call: Call  # its last one
    waits: bool  # in that call
    place: str  # of its main thread, or how its code has ended
    idle: bool  # in a collective: it continues only if another rank does something
    stalled: bool
    ended: bool
    failed: bool  # it knows that it is stuck
    micros: int  # micro-batches since its last method of the Trainer
    counts: dict[str, int]  # calls that its main thread has made, by sequence
    background: list[str]  # sequences in which other threads make calls

    @classmethod
    def from_json(cls, values: list[Any]) -> Post:
        return cls(values[0], Call(*values[1]), *values[2:])

    def has_made(self, call: Call) -> bool:
        return self.counts.get(call.sequence, 0) >= call.number


class Arrival(NamedTuple):
    """How a call has ended, and what is known then."""

    outcome: Outcome
    call: Call
    here: int  # members that have come with this value
    sides: Mapping[int, Call] = {}  # calls at this number by rank, as far as they were told
    posts: Mapping[int, Post] = {}  # of the ranks that are stuck, or of all


@dataclass
class _Sequence:
    """The calls of this rank in a sequence."""

    number: int = 0
    errors: int = 0  # that all members have raised: if the user's code handles one, their numbers are equal again
    attempt: int = 0


class Board:
    """Where the ranks of a process group post, and meet. `name`: separates it from others in its store, which may
    outlive a group; by default a count."""

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        counters: Counters,
        *,
        name: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.store, self.rank, self.world, self._counters = store, rank, world, counters
        self.clock, self.sleep = clock, sleep
        self.name = str(store.add(f"paceline/rounds/{rank}", 1)) if name is None else name
        self._host = f"{machine()} "
        self.set(f"{self._host}{os.getpid()}", "process", rank)
        self._sequences: dict[str, _Sequence] = {}
        self._background: set[str] = set()
        self._call = Call("", 0, "none", "none", [rank])  # the last one of the main thread
        self._waits = self._failed = False
        self._serial, self._posting = 0, threading.Lock()
        self._place, self._idle, self._stalled = "", False, False
        self._micros_before = counters.micros  # at the last method of the Trainer

    def begin(self, call: Call) -> Call:
        """Number a call."""
        state = self._sequences.setdefault(call.sequence, _Sequence())
        state.number += 1
        call = call._replace(sequence=f"{call.sequence}.{state.errors}", number=state.number, attempt=state.attempt)
        if _is_in_background():
            self._background.add(call.sequence)
        else:
            self._call = call
        return call

    def end(self, sequence: str, arrival: Arrival) -> Arrival:
        state, outcome = self._sequences[sequence], arrival.outcome
        self._failed |= outcome == "stuck"
        if sequence == METHODS and outcome in ("stuck", "late"):  # it can still come with the others
            state.number, state.attempt = state.number - 1, state.attempt + 1
        elif outcome in ("different", "stuck", "late"):
            self._sequences[sequence] = _Sequence(errors=state.errors + 1)
        elif sequence == METHODS:
            self._counters.calls += 1
            self._micros_before = self._counters.micros
        return arrival

    def observe(self, place: str, *, idle: bool, stalled: bool) -> None:
        """What the thread that observes this rank has seen."""
        self._place, self._idle, self._stalled = place, idle, stalled

    def wait(self, begins: bool = True) -> None:
        """The main thread waits in its call. What other threads wait for does not keep the rank from continuing."""
        if not _is_in_background():
            self._waits, self._place = begins, place_of(sys._getframe()).text

    def post(self, ended: str = "") -> None:
        with self._posting:  # a later post must not be replaced by an earlier one
            self._serial += 1
            counts = {f"{name}.{state.errors}": state.number for name, state in list(self._sequences.items())}
            post = Post(
                self._serial, self._call, self._waits and not ended, ended or self._place, self._idle, self._stalled,
                bool(ended), self._failed, self._counters.micros - self._micros_before, counts, [*self._background],
            )  # fmt: skip
            self.set(json.dumps(post), "rank", self.rank)

    def read_post(self, rank: int) -> Post | None:
        text = self.read("rank", rank)
        return None if text is None else Post.from_json(json.loads(text))

    def read_posts(self) -> dict[int, Post]:
        found = ((rank, self.read_post(rank)) for rank in range(self.world))
        return {rank: post for rank, post in found if post is not None}

    def has_died(self, ranks: Iterable[int]) -> bool:
        for rank in ranks:
            host, _, process = (self.read("process", rank) or "").rpartition(" ")
            if f"{host} " == self._host and has_exited(int(process)):
                return True
        return False

    def is_set(self, key: str, seconds: float) -> bool:
        """Whether a key exists within that time. `Store.wait` would warn, and keep other threads from the store."""
        until, pause = self.clock() + seconds, _SHORTEST_POLL
        while not self.store.check([key]):
            if self.clock() > until:
                return False
            self.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL)
        return True

    def set(self, value: str, *parts: object) -> None:
        self.store.set(self.key(*parts), value)

    def read(self, *parts: object) -> str | None:
        key = self.key(*parts)
        return self.store.get(key).decode() if self.store.check([key]) else None

    def key(self, *parts: object) -> str:
        return "/".join(map(str, ("paceline", self.name, *parts)))


def arrive(
    board: Board,
    sequence: str,
    value: str,
    members: Sequence[int],
    *,
    place: str,
    wait: float,
    give_up: bool = False,
    sees_idle: bool = False,
) -> Arrival:
    """Wait until all members have come with this value to the same number of the sequence.

    Args:
        place: where this rank makes the call, for people
        wait: seconds
        give_up: leave without an error; others that leave with one may still come after it
        sees_idle: whether ranks count as waiting that are idle in a collective, or in a call that asks this as well
    """
    call = board.begin(Call(sequence, 0, value, place, [*members], give_up, sees_idle))
    everyone, done = len(members), board.key(call.sequence, "all", call.number)
    rank, first = _first(board, call)
    if first.value != value:
        board.set(_told(board, call), call.sequence, "differs", call.number)
        return board.end(sequence, _different(board, call, {rank: first}))
    if board.store.add(board.key(call.sequence, "count"), 1) == call.number * everyone:
        board.store.set(done, "")
        if call.number > 1:  # all members are here, so none waits for the previous one
            for name in ("all", "first"):
                board.store.delete_key(board.key(call.sequence, name, call.number - 1))
    elif not board.is_set(done, _FIRST_LOOK):
        board.wait()
        try:
            return board.end(sequence, _wait(board, call, done, wait))
        finally:
            board.wait(False)
    return board.end(sequence, Arrival("all", call, everyone))


def _told(board: Board, call: Call) -> str:
    return json.dumps([board.rank, call._replace(members=[])])


def _first(board: Board, call: Call) -> tuple[int, Call]:
    """The rank that has come first to this number, and its call; now this one, if that has been refused meanwhile."""
    key = board.key(call.sequence, "first", call.number)
    rank, first = json.loads(board.store.compare_set(key, "", _told(board, call)))
    return rank, Call(*first)


def _wait(board: Board, call: Call, done: str, seconds: float) -> Arrival:
    until, pause, decided = board.clock() + seconds, _FIRST_LOOK, inf
    verdict = Verdict(board.world, sees_idle=call.sees_idle)
    while not board.is_set(done, pause):
        pause = min(pause * 1.5, _LONGEST_LOOK)
        if not _is_in_background():
            board.post()
        posts, sides = board.read_posts(), dict([_first(board, call)])
        if (differs := board.read(call.sequence, "differs", call.number)) is not None:
            rank, other = json.loads(differs)
            sides[rank] = Call(*other)
        if any(side.value != call.value for side in sides.values()):
            return _different(board, call, sides)
        stuck = _read_verdict(board, call) or verdict.look(posts, board.clock())
        if board.rank in stuck and not (call.leaves and any(map(_will_raise, stuck.values()))):
            _tell_verdict(board, call, stuck)
            decided = min(decided, board.clock())
            # A rank inside a collective notices the end of this one, and tells at which line it was.
            compares = any(posts[rank].waits and not posts[rank].call.sees_idle for rank in stuck.keys() & posts)
            if not (call.sees_idle and compares) or board.clock() > decided + _COMPARED:
                return _leave(board, Arrival("stuck", call, 0, sides, stuck))
        late = [rank for rank in call.members if rank not in posts or not posts[rank].has_made(call)]
        if board.has_died(rank for rank in late if rank not in posts or not posts[rank].ended):
            return Arrival("ended", call, 0, sides, posts)
        if board.clock() > until or board.read(call.sequence, "late") is not None:
            return _leave(board, Arrival("late", call, 0, sides, posts))
    return Arrival("all", call, len(call.members))


def _will_raise(post: Post) -> bool:
    """Whether a rank waits in a call that ends with an error, of which this one is a reason: it may come then."""
    return post.waits and post.call.sees_idle and not post.call.leaves


def _leave(board: Board, arrival: Arrival) -> Arrival:
    """Withdraw the arrival of this rank. If all have come meanwhile, the call has succeeded."""
    call, is_method = arrival.call, arrival.call.sequence.startswith(METHODS)
    count, everyone = board.key(call.sequence, "count"), len(call.members)
    here = board.store.add(count, -1) + 1 - (call.number - 1) * everyone
    if here == everyone:
        board.store.add(count, 1)
        return arrival._replace(here=here, outcome="all")
    if not is_method and (arrival.outcome == "late" or call.leaves):
        board.set("", call.sequence, "late")  # for members that come later
    if is_method and here == 1:  # others, or this rank itself, may come with another value
        first = board.key(call.sequence, "first", call.number)
        board.store.compare_set(first, board.store.get(first).decode(), "")
    return arrival._replace(here=here)


def _different(board: Board, call: Call, sides: dict[int, Call]) -> Arrival:
    """Members have come with different values. They add their sides, if they come in time."""
    until, sides = board.clock() + _GRACE, {**sides, board.rank: call}
    if not _is_in_background():
        board.post()
    board.set(json.dumps(call._replace(members=[])), call.sequence, "side", call.number, board.rank)
    while len(sides) < len(call.members) and board.clock() < until:
        board.sleep(_FIRST_LOOK / 5)
        for rank in call.members:
            if (side := board.read(call.sequence, "side", call.number, rank)) is not None:
                sides[rank] = Call(*json.loads(side))
    here = sum(side.value == call.value for side in sides.values())
    return Arrival("different", call, here, sides, board.read_posts())


def _tell_verdict(board: Board, call: Call, stuck: Mapping[int, Post]) -> None:
    """This rank may end before the others have come to it by themselves."""
    for rank, post in stuck.items():
        if post.call.sees_idle == call.sees_idle and not post.call.leaves:
            told = post.call
            board.set(json.dumps([*stuck.items()]), told.sequence, "stuck", told.number, rank, told.attempt)


def _read_verdict(board: Board, call: Call) -> dict[int, Post]:
    text = board.read(call.sequence, "stuck", call.number, board.rank, call.attempt)
    return {} if text is None else {rank: Post.from_json(post) for rank, post in json.loads(text)}


class Verdict:
    """Which ranks can certainly not continue, from several looks at what all have posted.

    A post may be older than another, and its rank may have continued. If ranks that wait for each other have all posted
    the same again after a look, they have waited in these calls at the time of that look.
    """

    def __init__(self, world: int, *, sees_idle: bool = False) -> None:
        self._world, self._sees_idle = world, sees_idle
        self._changed: dict[int, tuple[int, float]] = {}  # serial and time of each rank's last new post
        self._suspects: dict[int, Post] = {}
        self._confirmed = 0

    def look(self, posts: Mapping[int, Post], now: float) -> dict[int, Post]:
        for rank, post in posts.items():
            if self._changed.get(rank, (0, 0.0))[0] != post.serial:
                self._changed[rank] = (post.serial, now)
        fresh = {rank: post for rank, post in posts.items() if post.ended or not self._is_stale(rank, post, now)}
        ended = [rank for rank, post in fresh.items() if post.ended]
        stuck = wait_graph.stuck(awaited(fresh, self._world, sees_idle=self._sees_idle), ended)
        before, self._suspects = self._suspects, {rank: fresh[rank] for rank in stuck}
        if _places(before) != _places(self._suspects):
            self._confirmed = 0
        elif all(post.ended or post.serial > before[rank].serial for rank, post in self._suspects.items()):
            self._confirmed += 1
        else:
            self._suspects = before
        return dict(sorted(self._suspects.items())) if self._confirmed >= _CONFIRMATIONS else {}

    def _is_stale(self, rank: int, post: Post, now: float) -> bool:
        return now - self._changed[rank][1] >= (_STALE if post.waits else _STALE_IDLE)


def awaited(posts: Mapping[int, Post], world: int, *, sees_idle: bool) -> dict[int, set[int]]:
    """For each rank that waits: those that it waits for, among the ranks that have posted."""
    live = {rank: post for rank, post in posts.items() if not post.ended}
    waiting = {rank: post for rank, post in live.items() if post.waits and post.call.sees_idle <= sees_idle}
    found = {rank: _late(post, posts) for rank, post in waiting.items()}
    if sees_idle:
        # Nobody knows for whom they wait that are idle. If all ranks wait, nobody will ever continue.
        everyone = len(posts) == world and all(post.waits or post.idle for post in live.values())
        for rank, post in live.items():
            if post.idle and not post.waits:
                passed = {other for other in waiting if _is_past(post, waiting[other])}
                found[rank] = set(posts) - {rank} if everyone else passed
    return found


def _late(waiting: Post, posts: Mapping[int, Post]) -> set[int]:
    call = waiting.call
    members = ((rank, posts[rank]) for rank in call.members if rank in posts)
    return {rank for rank, post in members if not post.has_made(call) and call.sequence not in post.background}


def _is_past(idle: Post, waiting: Post) -> bool:
    """Whether a rank is in a micro-batch that comes after the method of the Trainer in which another one waits."""
    call, made = waiting.call, idle.counts.get(waiting.call.sequence, 0)
    return call.sequence.startswith(METHODS) and (made, idle.micros) > (call.number - 1, waiting.micros)


def _places(posts: Mapping[int, Post]) -> dict[int, object]:
    return {rank: post.call[:2] if post.waits or post.ended else post.place for rank, post in posts.items()}


def _is_in_background() -> bool:
    """Whether another Python thread than the main one makes the call. Those of autograd are not Python's."""
    thread = threading.current_thread()
    return thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)
