"""`paceline.launch(fn, ranks=…)`."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import forked
import paceline
from paceline import dist
from paceline.errors import PacelineError
from samples import sample
from worlds import ranks


def total(scale: float = 1.0) -> dict[str, Any]:
    tensor = torch.tensor([dist.rank() + 1.0])
    dist.all_reduce(tensor)
    return {"sum": tensor * scale, "world": dist.world(), "rank": dist.rank()}


def test_the_result_of_rank_0_is_returned() -> None:
    result = paceline.launch(total, ranks=3, scale=2.0)
    assert result["sum"].item() == 12.0
    assert (result["world"], result["rank"]) == (3, 0)


def test_closures_and_lambdas_run() -> None:
    here = [1, 2, 3]
    assert paceline.launch(lambda: [*here, dist.world()], ranks=2) == [1, 2, 3, 2]


@pytest.mark.parametrize(
    "value",
    [None, 3, 2.5, "text", [1, [2]], {"a": {"b": None}}, (1, "x"), float("inf"), {"tensor": "0"}, ["tuple", [1]]],
)
def test_plain_values_are_restored_unchanged(value: Any) -> None:
    assert paceline.launch(lambda: value, ranks=1) == value


def test_tensors_inside_containers_are_restored() -> None:
    result = paceline.launch(lambda: {"a": [torch.arange(3), (torch.ones(2, 2, dtype=torch.bfloat16),)]}, ranks=1)
    assert result["a"][0].tolist() == [0, 1, 2]
    assert result["a"][1][0].dtype == torch.bfloat16


def test_a_result_of_another_type_is_named() -> None:
    with pytest.raises(PacelineError) as caught:
        paceline.launch(lambda: {"deep": [object()]}, ranks=2)
    assert caught.value.code == "launch.bad-result"
    assert "result['deep'][0] has type object" in str(caught.value)
    with pytest.raises(PacelineError, match="keys other than strings"):
        paceline.launch(lambda: {1: 2}, ranks=1)


AFTER_THREADS = """
import torch, paceline
torch.set_num_threads(max(2, torch.get_num_threads()))
torch.randn(1000, 1000) @ torch.randn(1000, 1000)
layer = torch.nn.Linear(100, 100)
layer(torch.randn(64, 100)).sum().backward()

def step():
    layer(torch.randn(256, 100)).sum().backward()
    tensor = torch.randn(600, 600) @ torch.randn(600, 600)
    paceline.dist.all_reduce(tensor)
    return 1.0

for _ in range(TIMES):
    assert paceline.launch(step, ranks=2) == 1.0
print("each time")
"""


GARBAGE = """
import gc, threading
import torch.distributed as torch_dist
import paceline

def collect():
    for _ in range(8):  # one of them gets the memory of the thread of the store, and is taken for it
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    gc.collect()
    return paceline.dist.world()

gc.disable()
store = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
cycle = [store]
cycle.append(cycle)
del store, cycle
print(paceline.launch(collect, ranks=2))
"""


def test_ranks_do_not_destroy_what_their_parent_left_to_its_garbage_collector() -> None:
    """A store joins its thread, which does not exist in a forked process."""
    done = subprocess.run([sys.executable, "-c", GARBAGE], capture_output=True, text=True, timeout=100)
    assert done.stdout == "2\n", done.stderr


def test_it_works_after_the_parent_ran_threads_and_autograd_each_time() -> None:
    """In an interpreter of its own, with as many threads as it likes."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", AFTER_THREADS.replace("TIMES", str(sample(5, 20)))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.stdout == "each time\n", done.stderr


def test_ranks_draw_different_random_numbers() -> None:
    def draws() -> list[list[float]]:
        return dist.all_gather_object([torch.rand(()).item()])

    first, second = paceline.launch(draws, ranks=2)
    assert first != second


@pytest.mark.parametrize("number", [0, -1, "2", 2.0, True])
def test_an_invalid_number_has_a_code(number: Any) -> None:
    with pytest.raises(PacelineError) as caught:
        paceline.launch(total, ranks=number)
    assert caught.value.code == "launch.bad-number"


def test_an_invalid_call_fails_before_ranks_start() -> None:
    with pytest.raises(TypeError, match="scales"):
        paceline.launch(total, ranks=2, scales=3)


def test_a_function_for_spawn_gets_its_rank_and_world_size() -> None:
    def told(rank: int, world_size: int, scale: int, *rest: int, local_rank: int, offset: int = 1) -> list[int]:
        assert rank == int(os.environ["RANK"]) == local_rank and not rest
        return [rank, world_size, scale, offset]

    assert paceline.launch(told, ranks=2, scale=3) == [0, 2, 3, 1]
    assert paceline.launch(lambda rank, world_size=5: world_size, ranks=1, rank=7) == 5


def test_the_result_of_a_call_is_not_a_function() -> None:
    with pytest.raises(PacelineError, match=r"launch\.not-a-function.* got None"):
        paceline.launch(print(end=""), ranks=2)  # type: ignore[func-returns-value]


def test_a_missing_argument_is_named_before_ranks_start() -> None:
    def train(rank: int, learning_rate: float, *, data: str) -> None: ...

    with pytest.raises(PacelineError) as caught:
        paceline.launch(train, ranks=2)
    assert caught.value.code == "launch.missing-argument"
    assert "'learning_rate', 'data'" in str(caught.value) and "learning_rate=..., data=..." in str(caught.value)


