"""Checks that all members of a process group make the same call, before a collective starts.

Ranks compare their calls through the store, because a collective could hang itself. Each call has a number in its
group. The first rank to arrive at a number writes its call and its line there, and the others compare theirs with it.
A rank that waits for others posts where it waits and reads what they have posted. It raises as soon as it is certain
that they will not come: they wait in other calls for ranks that wait for them, or have ended. A rank that has died is
not waited for: the collective fails then, and its error is known to the launcher.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist

from paceline.errors import WorldError
from paceline.run.user_frame import running_line
from paceline.runtime import process_group
from paceline.text import by_rank

Group = torch_dist.ProcessGroup | None
_FIRST_LOOK, _LONGEST_LOOK = 0.05, 0.5  # seconds between looks at the others
_SHORTEST_POLL, _LONGEST_POLL = 0.0001, 0.01
_CONFIRMATIONS = 2  # looks in which every rank that can't continue has posted again
_GRACE = 1.0  # seconds in which the other members may add their side to an error
_STALE = 2.0  # seconds after which a rank that has not posted again is assumed to run
_DEFAULT_GROUP = "0"
_SIMULATED = ("fake", "threaded")  # backends without other processes
_check: CallCheck | None = None


class CallPlace(NamedTuple):
    """The call in which a rank waits."""

    group: str
    number: int
    call: str
    line: str

    def __str__(self) -> str:
        return f"{self.call} at {self.line}" if self.line else self.call


class Posted(NamedTuple):
    """What a rank that waits, or has ended, has posted."""

    place: CallPlace
    members: list[int]
    counts: dict[str, int]  # calls that its main thread has made, by group
    background: list[str]  # groups in which other threads make calls
    serial: int  # increases with every look
    ended: bool
    failed: bool  # in this check

    @classmethod
    def from_json(cls, values: list[Any]) -> Posted:
        return cls(CallPlace(*values[0]), *values[1:])

    def has_made(self, call: CallPlace) -> bool:
        return self.counts.get(call.group, 0) >= call.number


class _GroupCalls:
    """The calls that this rank has made in a group."""

    def __init__(self, group: torch_dist.ProcessGroup, patience: float | None) -> None:
        self.name, self.patience = group.group_name, patience
        self._mode = "all" if patience is None else "first"
        self.members = torch_dist.get_process_group_ranks(group)
        self.has_stopped = torch_dist.get_backend(group) in _SIMULATED  # checking
        self.errors = 0
        self.number = 0
        self.first = ""  # what the first rank at the last number has written

    @property
    def key(self) -> str:
        return f"{self.name}.{self._mode}{self.errors}"

    def restart(self) -> None:
        """After an error, which all members raise: if the user's code handles it, their counts are equal again."""
        self.errors, self.number, self.first = self.errors + 1, 0, ""


