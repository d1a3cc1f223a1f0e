"""The coordinator asks all nodes before it reports a hang, and reports it once."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.config.launch import LaunchSpec
from paceline.diagnose.hang.evidence import GroupProgress, Operation, RankEvidence, StackFrame
from paceline.diagnose.hang.progress_limits import NoProgress
from paceline.launcher.cluster import hang_vote
from paceline.launcher.cluster.channel import Channel, Message
from paceline.launcher.cluster.hang_vote import HangVote
from paceline.launcher.cluster.membership import NodeMember


class Clock:
    now = 100.0

    def read(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time passes where a test says so."""
    made = Clock()
    monkeypatch.setattr(hang_vote.time, "monotonic", made.read)
    return made


def node(number: int) -> NodeMember:
    channel = cast(Channel, SimpleNamespace(last_received=time.monotonic()))
    return NodeMember(channel, number, f"host{number}", ranks=1, first_rank=number, is_busy=True)


def evidence(rank: int, *, waits: bool) -> Message:
    """Of a rank that waits in the fourth all_reduce, or has not entered it."""
    group = GroupProgress("0", "", (0, 1), entered=4 if waits else 3, left=3)
    pending = (Operation("0", 4, "all_reduce", ((2,),), ("float32",)),) if waits else ()
    stack = (StackFrame("all_reduce" if waits else "read", "/home/me/train.py", 7 if waits else 9),)
    found = RankEvidence(rank, pid=1, groups=(group,), pending=pending, stack=stack)
    return {"ranks": [found.to_json()]}


class Job:
    """An inquiry of two nodes, in which rank 0 waits for rank 1."""

    def __init__(self, **options: Any) -> None:
        self.sent: list[tuple[int, Message]] = []
        self.shown: list[Message] = []
        self.nodes = [node(0), node(1)]
        spec = LaunchSpec(**options)
        self.inquiry = HangVote(spec, lambda: self.nodes, self._send, self.shown.append)

    def _send(self, to: NodeMember, message: Message) -> None:
        self.sent.append((to.node, message))

    def standstill(self, *, lasts: bool = True) -> None:
        found = NoProgress(2.5, 2.0, "at least 2 s", "training", lasts)
        message = {"kind": "standstill", **found._asdict(), **evidence(0, waits=True)}
        self.inquiry.handle(self.nodes[0], message)

    def answer(self, node: int = 1, **changes: Any) -> None:
        known = evidence(node, waits=node == 0)
        message = {"kind": "evidence", "still": 2.4, "limit": 2.0, **known, **changes}
        self.inquiry.handle(self.nodes[node], message)

    def conclude(self) -> bool:
        return self.inquiry.conclude(0, 0)


def test_a_hang_is_reported_once_with_the_ranks_of_all_nodes() -> None:
    job = Job()
    job.standstill()
    assert job.sent == [(1, {"kind": "inquire", "at_exit": False})] and not job.conclude() and not job.shown
    job.answer()
    assert not job.conclude()  # --on-hang report
    [shown] = job.shown
    assert "rank 1" in shown["text"].splitlines()[0] and "all_reduce #4" in shown["text"]
    first, second = (message for _, message in job.sent[1:])
    assert [each["node"] for each in first["record"]["evidence"]] == [0, 1]
    assert first["record"]["ranks"] == [1] and second == shown and "record" not in second
    job.standstill()  # it lasts
    assert not job.conclude() and len(job.shown) == 1
    job.inquiry.handle(job.nodes[1], {"kind": "continued", "seconds": 3.0})
    assert "progress again" in job.shown[1]["text"]


def test_ranks_are_stopped_if_the_policy_says_so() -> None:
    job = Job(on_hang="stop")
    job.standstill(lasts=False)  # they may only be slow
    job.answer()
    assert not job.conclude() and "  still waiting, for up to 20.0 s" in job.shown[0]["text"]
    job.standstill(lasts=False)  # of another node, of which all have answered
    assert not job.conclude()
    job.standstill()
    job.answer()
    assert job.conclude() and job.inquiry.hang is not None and job.inquiry.hang.ranks == (1,)
    job.inquiry.reset()
    assert job.inquiry.hang is None


@pytest.mark.parametrize("reason", [{"still": 0.3}, {"limit": 30.0}], ids=["makes-progress", "saves"])
def test_while_another_node_may_take_longer_it_is_no_hang(clock: Clock, reason: dict[str, float]) -> None:
    job = Job(on_hang="stop")
    job.standstill()
    job.answer(**reason)
    assert not job.conclude() and not job.shown
    clock.now += 29
    for each in job.nodes:
        each.channel.last_received = clock.now
    assert not job.conclude()
    assert [message["kind"] for _, message in job.sent] == ["inquire"] * 3  # both nodes once more
    job.answer(0, still=31.5)
    job.answer(1, still=31.4)
    assert job.conclude() and len(job.shown) == 1


def test_ranks_that_continue_while_nodes_are_asked_do_not_hang() -> None:
    job = Job(on_hang="stop")
    job.standstill()
    job.inquiry.handle(job.nodes[0], {"kind": "continued", "seconds": 2.6})
    job.answer()
    assert not job.conclude() and not job.shown


def test_a_node_that_does_not_answer_is_named(clock: Clock) -> None:
    job = Job(on_hang="stop")
    job.standstill()
    clock.now += 60.0
    for each in job.nodes:
        each.channel.last_received = clock.now
    assert job.conclude()  # its heartbeats arrive: it is only slow
    assert "node 1 did not answer" in job.shown[0]["text"] or "rank 1" in job.shown[0]["text"].splitlines()[0]


def test_a_node_that_is_cut_off_is_reported_at_once_and_left_to_the_detection_of_lost_nodes() -> None:
    job = Job(on_hang="stop")
    job.nodes[1].channel.last_received -= 3.0
    job.standstill()
    assert not job.conclude() and job.inquiry.hang is None
    [*_, (_, first), (_, _)] = job.sent
    assert first["record"]["ranks"] == [1] and "node 1 has sent nothing for 3.0 s" in first["text"]


@pytest.mark.parametrize(
    "changes", [{"ranks": evidence(0, waits=True)["ranks"]}, {"ranks": [{"rank": 1}, 7]}, {"still": "x"}, {"ranks": 1}]
)
def test_an_invalid_answer_is_an_error_of_its_node(changes: dict[str, Any]) -> None:
    job = Job()
    job.standstill()
    with pytest.raises((ValueError, TypeError)):
        job.answer(**changes)


def test_ranks_that_are_idle_at_their_end_are_judged_once_other_nodes_have_had_their_limit() -> None:
    """The ranks of another node may compute: whether they do is counted there from the question on."""
    job = Job()
    found = NoProgress(61.0, 60.0, "fixed", "exit", False)
    job.inquiry.handle(job.nodes[0], {"kind": "standstill", **found._asdict(), **evidence(0, waits=False)})
    assert job.sent == [(1, {"kind": "inquire", "at_exit": True})]
    job.answer(still=0.0, limit=60.0)
    assert not job.conclude() and not job.shown