def test_every_rank_is_a_child_also_when_there_is_one() -> None:
    assert paceline.launch(os.getpid, ranks=1) != os.getpid()


def fail_on(rank: int) -> None:
    print("about to fail")
    dist.barrier()
    if dist.rank() == rank:
        raise ValueError(f"no luck on {rank}")
    dist.barrier()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_failure_is_raised_with_its_own_traceback(rank: int) -> None:
    with pytest.raises(PacelineError) as caught:
        paceline.launch(fail_on, ranks=2, rank=rank)
    text = str(caught.value)
    assert caught.value.code == "launch.rank-failed"
    assert f"Rank {rank} failed" in text and f"ValueError: no luck on {rank}" in text
    assert "in fail_on" in text and "launcher/" not in text
    if rank:
        assert "about to fail" in "".join(caught.value.__notes__)


def test_an_error_with_a_code_keeps_it() -> None:
    with pytest.raises(PacelineError) as caught:
        paceline.launch(lambda: paceline.get_model("nonsense"), ranks=2)
    assert caught.value.code == "model.unknown-name"


def test_a_rank_that_was_killed_is_named_with_its_signal() -> None:
    def killed() -> None:
        if dist.rank() == 1:
            os.kill(os.getpid(), 9)
        dist.barrier()

    for _ in range(5):
        with pytest.raises(PacelineError, match="rank 1 was killed by SIGKILL"):
            paceline.launch(killed, ranks=2)


def test_a_rank_that_is_killed_after_its_function_returned_has_failed() -> None:
    def end() -> None:
        if dist.rank() == 1:
            atexit.register(os.kill, os.getpid(), signal.SIGKILL)

    with pytest.raises(PacelineError, match="rank 1 was killed by SIGKILL after its code returned"):
        paceline.launch(end, ranks=2)


def test_a_rank_that_exits_with_a_status_is_named() -> None:
    with pytest.raises(PacelineError, match=r"sys\.exit\(3\)"):
        paceline.launch(lambda: sys.exit(3), ranks=2)


def test_a_rank_that_exits_with_zero_has_not_failed() -> None:
    assert paceline.launch(lambda: sys.exit(0) if dist.rank() == 1 else "fine", ranks=2) == "fine"
    assert paceline.launch(lambda: sys.exit(0), ranks=1) is None


def test_without_a_number_one_cpu_rank_is_chosen_and_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert paceline.launch(dist.world) == 1
    assert capfd.readouterr().out == "ranks: 1 (no GPU)\n"


def test_more_ranks_than_gpus_is_an_error_that_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(PacelineError) as caught:
        paceline.launch(dist.world, ranks=3)
    assert caught.value.code == "launch.more-ranks-than-gpus"
    assert "cuda:0, cuda:1" in str(caught.value)


def test_cpu_ranks_are_never_limited_by_cores() -> None:
    number = (os.cpu_count() or 1) + 2
    assert paceline.launch(dist.world, ranks=number) == number


def test_rank_zero_is_shown_and_the_others_are_not(capfd: pytest.CaptureFixture[str]) -> None:
    paceline.launch(lambda: print(f"hello from {dist.rank()}"), ranks=2)
    assert capfd.readouterr().out == "hello from 0\n"


@ranks(1)
def test_a_launch_from_inside_a_process_group_is_refused() -> None:
    with pytest.raises(PacelineError) as caught:
        paceline.launch(dist.world, ranks=2)
    assert caught.value.code == "launch.group-already-open"


def test_a_parents_work_at_exit_is_not_done_by_ranks(tmp_path: Path) -> None:
    code = """
import atexit, paceline
def note():
    with open("exits", "a") as file: file.write("x")
atexit.register(note)
paceline.launch(lambda: None, ranks=2)
"""
    (tmp_path / "script.py").write_text(code)
    forked.script(tmp_path / "script.py", cwd=tmp_path).check_returncode()
    assert (tmp_path / "exits").read_text() == "x"


def test_a_launch_on_a_rank_that_a_launcher_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PacelineError, match="called on rank 1 of 2") as caught:
        paceline.launch(total, ranks=2)
    assert caught.value.code == "launch.inside-a-rank"
    with pytest.raises(PacelineError, match=r"paceline.sweep\(\) was called on rank 1 of 2"):
        paceline.sweep(lambda trial: trial["x"], {"x": "uniform(0, 1)"}, trials=1)


@pytest.mark.parametrize("name", ["world_size", "nprocs", "n", "num_processes", "nproc_per_node"])
def test_the_number_of_ranks_by_another_name_is_refused(name: str) -> None:
    with pytest.raises(PacelineError, match=r"use paceline.launch\(fn, ranks=2\)") as caught:

        def fn(rank: int = 0, world_size: int = 1, **_: int) -> int:
            return world_size

        paceline.launch(fn, **{name: 2})
    assert caught.value.code == "launch.bad-options"


def test_a_number_that_is_the_functions_own_or_true_is_passed() -> None:
    assert paceline.launch(lambda n: n, n=3) == 3
    assert paceline.launch(lambda world_size: world_size, ranks=2, world_size=2) == 2
    with pytest.raises(PacelineError, match="world_size=4, but ranks=2"):
        paceline.launch(lambda world_size: world_size, ranks=2, world_size=4)