class CallCheck:
    """The calls of this rank since the default process group was initialized."""

    def __init__(self) -> None:
        # Private, because the user may have initialized the group.
        store: Any = torch_dist.distributed_c10d._get_default_store()
        with suppress(RuntimeError, NotImplementedError):
            store = store.clone()  # another thread may be waiting in its connection
        self._store = store
        self.world = weakref.ref(torch_dist.group.WORLD)
        self.rank, self.size = torch_dist.get_rank(), torch_dist.get_world_size()
        self._round = store.add(f"paceline/calls/rounds/{self.rank}", 1)  # a store may outlive a process group
        self._host = f"{socket.gethostname()} "
        store.set(self._key("process", self.rank), f"{self._host}{os.getpid()}")
        self._groups: dict[tuple[str, bool], _GroupCalls] = {}  # by name, and whether all calls are checked
        self._background: set[str] = set()
        self._last = (CallPlace("", 0, "none", ""), [self.rank])  # call, and members of its group
        self._serial, self._failed = 0, False
        atexit.register(self._post_end)

    def _calls_of(self, group: Group, patience: float | None) -> _GroupCalls:
        group = torch_dist.group.WORLD if group is None else group
        assert group is not None
        key = group.group_name, patience is None
        if key not in self._groups:
            self._groups[key] = _GroupCalls(group, patience)
        return self._groups[key]

    def check(self, call: str, group: Group, patience: float | None = None) -> None:
        """Raise unless all members of the group make this call. With patience, stop checking this group if they are
        later than that; otherwise wait as long as the collective would."""
        calls = self._calls_of(group, patience)
        if calls.has_stopped:
            return
        try:
            self._check(call, calls, group)
        except torch_dist.DistNetworkError:  # the process with the store has ended, and with it the run
            calls.has_stopped = True
            if patience is None:
                where = CallPlace("", 0, call, running_line())
                raise _error(f"Rank {self.rank} called {where}, but the rank with the store has ended.") from None

    def _check(self, call: str, calls: _GroupCalls, group: Group) -> None:
        calls.number += 1
        place = CallPlace(calls.key, calls.number, call, running_line())
        if _is_in_background():
            self._background.add(calls.key)
        else:
            self._last = (place, calls.members)
        own = json.dumps([self.rank, *place[1:]])
        calls.first = self._store.compare_set(self._key(calls.key, "first"), calls.first, own).decode()
        first_rank, first = json.loads(calls.first)[0], CallPlace(calls.key, *json.loads(calls.first)[1:])
        if first.call != call:
            self._store.set(self._key(calls.key, "differs", calls.number), json.dumps([self.rank, *place]))
            raise self._different(calls, place, {first_rank: first})
        done = self._key(calls.key, "all", calls.number)
        if self._store.add(self._key(calls.key, "count"), 1) == calls.number * len(calls.members):
            self._store.set(done, "")
            if calls.number > 1:  # all members are here, so none waits for the previous one
                self._store.delete_key(self._key(calls.key, "all", calls.number - 1))
        elif not self._wait(done, _FIRST_LOOK):
            timeout = process_group.timeout_of(group)
            seconds = process_group.FIRST_STEP_SECONDS if timeout is None else timeout.total_seconds()
            self._wait_long(calls, place, {first_rank: first}, seconds)

    def _wait_long(self, calls: _GroupCalls, place: CallPlace, known: dict[int, CallPlace], timeout: float) -> None:
        began, pause, patience = time.monotonic(), _FIRST_LOOK, calls.patience
        verdict = Verdict()
        while not self._wait(self._key(calls.key, "all", calls.number), pause):
            pause = min(pause * 1.5, _LONGEST_LOOK)
            waited = time.monotonic() - began
            self._post()
            posts = self._read_posts()
            if (differs := self._read(calls.key, "differs", calls.number)) is not None:
                rank, *other = json.loads(differs)
                raise self._different(calls, place, {**known, rank: CallPlace(*other)})
            stuck = self._read_verdict(place) or verdict.look(posts, time.monotonic())
            if self.rank in stuck:
                self._tell_verdict(stuck)
                calls.restart()
                self._failed = True
                raise _stuck_error(stuck)
            late = [rank for rank in calls.members if rank not in posts or not posts[rank].has_made(place)]
            if self._has_died([rank for rank in late if rank not in posts or not posts[rank].ended]):
                return
            if patience is not None and (waited > patience or self._read(calls.key, "stopped") is not None):
                self._store.set(self._key(calls.key, "stopped"), "")
                calls.has_stopped = True
                return
            if waited > timeout:
                seen = by_rank([str(posts[rank].place) if rank in posts else "no call" for rank in late], ranks=late)
                # In the words of gloo, by which a launcher recognizes timeouts.
                raise RuntimeError(f"Timed out waiting {timeout * 1000:.0f}ms in {place}; last calls:\n{seen}")

    def _tell_verdict(self, stuck: dict[int, Posted]) -> None:
        """This rank may end before the others have come to it by themselves."""
        for rank, post in stuck.items():
            key = self._key(post.place.group, "stuck", post.place.number, rank)
            self._store.set(key, json.dumps(list(stuck.items())))

    def _read_verdict(self, place: CallPlace) -> dict[int, Posted]:
        text = self._read(place.group, "stuck", place.number, self.rank)
        return {} if text is None else {rank: Posted.from_json(post) for rank, post in json.loads(text)}

    def _different(self, calls: _GroupCalls, place: CallPlace, sides: dict[int, CallPlace]) -> WorldError:
        """The error of members that make different calls. They add their sides, if they come in time."""
        until = time.monotonic() + _GRACE
        sides = {**sides, self.rank: place}
        self._post()
        self._store.set(self._key(calls.key, "side", calls.number, self.rank), json.dumps(place))
        while len(sides) < len(calls.members) and time.monotonic() < until:
            time.sleep(_FIRST_LOOK / 5)
            for rank in calls.members:
                if (side := self._read(calls.key, "side", calls.number, rank)) is not None:
                    sides[rank] = CallPlace(*json.loads(side))
        texts = [str(sides.get(rank, "not there yet")) for rank in calls.members]
        where = f" (call {calls.number} of group {calls.name})" if calls.name != _DEFAULT_GROUP else ""
        calls.restart()
        return _error(f"Ranks called different collectives{where}:\n{by_rank(texts, ranks=calls.members)}")

    def _has_died(self, ranks: list[int]) -> bool:
        for rank in ranks:
            host, _, process = (self._read("process", rank) or "").rpartition(" ")
            if f"{host} " == self._host and not _is_alive(int(process)):
                return True
        return False

    def _wait(self, key: str, seconds: float) -> bool:
        """Whether the key exists within that time. `Store.wait` would print a warning if it does not."""
        until, pause = time.monotonic() + seconds, _SHORTEST_POLL
        while not self._store.check([key]):
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL)
        return True

    def _post(self, *, ended: bool = False) -> None:
        if _is_in_background():
            return
        self._serial += 1
        counts = {calls.key: calls.number for calls in self._groups.values()}
        post = Posted(*self._last, counts, sorted(self._background), self._serial, ended, self._failed)
        self._store.set(self._key("at", self.rank), json.dumps(post))

    def _post_end(self) -> None:
        with suppress(Exception):  # the store may have ended before
            self._post(ended=True)

    def _read_posts(self) -> dict[int, Posted]:
        texts = ((rank, self._read("at", rank)) for rank in range(self.size))
        return {rank: Posted.from_json(json.loads(text)) for rank, text in texts if text is not None}

    def _read(self, *parts: object) -> str | None:
        key = self._key(*parts)
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, ("paceline/calls", self._round, *parts)))


