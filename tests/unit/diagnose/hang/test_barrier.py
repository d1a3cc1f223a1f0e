"""The barrier of ranks, with a store, a clock and other ranks that are made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from paceline.diagnose.hang import barrier, wait_graph
from paceline.diagnose.hang.barrier import METHODS, Arrival, Board, Call, Post, Verdict, arrive, awaited
from paceline.run.heartbeat import Counters

MEMBERS = [0, 1]
POST = Post(1, Call("world", 0, "", "", MEMBERS), False, "a.py:1", False, False, False, False, 0, {}, [])


class Store:
    """A store in this process. Counts its operations."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, number: int) -> int:
        self.values[key] = str(int(self.values.get(key, b"0")) + number).encode()
        return int(self.values[key])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.values.get(key, b"") == expected.encode():
            self.values[key] = desired.encode()
        return self.values.get(key, expected.encode())

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


class World:
    """Rank 0 waits; what `meanwhile` does for the others happens whenever it sleeps."""

    def __init__(self, meanwhile: Callable[[float], object] = lambda now: None) -> None:
        self.now, self.store, self.meanwhile = 0.0, Store(), meanwhile
        self.counters = [Counters() for _ in MEMBERS]
        self.boards = [self.board(rank) for rank in MEMBERS]

    def board(self, rank: int) -> Board:
        return Board(self.store, rank, len(MEMBERS), self.counters[rank], clock=lambda: self.now, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        meanwhile, self.meanwhile = self.meanwhile, lambda now: None  # which may sleep as well
        meanwhile(self.now)
        self.meanwhile = meanwhile

    def arrive(self, rank: int, value: str = "evaluate()", sequence: str = METHODS, **options: Any) -> Arrival:
        options = {"wait": 60.0, "place": f"{value} at a.py:{rank}", "sees_idle": True, **options}
        return arrive(self.boards[rank], sequence, value, MEMBERS, **options)


def after(seconds: float, act: Callable[[], object]) -> Callable[[float], object]:
    """Act once, at that time."""
    acts = [act]
    return lambda now: acts.pop()() if now > seconds and acts else None


def test_all_come_in_any_order_and_keys_do_not_pile_up() -> None:
    world = World()
    sizes = []
    for number in range(6):
        first, last = number % 2, 1 - number % 2
        world.meanwhile = after(world.now + 0.02, lambda last=last: world.arrive(last))  # type: ignore[misc]
        assert world.arrive(first).outcome == "all"
        sizes.append(len(world.store.values))
    assert world.counters[0].calls == 6 and sizes[-1] == sizes[1]


def test_a_rank_that_runs_is_waited_for_as_long_as_was_asked() -> None:
    world = World()
    world.meanwhile = after(30.0, lambda: world.arrive(1))
    assert world.arrive(0).outcome == "all"
    late = World().arrive(0, wait=5.0)
    assert (late.outcome, late.here) == ("late", 1)


def test_other_values_are_told_to_both_and_the_next_numbers_are_equal_again() -> None:
    world, found = World(), []
    world.meanwhile = after(0.2, lambda: found.append(world.arrive(1, "predict()")))
    arrival = world.arrive(0)
    assert (arrival.outcome, arrival.here) == ("different", 1)
    assert found[0].outcome == "different"
    assert {rank: side.place for rank, side in arrival.sides.items()} == {
        0: "evaluate() at a.py:0",
        1: "predict() at a.py:1",
    }
    world.meanwhile = after(world.now + 0.02, lambda: world.arrive(1))
    assert world.arrive(0).outcome == "all"


def test_the_last_rank_may_come_while_another_one_leaves() -> None:
    """Then both have met, and meet again at the next call."""
    world, met = World(), []

    def add(key: str, number: int) -> int:
        if number < 0 and not met:
            met.append(world.arrive(1).outcome)
        return Store.add(world.store, key, number)

    world.store.add = add  # type: ignore[method-assign]
    assert world.arrive(0, wait=1.0).outcome == "all" and met == ["all"]
    world.meanwhile = after(world.now + 0.02, lambda: world.arrive(1))
    assert world.arrive(0, wait=1.0).outcome == "all"


def test_ranks_that_left_may_come_with_another_value_whoever_of_them_left_last() -> None:
    world, calls = World(), []
    for board in world.boards:
        calls.append(board.begin(Call(METHODS, 0, "evaluate()", "a.py:1", [0, 1, 2], sees_idle=True)))
        barrier._first(board, calls[-1])
        world.store.add(board.key(calls[-1].sequence, "count"), 1)
    for board, call in zip(world.boards, calls, strict=True):
        board.end(METHODS, barrier._leave(board, Arrival("late", call, 0)))
    world.meanwhile = after(world.now + 0.02, lambda: world.arrive(1, "save()"))
    assert world.arrive(0, "save()").outcome == "all"


def posts(world: World, **values: Any) -> Callable[[float], object]:
    """Rank 1 posts this again and again."""
    serial = iter(range(1, 10000))

    def post(now: float) -> None:
        call = Call("", 0, "none", "none", [1])
        post = POST._replace(serial=next(serial), call=call, place="step() at b.py:3", **values)
        world.boards[1].set(json.dumps(post), "rank", 1)

    return post


@pytest.mark.parametrize("values", [{"ended": True}, {"idle": True}, {"idle": True, "micros": 3}])
def test_nobody_waits_for_a_rank_that_has_ended_or_is_idle_in_a_collective(values: dict[str, Any]) -> None:
    world = World()
    world.meanwhile = posts(world, **values)
    arrival = world.arrive(0)
    assert (arrival.outcome, arrival.posts[1].place) == ("stuck", "step() at b.py:3")
    assert world.now < 2.0


def test_a_rank_that_only_stood_still_once_is_waited_for() -> None:
    world = World()
    world.boards[1].observe("step() at b.py:3", idle=True, stalled=True)
    world.boards[1].post()  # and never again: it runs
    world.meanwhile = after(20.0, lambda: world.arrive(1))
    assert world.arrive(0).outcome == "all"


@pytest.mark.parametrize("value", ["evaluate()", "predict()"])
def test_a_rank_that_was_refused_can_still_come_with_the_others(value: str) -> None:
    world = World()
    world.meanwhile = posts(world, idle=True)
    assert world.arrive(0).outcome == "stuck"
    assert world.arrive(0).outcome == "stuck"
    for number in range(3):
        first, last = (0, 1) if number % 2 else (1, 0)
        world.meanwhile = after(world.now + 0.3, lambda last=last: world.arrive(last, value))  # type: ignore[misc]
        assert world.arrive(first, value).outcome == "all"


def test_whoever_waits_is_the_first_if_the_first_was_refused_at_that_moment() -> None:
    world, found = World(), []

    world.meanwhile = after(0.2, lambda: world.store.set(world.boards[0].key(f"{METHODS}.0", "first", 1), ""))
    later = after(2.0, lambda: found.append(world.arrive(1, "predict()")))
    world.meanwhile = lambda now, before=world.meanwhile: (before(now), later(now))  # type: ignore[misc]
    assert world.arrive(0).outcome == found[0].outcome == "different"


def test_collectives_trust_no_stack() -> None:
    """A rank that is idle in a collective of others may only have a slow network."""
    world = World()
    world.meanwhile = posts(world, idle=True)
    assert world.arrive(0, sequence="collectives/all/0", sees_idle=False, wait=10.0).outcome == "late"


def test_whoever_gives_up_waits_for_a_rank_that_will_raise() -> None:
    """It waits in a method of the Trainer, raises because of this rank, and comes then."""
    world = World()
    departing = Call("depart.0", 1, "5", "train() at a.py:0", MEMBERS, leaves=True, sees_idle=True)
    waiting = POST._replace(call=departing, waits=True, counts={"depart.0": 1})
    method = POST._replace(
        call=Call(f"{METHODS}.0", 1, "", "", MEMBERS, sees_idle=True), waits=True, counts={f"{METHODS}.0": 1}
    )
    assert wait_graph.stuck(awaited({0: waiting, 1: method}, 2, sees_idle=True), ()) == {0, 1}
    serial = iter(range(1, 1000))
    world.meanwhile = lambda now: (
        world.boards[1].set(json.dumps(method._replace(serial=next(serial))), "rank", 1) if now < 3.0 else come(now)
    )
    come = after(3.0, lambda: world.arrive(1, "5", "depart", give_up=True))
    arrival = world.arrive(0, "5", "depart", give_up=True)
    assert (arrival.outcome, arrival.here) == ("all", 2)


def test_whoever_gives_up_leaves_ranks_that_are_idle_and_those_that_come_later_know_it() -> None:
    world = World()
    world.meanwhile = posts(world, idle=True)
    arrival = world.arrive(0, "5", "depart", give_up=True)
    assert (arrival.outcome, arrival.here) == ("stuck", 1)
    left, world.meanwhile = world.now, lambda now: None
    assert world.arrive(1, "5", "depart", give_up=True).outcome == "late"
    assert world.now < left + 1.0


def test_the_last_one_that_comes_while_another_gives_up_counts() -> None:
    world = World()
    found: list[Arrival] = []
    add = world.store.add

    def slow_add(key: str, number: int) -> int:
        if number < 0 and not found:
            found.append(world.arrive(1, "5", "depart", give_up=True))
        return add(key, number)

    world.store.add = slow_add  # type: ignore[method-assign]
    assert world.arrive(0, "5", "depart", give_up=True, wait=1.0)[0] == found[0].outcome == "all"


def test_a_rank_in_another_container_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process has a number that means nothing here, although the host has the same name."""
    monkeypatch.setattr(barrier, "has_exited", lambda process: True)
    monkeypatch.setattr(barrier, "machine", lambda: "host pid:[1]")
    world = World()
    monkeypatch.setattr(barrier, "machine", lambda: "host pid:[2]")
    world.boards[1] = world.board(1)
    world.boards[1].name = world.boards[0].name
    world.boards[1].set("host pid:[2] 1", "process", 1)
    world.meanwhile = after(5.0, lambda: world.arrive(1))
    assert world.arrive(0).outcome == "all"


def test_the_process_of_a_rank_that_has_died_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier, "has_exited", lambda process: True)
    assert World().arrive(0).outcome == "ended"


# ---- what is certain


def waits(group: str, number: int, members: list[int], serial: int = 1, **counts: int) -> Post:
    call = Call(group, number, "barrier()", "barrier() at a.py:1", members)
    return POST._replace(serial=serial, call=call, waits=True, counts={**counts, group: number})


def ended(**counts: int) -> Post:
    return POST._replace(ended=True, counts=counts)


@pytest.mark.parametrize(
    ("posted", "stuck"),
    [
        ({0: waits("world", 3, [0, 1])}, set()),  # rank 1 runs
        ({0: waits("world", 3, [0, 1]), 1: waits("pair", 1, [0, 1], world=2)}, {0, 1}),
        ({0: waits("world", 3, [0, 1]), 1: waits("pair", 1, [0, 1], world=3)}, set()),  # an older post: it has passed
        ({0: waits("world", 3, [0, 1]), 1: ended(world=2)}, {0, 1}),
        ({0: waits("world", 3, [0, 1]), 1: ended(world=3)}, {1}),
        # 0 waits for 1, 1 for 2, and 2 for 0, each in another group
        ({0: waits("a", 1, [0, 1]), 1: waits("b", 1, [1, 2]), 2: waits("c", 1, [0, 2])}, {0, 1, 2}),
        ({0: waits("a", 1, [0, 1]), 1: waits("b", 1, [1, 2])}, set()),
    ],
)
def test_ranks_are_stuck_that_wait_for_each_other_or_for_one_that_has_ended(
    posted: dict[int, Post], stuck: set[int]
) -> None:
    assert stuck_of(posted) == stuck


def stuck_of(posted: dict[int, Post], *, sees_idle: bool = False) -> set[int]:
    awaits = awaited(posted, len(posted), sees_idle=sees_idle)
    return wait_graph.stuck(awaits, [rank for rank, post in posted.items() if post.ended])


def test_a_group_that_another_thread_uses_is_not_waited_for_in_vain() -> None:
    busy = waits("pair", 1, [0, 1], world=2)._replace(background=["world"])
    assert stuck_of({0: waits("world", 3, [0, 1]), 1: busy}) == set()


def test_ranks_that_are_idle_wait_for_others_if_all_do_or_if_they_are_in_a_later_step() -> None:
    method = POST._replace(call=Call("methods.0", 3, "", "", [0, 1, 2], sees_idle=True), waits=True, micros=4)
    method = method._replace(counts={"methods.0": 3})
    idle, runs = POST._replace(idle=True, micros=4, counts={"methods.0": 2}), POST._replace(counts={"methods.0": 2})
    assert stuck_of({0: method, 1: idle, 2: idle}, sees_idle=True) == {0, 1, 2}
    assert stuck_of({0: method, 1: idle, 2: runs}, sees_idle=True) == set()
    assert stuck_of({0: method, 1: idle._replace(micros=5), 2: runs}, sees_idle=True) == {0, 1}
    assert stuck_of({0: method, 1: runs._replace(micros=5), 2: runs}, sees_idle=True) == set()
    assert stuck_of({0: method, 1: idle, 2: idle}) == set()


def test_nothing_is_certain_until_all_have_posted_twice_again() -> None:
    verdict = Verdict(2)

    def look(*serials: int, now: float) -> set[int]:
        places = waits("world", 3, [0, 1], serials[0]), waits("pair", 1, [0, 1], serials[1], world=2)
        return set(verdict.look(dict(enumerate(places)), now))

    assert look(1, 1, now=0.0) == set()
    assert look(2, 1, now=0.1) == set()
    assert look(3, 2, now=0.2) == set()
    assert look(4, 3, now=0.3) == {0, 1}
    assert look(4, 3, now=9.0) == set()  # whoever does not post again runs
