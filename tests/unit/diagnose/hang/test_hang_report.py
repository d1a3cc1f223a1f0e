"""What is concluded from evidence about ranks that make no progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline
from paceline.diagnose.hang.evidence import GroupProgress, Operation, RankEvidence, StackFrame, WorkerEvidence
from paceline.diagnose.hang.hang_report import find_hang
from paceline.diagnose.hang.waits import Waits

OURS, TORCH = Path(paceline.__file__).parent, Path(torch.__file__).parent
MAIN = StackFrame("<module>", "/home/me/train.py", 12)
TRAINING = (StackFrame("train", f"{OURS}/train/trainer.py", 300), MAIN)
READING = (
    StackFrame("read_image", "/home/me/data.py", 88),
    StackFrame("__next__", f"{OURS}/data/loader.py", 20),
    *TRAINING,
)
WAITING = (StackFrame("all_reduce", f"{TORCH}/distributed/distributed_c10d.py", 9), *TRAINING)
FROM_WORKER = (
    StackFrame("_try_get_data", f"{TORCH}/utils/data/dataloader.py", 1),
    StackFrame("__next__", f"{OURS}/data/loader.py", 20),
    *TRAINING,
)


def in_code(function: str, line: int, file: str = "/home/me/train.py") -> tuple[StackFrame, ...]:
    return (StackFrame(function, file, line),)


def in_call(name: str, line: int) -> tuple[StackFrame, ...]:
    """In a collective of torch.distributed."""
    call = StackFrame(name, f"{TORCH}/distributed/distributed_c10d.py", 9)
    return (call, StackFrame("main", "/home/me/train.py", line))


def member(rank: int, ranks: Sequence[int], entered: int, left: int | None = None, **values: Any) -> RankEvidence:
    group = GroupProgress("0", "", tuple(ranks), entered, entered if left is None else left)
    return RankEvidence(
        **{"rank": rank, "pid": 1000 + rank, "phase": "training", "step": 17, "groups": (group,), **values}
    )


def waiting(
    rank: int, ranks: Sequence[int], number: int = 418, name: str = "all_reduce", size: int = 4, **values: Any
) -> RankEvidence:
    pending = (Operation("0", number, name, ((size,),), ("Float",)),)
    return member(rank, ranks, number, number - 1, **{"stack": WAITING, "pending": pending, **values})


ALL = range(4)
OTHERS = [waiting(rank, ALL) for rank in (0, 1, 3)]


def lines(ranks: Sequence[RankEvidence], seconds: float = 2.3) -> list[str]:
    return find_hang(ranks, seconds).text.splitlines()


def test_a_rank_that_reads_a_batch_is_named_with_its_line_and_those_that_wait() -> None:
    hang = find_hang([*OTHERS, member(2, ALL, 417, stack=READING)], 2.3)
    assert (hang.kind, hang.ranks) == ("missing", (2,))
    assert hang.operation is not None and hang.operation.number == 418
    assert hang.lines[2] == "read_image() at data.py:88"
    first, second, causes, fix = hang.text.splitlines()
    assert first == (
        "rank 2 never entered all_reduce #418 (step 17): it is in read_image() at data.py:88, inside trainer.train() "
        "at train.py:12, reading a batch"
    )
    assert second == "ranks 0, 1 and 3 have waited for 2.3 s, in trainer.train() at train.py:12"
    assert causes.startswith("usual causes: a dataset that waits")
    assert fix.startswith("what to do: look at that line")


def test_a_group_is_named_by_its_label() -> None:
    def labelled(each: RankEvidence) -> RankEvidence:
        return replace(each, groups=(replace(each.groups[0], label="shard"),))

    ranks = [labelled(each) for each in [*OTHERS, member(2, ALL, 417, stack=READING)]]
    assert lines(ranks)[0].startswith("rank 2 never entered all_reduce #418 of the shard group (step 17): ")


def test_a_stopped_rank_is_to_be_resumed() -> None:
    hang = find_hang([*OTHERS, member(2, ALL, 417, stack=READING, state="stopped", silent=2.0)], 2.3)
    assert (hang.kind, hang.ranks) == ("missing", (2,))
    assert "it is stopped by a signal (SIGSTOP), in read_image() at data.py:88" in hang.text
    assert "kill -CONT 1002" in hang.text


def test_a_rank_stopped_inside_the_collective_is_to_blame_too() -> None:
    hang = find_hang([*OTHERS, waiting(2, ALL, state="stopped", silent=2.0)], 2.3)
    assert (hang.kind, hang.ranks) == ("missing", (2,))
    assert hang.text.startswith("rank 2 keeps the others waiting in all_reduce #418 (step 17): it is stopped")
    assert "ranks 0, 1 and 3 have waited" in hang.text


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"state": "disk", "stack": READING}, "it is blocked on disk I/O, in read_image() at data.py:88"),
        ({"silent": 2.0, "stack": in_code("crunch", 3)}, "it is holding the GIL, in crunch() at train.py:3"),
        ({"stack": (StackFrame("interaction", "/x/lib/site-packages/ipdb/a.py", 1), MAIN)}, "it is in a debugger, at"),
        ({"phase": "evaluating", "stack": in_code("metric", 5)}, "it is in metric() at train.py:5, evaluating"),
        ({"phase": "saving", "stack": in_code("on_save", 5)}, "it is in on_save() at train.py:5, saving a checkpoint"),
        (
            {"phase": "saving", "missing": "its stack: no"},
            "it is saving a checkpoint (could not be read: its stack: no)",
        ),
        ({"stack": in_code("<module>", 5)}, "it is at train.py:5"),
        (
            {"stack": WAITING, "silent": 2.0, "gil_holder": in_code("crunch", 3)},
            "it is kept by a thread that holds the GIL, in crunch() at train.py:3",
        ),
    ],
)
def test_the_kind_of_place_is_told(values: dict[str, Any], said: str) -> None:
    hang = find_hang([*OTHERS, member(2, ALL, 417, **values)], 2.3)
    assert (hang.kind, hang.ranks) == ("missing", (2,))
    assert said in hang.text.splitlines()[0]


def test_a_worker_that_keeps_its_rank_waiting_is_named_with_its_line() -> None:
    idle = WorkerEvidence(70, "running", (StackFrame("get", "/usr/lib/python3.12/queue.py", 1),))
    stuck = WorkerEvidence(71, "running", in_code("read_image", 88, "/home/me/data.py"))
    hang = find_hang([*OTHERS, member(2, ALL, 417, stack=FROM_WORKER, workers=(idle, stuck))], 2.3)
    assert "it is waiting for its DataLoader worker (pid 71), which is in read_image() at data.py:88" in hang.text
    assert hang.lines[2] == "read_image() at data.py:88"
    hang = find_hang(
        [*OTHERS, member(2, ALL, 417, stack=FROM_WORKER, workers=(idle, replace(stuck, state="stopped")))], 2
    )
    assert "(pid 71), which is stopped by a signal (SIGSTOP), in read_image() at data.py:88" in hang.text
    assert "kill -CONT 71" in hang.text


def test_the_evaluation_of_the_main_process_alone() -> None:
    """`if trainer.is_main_process: trainer.evaluate(...)`"""
    evaluation = (StackFrame("evaluate", f"{OURS}/train/trainer.py", 400), replace_line(MAIN, 17))
    alone = member(0, range(2), 417, phase="evaluating", stack=evaluation)
    text = lines([alone, waiting(1, range(2))])
    assert text[0] == "rank 0 never entered all_reduce #418 (step 17): it is in trainer.evaluate() at train.py:17"
    assert text[1] == "rank 1 has waited for 2.3 s, in trainer.train() at train.py:12"
    assert "`if trainer.is_main_process:`" in text[2]
    assert text[3] == "what to do: call trainer.evaluate() on every rank; print the result on rank 0 only"

    gathers = (StackFrame("gather", f"{OURS}/runtime/collectives.py", 1), *evaluation)  # not by torch's collectives
    hang = find_hang([replace(alone, stack=gathers), waiting(1, range(2))], 2.3)
    assert hang.kind == "order"
    assert "rank 0 waits, in trainer.evaluate() at train.py:17; it is one collective behind" in hang.text
    assert "rank 1 waits in all_reduce #418 for rank 0, in trainer.train() at train.py:12" in hang.text


def replace_line(frame: StackFrame, line: int) -> StackFrame:
    return frame._replace(line=line)


def test_a_rank_that_has_left() -> None:
    hang = find_hang([*OTHERS, member(2, ALL, 415, ended="returned", state="exited")], 2.3)
    assert (hang.kind, hang.ranks) == ("left", (2,))
    assert hang.text.startswith("rank 2 returned, but other ranks still wait for it in all_reduce #418 (step 17)\n")
    assert "rank 2 made 3 collectives fewer than the ranks that wait" in hang.text


def test_a_rank_that_exited_inside_the_collective_has_left() -> None:
    hang = find_hang([*OTHERS, waiting(2, ALL, state="exited")], 2.3)
    assert (hang.kind, hang.ranks) == ("left", (2,))
    assert hang.text.startswith("rank 2 has exited, but other ranks")


@pytest.mark.parametrize(
    ("values", "call"), [({"name": "broadcast"}, "broadcast of Float[4]"), ({"size": 8}, "all_reduce of Float[8]")]
)
def test_different_calls_of_one_number_name_both_sides(values: dict[str, Any], call: str) -> None:
    hang = find_hang([*OTHERS, waiting(2, ALL, stack=in_call("broadcast", 30), **values)], 2.3)
    assert (hang.kind, hang.ranks) == ("mismatch", (2,))
    first, *sides = hang.text.splitlines()[:3]
    assert first == "ranks called collective #418 differently (step 17):"
    assert sides[0] == f"  rank 2: {call}, in torch.distributed.broadcast() at train.py:30"
    assert sides[1] == "  ranks 0, 1 and 3: all_reduce of Float[4], in trainer.train() at train.py:12"


def test_two_ranks_with_different_calls_are_both_named() -> None:
    hang = find_hang([waiting(0, range(2)), waiting(1, range(2), size=2)], 2.3)
    assert (hang.kind, hang.ranks) == ("mismatch", (0, 1))


def test_shapes_and_uneven_gathers_are_no_mismatch() -> None:
    shape = Operation("0", 418, "all_reduce", ((2, 2),), ("Float",))
    assert find_hang([waiting(0, range(2)), waiting(1, range(2), pending=(shape,))], 2.3).kind == "network"
    uneven = [waiting(rank, range(2), name="gather", size=rank) for rank in range(2)]
    assert find_hang(uneven, 2.3).kind == "network"


def test_a_collective_that_only_others_have_left_was_called_differently() -> None:
    """The root of a broadcast does not wait: the next collective of rank 0 shows it."""
    ranks = [waiting(0, range(2), 419, stack=in_call("barrier", 31)), waiting(1, range(2), 418)]
    hang = find_hang(ranks, 2.3)
    assert (hang.kind, hang.ranks) == ("mismatch", (0, 1))
    assert hang.text.startswith("ranks disagree about all_reduce #418: some have left it")
    assert "rank 0 waits in all_reduce #419 for rank 1, in torch.distributed.barrier() at train.py:31" in hang.text


def in_group(rank: int, name: str, number: int, groups: dict[str, tuple[int, ...]], line: int = 9) -> RankEvidence:
    """In operation `number` of a group; in its other groups it has entered and left 5."""
    progress = [
        GroupProgress(each, each, ranks, number if each == name else 5, number - 1 if each == name else 5)
        for each, ranks in groups.items()
        if rank in ranks
    ]
    pending = (Operation(name, number, "all_gather", ((4,),), ("Float",)),) if name else ()
    stack = in_call("all_gather", line) if name else in_code("sleep", 3)
    return RankEvidence(rank, groups=tuple(progress), pending=pending, stack=stack)


MESH = {"tensor": (0, 1), "tensor2": (2, 3), "shard": (0, 2), "shard2": (1, 3)}


def test_waits_are_followed_from_group_to_group() -> None:
    ranks = [
        in_group(0, "shard", 6, MESH),
        in_group(1, "tensor", 6, MESH),
        in_group(2, "tensor2", 6, MESH),
        in_group(3, "", 5, MESH),
    ]
    hang = find_hang(ranks, 2.3)
    assert (hang.kind, hang.ranks) == ("missing", (3,))
    assert hang.text.startswith(
        "rank 3 never entered all_gather #6 of the tensor2 group: it is in sleep() at train.py:3\n"
    )
    assert "rank 1 has waited for 2.3 s in all_gather #6 of the tensor group" in hang.text


def test_groups_of_other_ranks_may_share_a_name() -> None:
    halves = [((0, 1), 6), ((0, 1), 6), ((2, 3), 6), ((2, 3), 5)]
    ranks = [
        RankEvidence(rank, groups=(GroupProgress("1", "half", members, entered, 5),))
        for rank, (members, entered) in enumerate(halves)
    ]
    ranks[2] = replace(ranks[2], pending=(Operation("1", 6, "all_reduce"),), stack=in_call("all_reduce", 4))
    ranks[3] = replace(ranks[3], stack=in_code("load", 8))
    assert find_hang(ranks, 2.3).ranks == (3,)


def test_ranks_that_wait_for_each_other_in_two_groups() -> None:
    groups = {"shard": (0, 1), "tensor": (0, 1)}
    hang = find_hang([in_group(0, "shard", 6, groups, 20), in_group(1, "tensor", 6, groups, 21)], 2.3)
    assert (hang.kind, hang.ranks) == ("order", (0, 1))
    first, zero, one = hang.text.splitlines()[:3]
    assert first == "ranks 0 and 1 wait for each other, at different places:"
    assert zero.startswith(
        "  rank 0 waits in all_gather #6 of the shard group for rank 1, in torch.distributed.all_gather()"
    )
    assert "at train.py:21" in one


def test_a_rank_that_entered_asynchronously_and_is_elsewhere_is_to_blame() -> None:
    groups = {"shard": (0, 1), "tensor": (0, 1)}
    elsewhere = replace(in_group(0, "shard", 6, groups), stack=in_code("sleep", 3))
    hang = find_hang([elsewhere, in_group(1, "tensor", 6, groups)], 2.3)
    assert (hang.kind, hang.ranks) == ("missing", (0,))


def test_pipeline_stages_that_receive_wait_for_the_one_that_does_not() -> None:
    """Sends and receives of gloo are not recorded by torch: stacks tell."""
    ranks = [member(rank, ALL, 3, stack=in_call("recv", 7)) for rank in (0, 1, 3)]
    hang = find_hang([*ranks, member(2, ALL, 3, stack=in_code("forward", 40))], 2.3)
    assert (hang.kind, hang.ranks) == ("missing", (2,))
    assert hang.text.startswith("rank 2 keeps the others waiting (step 17): it is in forward() at train.py:40\n")


@pytest.mark.parametrize("values", [{"silent": 3.0}, {"state": "stopped"}])
def test_counts_of_a_rank_that_could_not_correct_them_are_not_believed(values: dict[str, Any]) -> None:
    stuck = member(1, range(2), 700, stack=in_code("parse", 88), **values)  # includes sends and receives
    hang = find_hang([waiting(0, range(2)), stuck], 2.3)
    assert (hang.kind, hang.ranks) == ("missing", (1,))
    assert "parse() at train.py:88" in hang.text


def test_a_wait_for_the_next_stage_of_a_pipeline_is_a_send_or_receive() -> None:
    stack = (StackFrame("_wait_batch_p2p", f"{TORCH}/distributed/pipelining/schedules.py", 683), *TRAINING)
    ranks = [member(0, range(2), 9, stack=stack), member(1, range(2), 9, stack=READING)]
    assert lines(ranks)[1] == "rank 0 has waited for 2.3 s in a send or receive, in trainer.train() at train.py:12"


def test_receives_whose_peer_is_not_known_wait_for_the_one_that_does_not() -> None:
    pending = (Operation("0", 3, "recv", ((4,),), ("Float",), p2p=True),)
    ranks = [member(rank, ALL, 3, stack=in_call("recv", 7), pending=pending) for rank in (0, 1, 3)]
    assert find_hang([*ranks, member(2, ALL, 3, stack=in_code("forward", 40))], 2.3).ranks == (2,)


def test_recorded_receives_wait_for_their_peer() -> None:
    def receives(rank: int, peer: int) -> RankEvidence:
        pending = (Operation("0", 3 + rank, f"recv {rank}<-{peer}", ((4,),), ("Float",), p2p=True),)
        return member(rank, range(3), 2, pending=pending, stack=in_call("recv", 7))

    hang = find_hang([member(0, range(3), 2, stack=in_code("load", 8)), receives(1, 0), receives(2, 1)], 2.3)
    assert (hang.kind, hang.ranks) == ("missing", (0,))
    hang = find_hang([receives(0, 1), receives(1, 2), receives(2, 0)], 2.3)
    assert hang.kind == "order"


def test_the_same_operation_on_all_nodes_is_the_network() -> None:
    ranks = [replace(waiting(rank, ALL), node=rank // 2) for rank in ALL]
    hang = find_hang(ranks, 12.0)
    assert (hang.kind, hang.ranks) == ("network", ())
    assert "are all in all_reduce #418 (step 17), with the same arguments, and it does not complete" in hang.text
    assert "the connection between nodes 0, 1 is cut or very slow" in hang.text


def test_a_cut_in_the_middle_of_a_collective_is_the_network_too() -> None:
    ranks = [replace(waiting(rank, ALL, 419 if rank == 3 else 418), node=rank // 2) for rank in ALL]
    assert find_hang(ranks, 12.0).kind == "network"


def test_nobody_waits() -> None:
    ranks = [member(rank, range(4), 40, stack=READING) for rank in (0, 1, 3)]
    hang = find_hang([*ranks, member(2, range(4), 40, stack=in_code("augment", 7))], 2.3)
    assert (hang.kind, hang.ranks) == ("stands-still", (0, 1, 2, 3))
    text = hang.text.splitlines()
    assert text[0] == "no rank has made progress for 2.3 s (step 17), and none waits in a collective"
    assert "  rank 2: is in augment() at train.py:7" in text
    assert (
        "  ranks 0, 1 and 3: are in read_image() at data.py:88, inside trainer.train() at train.py:12, reading a batch"
        in text
    )


def test_ranks_that_have_finished_are_not_awaited_by_anyone() -> None:
    ranks = [member(0, range(2), 40, stack=in_code("export", 70)), member(1, range(2), 40, ended="returned")]
    hang = find_hang(ranks, 40.0)
    assert (hang.kind, hang.ranks) == ("stands-still", (0,))


def test_a_node_that_does_not_answer_is_found_by_elimination() -> None:
    silent = [RankEvidence(rank, node=1, missing="node 1 does not answer") for rank in (2, 3)]
    waits = [waiting(rank, ALL) for rank in (0, 1)]
    hang = find_hang([*waits, *silent], 12.0)
    assert (hang.kind, hang.ranks) == ("missing", (2, 3))
    assert "for ranks 2 (node 1) and 3 (node 1) (step 17): node 1 does not answer" in hang.text
    hang = find_hang(waits, 12.0)  # without a word about them
    assert hang.ranks == (2, 3)


def test_a_rank_that_is_seen_is_blamed_rather_than_one_that_is_not() -> None:
    silent = RankEvidence(3, node=1, missing="node 1 does not answer")
    hang = find_hang([waiting(0, ALL), waiting(1, ALL), member(2, ALL, 417, stack=READING), silent], 12.0)
    assert hang.ranks == (2,)
    assert "nothing could be read of rank 3" in hang.text


def test_a_backward_without_an_operation_in_flight_computes() -> None:
    backward = (StackFrame("_engine_run_backward", f"{TORCH}/autograd/graph.py", 1), *TRAINING)
    hang = find_hang([*OTHERS, member(2, ALL, 417, stack=backward)], 2.3)
    assert (hang.kind, hang.ranks) == ("missing", (2,))


def test_little_evidence_is_no_error() -> None:
    assert find_hang([], 5.0).kind == "unknown"
    assert find_hang([RankEvidence(0, missing="gone")], 5.0).kind == "unknown"
    assert find_hang([RankEvidence(0)], 5.0).text
    assert find_hang([replace(waiting(0, ALL), groups=())], 5.0).text


@st.composite
def stuck_ranks(draw: st.DrawFn) -> tuple[list[RankEvidence], int]:
    """Each rank but one waits in a group with some rank before it in a random order, which has not entered it: a tree
    whose root waits for nothing."""
    order = draw(st.permutations(range(draw(st.integers(2, 9)))))
    parents = {rank: order[draw(st.integers(0, at))] for at, rank in enumerate(order[1:])}
    ranks = []
    for rank in order:
        groups = [GroupProgress(str(other), f"g{other}", tuple(sorted((other, parents[other]))), 6, 5)
                  for other in parents if rank == other]  # fmt: skip
        groups += [GroupProgress(str(child), f"g{child}", tuple(sorted((child, rank))), 5, 5)
                   for child, parent in parents.items() if parent == rank]  # fmt: skip
        pending = (Operation(str(rank), 6, "all_reduce"),) if rank in parents else ()
        stack = in_call("all_reduce", 9) if rank in parents else in_code("sleep", 3)
        ranks.append(RankEvidence(rank, groups=tuple(groups), pending=pending, stack=stack))
    return draw(st.permutations(ranks)), order[0]


@given(stuck_ranks())
@settings(max_examples=40, deadline=None)
def test_the_rank_that_waits_for_nothing_is_to_blame(evidence: tuple[list[RankEvidence], int]) -> None:
    ranks, stuck = evidence
    hang = find_hang(ranks, 2.0)
    assert (hang.kind, hang.ranks) == ("missing", (stuck,))
    assert hang.lines[stuck] == "sleep() at train.py:3"
    assert f"rank {stuck} never entered" in hang.text


@st.composite
def any_ranks(draw: st.DrawFn) -> list[RankEvidence]:
    """Anything that pages and stacks may hold."""
    world = draw(st.integers(1, 5))
    members = st.lists(st.integers(0, world), min_size=1, max_size=world + 1, unique=True).map(tuple)
    groups = draw(st.lists(st.tuples(st.sampled_from("ab"), members), max_size=3))
    ranks = []
    for rank in range(world):
        progress = [
            GroupProgress(
                name, draw(st.sampled_from(["", "shard"])), those, draw(st.integers(0, 4)), draw(st.integers(0, 4))
            )
            for name, those in groups
            if rank in those
        ]
        name = st.sampled_from(["all_reduce", "recv 0<-1", "send 1->0", "gather"])
        operation = st.builds(
            Operation,
            st.sampled_from("ab"),
            st.integers(1, 4),
            name,
            st.just(((2,),)),
            st.just(("Float",)),
            st.booleans(),
        )
        ranks.append(
            RankEvidence(
                rank,
                node=draw(st.integers(0, 1)),
                state=draw(st.sampled_from(["running", "running", "stopped", "disk", "exited"])),
                phase=draw(st.sampled_from(["", "training", "saving"])),
                step=draw(st.none() | st.integers(1, 9)),
                groups=tuple(progress),
                pending=tuple(draw(st.lists(operation, max_size=2))),
                stack=draw(st.sampled_from([(), READING, WAITING, FROM_WORKER, in_code("sleep", 3)])),
                ended=draw(st.sampled_from(["", "", "returned"])),
                silent=draw(st.sampled_from([0.0, 2.0])),
                missing=draw(st.sampled_from(["", "", "not permitted"])),
            )
        )
    return ranks


@given(any_ranks())
@settings(max_examples=60, deadline=None)
def test_whatever_was_read_gives_a_report_that_blames_no_rank_that_waits_for_another(ranks: list[RankEvidence]) -> None:
    hang = find_hang(ranks, 2.0)
    assert hang.text
    if hang.kind == "missing":
        waits = Waits(ranks, trust_stacks=True)
        assert hang.ranks
        assert not [rank for rank in hang.ranks if waits.awaited_by(rank)]


def test_a_collective_that_stages_of_a_pipeline_do_not_make_is_named() -> None:
    stack = (StackFrame("_wait_batch_p2p", f"{TORCH}/distributed/pipelining/schedules.py", 683), *TRAINING)
    ranks = [waiting(0, range(3), name="all_gather"), *(member(rank, range(3), 417, stack=stack) for rank in (1, 2))]
    hang = find_hang(ranks, 2.3)
    assert hang.kind == "order" and hang.operation is not None and hang.operation.name == "all_gather"
    assert hang.text.splitlines()[2] == (
        "  ranks 1 and 2 wait in a send or receive, in trainer.train() at train.py:12; they are one collective behind"
    )