class Verdict:
    """Which ranks can certainly not continue, from several looks at what all have posted.

    A post may be older than another, and its rank may have continued. If ranks that wait for each other have all posted
    the same again after a look, they have waited in these calls at the time of that look.
    """

    def __init__(self) -> None:
        self._changed: dict[int, tuple[int, float]] = {}  # serial and time of each rank's last new post
        self._suspects: dict[int, Posted] = {}
        self._confirmed = 0

    def look(self, posts: dict[int, Posted], now: float) -> dict[int, Posted]:
        for rank, post in posts.items():
            if self._changed.get(rank, (0, 0.0))[0] != post.serial:
                self._changed[rank] = (post.serial, now)
        fresh = {rank: post for rank, post in posts.items() if post.ended or now - self._changed[rank][1] < _STALE}
        before, self._suspects = self._suspects, {rank: fresh[rank] for rank in find_stuck(fresh)}
        if _places(before) != _places(self._suspects):
            self._confirmed = 0
        elif all(post.ended or post.serial > before[rank].serial for rank, post in self._suspects.items()):
            self._confirmed += 1
        else:
            self._suspects = before
        return dict(sorted(self._suspects.items())) if self._confirmed == _CONFIRMATIONS else {}


def find_stuck(posts: dict[int, Posted]) -> set[int]:
    """The ranks that can never continue, if all posts are from the same moment: they wait for each other in different
    calls, or for a rank that has ended."""
    stuck = set(posts)
    while free := {rank for rank in stuck if not posts[rank].ended and not _awaited(posts[rank], posts) & stuck}:
        stuck -= free
    return stuck


def _awaited(post: Posted, posts: dict[int, Posted]) -> set[int]:
    """The ranks that a rank waits for, among those that have posted."""
    others = {rank: posts[rank] for rank in post.members if rank in posts}
    return {
        rank
        for rank, other in others.items()
        if not other.has_made(post.place) and post.place.group not in other.background
    }


def _places(posts: dict[int, Posted]) -> dict[int, CallPlace]:
    return {rank: post.place for rank, post in posts.items()}


def require_same_call(call: str, group: Group, patience: float | None = None) -> None:
    """Raise unless all members of the group make the same call with this number in the group."""
    current().check(call, group, patience)


def current() -> CallCheck:
    global _check
    if _check is None or _check.world() is not torch_dist.group.WORLD:
        _check = CallCheck()
    return _check


def describe(operation: str, tensors: list[torch.Tensor], *details: str) -> str:
    """all_reduce((2,), float32, sum)"""
    shapes = [str(tuple(tensor.shape)) for tensor in tensors]
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    return f"{operation}({', '.join(filter(None, [*shapes, *dtypes, *details]))})"


def _error(what: str) -> WorldError:
    return WorldError(
        "different-collectives",
        what,
        why="a collective needs the same operation, shape, dtype and root on every member of its group, in the same "
        "order; otherwise it hangs or corrupts data",
        fix="compare these lines; look for a branch that depends on the rank, or data of different sizes, before them",
    )


def _stuck_error(posts: dict[int, Posted]) -> WorldError:
    """The error of ranks that wait for each other in different calls, or for a rank that has ended."""
    texts = []
    for post in posts.values():
        group = post.place.group.rpartition(".")[0]
        members = ", ".join(map(str, post.members))
        name = "" if group in ("", _DEFAULT_GROUP) else f", in group {group} of ranks {members}"
        has_ended = post.ended and not post.failed
        texts.append(f"{'has ended; its last call was ' if has_ended else ''}{post.place}{name}")
    has_ended = any(post.ended and not post.failed for post in posts.values())
    what = "Ranks wait in a collective for a rank that has ended" if has_ended else "Ranks called different collectives"
    return _error(f"{what}:\n{by_rank(texts, ranks=list(posts))}")


def _is_in_background() -> bool:
    """Whether another Python thread than the main one makes the call. Those of autograd are not Python's."""
    thread = threading.current_thread()
    return thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return not Path("/proc/self").exists()  # it can't be known without /proc
