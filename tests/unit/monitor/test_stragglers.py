from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline
from paceline import Trainer, dist
from paceline.monitor.stragglers import NUMBERS, RECENT, BusyTime, Slow, Stragglers, compare
from paceline.run.folder import RunFolder

HEALTHY = (0.010, 0.011, 0.001)  # of a rank: low and median busy seconds, wait for data


def test_healthy_ranks_are_not_named() -> None:
    assert compare([HEALTHY] * 4, step=0.02) == {}
    assert compare([HEALTHY, (0.014, 0.015, 0.002)], step=0.02) == {}


def test_a_rank_is_slow_by_itself_or_because_of_its_data() -> None:
    ranks = [HEALTHY, HEALTHY, (0.022, 0.024, 0.001), HEALTHY]
    assert compare(ranks, step=0.03) == {2: Slow("compute", pytest.approx(2.0), pytest.approx(0.011))}
    ranks[2] = (0.010, 0.011, 0.012)  # it sleeps while it reads
    assert compare(ranks, step=0.03) == {2: Slow("data", pytest.approx(2.0), pytest.approx(0.011))}
    ranks[2] = (0.021, 0.022, 0.012)  # it computes while it reads
    assert compare(ranks, step=0.03)[2].kind == "data"


def test_two_slow_ranks_of_four_are_both_named_and_of_two_ranks_the_slower_one() -> None:
    slow = (0.022, 0.024, 0.001)
    assert set(compare([slow, HEALTHY, slow, HEALTHY], step=0.03)) == {0, 2}
    assert set(compare([HEALTHY, slow], step=0.03)) == {1}


def test_what_hardly_delays_a_step_is_not_named() -> None:
    assert compare([(1e-4, 1e-4, 0.0), (3e-4, 3e-4, 0.0)], step=1e-3) == {}  # too short to matter
    assert compare([(0.001, 0.001, 0.0), (0.002, 0.002, 0.0)], step=0.1) == {}  # a step takes much longer


def test_stages_of_a_pipeline_have_different_work() -> None:
    short, long = (0.010, 0.010, 0.0), (0.030, 0.030, 0.0)
    assert compare([short, short, long, long], step=0.05, stages=2) == {}
    assert set(compare([short, short, long, (0.06, 0.06, 0.0)], step=0.05, stages=2)) == {3}
    assert compare([short, long], step=0.05, stages=2) == {}


def test_only_the_wait_for_data_may_be_known() -> None:
    found = compare([(0.0, 0.0, 0.001), (0.0, 0.0, 0.011)], step=0.02)
    assert found == {1: Slow("data", pytest.approx(2.0), pytest.approx(0.010))}


def test_nothing_is_concluded_before_all_ranks_have_enough_steps() -> None:
    assert compare([HEALTHY, (0.0, 0.0, 0.0), (0.05, 0.05, 0.0)], step=0.03) == {}


def log_points(made: Stragglers, ranks: Sequence[Sequence[float]], steps: Sequence[int], seconds: float = 0.3) -> None:
    for step in steps:
        made.log_point([number for rank in ranks for number in rank], step, RECENT, seconds)


def times(factor: float, numbers: Sequence[float]) -> list[float]:
    return [factor * number for number in numbers]


def test_a_slow_rank_is_named_once_until_it_recovers_and_in_the_end() -> None:
    said: list[str] = []
    made = Stragglers(2, 1, said.append)
    healthy = times(5, HEALTHY)
    log_points(made, [healthy, healthy], [10], 1.5)
    log_points(made, [healthy, (0.110, 0.120, 0.005)], [20], 1.5)
    assert made.shown() == "rank 1 2.0× slower: compute"
    assert made.values() == {"straggler": 1, "slowdown": 2.0}
    assert said == []  # it has cost half a second
    log_points(made, [healthy, (0.110, 0.120, 0.005)], [30, 40], 1.5)
    log_points(made, [healthy, (0.070, 0.075, 0.005)], [50], 1.5)  # faster, but not as fast as the others
    assert len(said) == 1
    log_points(made, [healthy, healthy], [60, 70, 80], 1.5)
    made.finish()
    assert made.shown() == "" and made.values() == {}
    named, recovered, verdict = said
    assert named == (
        "rank 1 has been 2.0 × slower than the others since step 11: computing takes it 55 ms longer in each step, and "
        "all ranks have waited 1.1 s for it"
    )
    assert recovered == "rank 1 is as fast as the others again (step 70)"
    assert verdict == (
        "rank 1 was slower than the others in 40 of 80 steps, computing: 15% of the time of all ranks (1.8 s) was lost "
        "to it"
    )


@pytest.mark.parametrize(
    ("factor", "seconds"), [(2, 0.2), (8, 10.0)], ids=["half a second", "a thousandth of the time"]
)
def test_what_cost_next_to_nothing_is_not_reported_at_the_end(factor: float, seconds: float) -> None:
    said: list[str] = []
    made = Stragglers(2, 1, said.append)
    healthy, slow = times(factor, HEALTHY), times(factor, (0.022, 0.024, 0.001))
    log_points(made, [healthy, slow], [10], 2.4)
    log_points(made, [healthy, healthy], range(20, 200, RECENT), RECENT * seconds)
    log_points(made, [healthy, slow], [200], 2.4)
    assert made.values() == {"straggler": 1, "slowdown": pytest.approx(2.0)}
    made.finish()
    assert said == []


def test_a_stall_of_one_step_changes_no_number_much(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(float(now) for now in (0, *range(1, 6), 100, *range(101, 106)))
    monkeypatch.setattr("paceline.monitor.stragglers.thread_time", lambda: next(clock))
    own = BusyTime(torch.device("cpu"))
    waited = 0.0
    for number in range(RECENT):
        assert own.numbers() == [0.0] * NUMBERS
        waited = 50.0 if number == 4 else 0.0  # `numbers` is called at log points, after which it starts from zero
        own.stepped(waited)
    assert own.numbers() == [1.0, 1.0, 0.0]


class Slowness:
    """One rank takes much more time than the other in each step: FSDP computes too, above all on a busy machine."""

    def __init__(self, kind: str, rank: int) -> None:
        self.kind = kind if dist.rank() == rank else ""

    def compute(self, seconds: float) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass


class Samples(Dataset[tuple[Tensor, Tensor]]):
    draws_randomness = False

    def __init__(self, slowness: Slowness) -> None:
        self.slowness = slowness

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.slowness.kind == "data":
            time.sleep(0.1)
        return torch.ones(4), torch.ones(1)


class Model(nn.Module):
    def __init__(self, slowness: Slowness) -> None:
        super().__init__()
        self.layer, self.slowness = nn.Linear(4, 1), slowness

    def forward(self, inputs: Tensor) -> Tensor:
        self.slowness.compute(0.060 if self.slowness.kind == "compute" else 0.005)
        outputs: Tensor = self.layer(inputs)
        return outputs


def train(strategy: str, run: str) -> list[list[str]]:
    """What rank 0 says in three trainings."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    found = []
    for kind, rank in (("", 0), ("compute", 1), ("data", 0)):
        slowness = Slowness(kind, rank)
        run += kind
        settings: dict[str, Any] = {"batch": 4, "run": run, "quiet": True, "preflight": False}
        trainer = Trainer(Model(slowness), "sgd", criterion=nn.MSELoss(), device="cpu", strategy=strategy, **settings)
        trainer.train(Samples(slowness), max_steps=RECENT)
        found.append([text for text in said if "slower" in text])
        said.clear()
    return found


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.nightly)])
def test_a_rank_that_computes_or_reads_slowly_is_named_and_a_healthy_run_is_silent(
    strategy: str, tmp_path: Path
) -> None:
    healthy, compute, data = paceline.launch(train, ranks=2, strategy=strategy, run=str(tmp_path / "run"))
    assert healthy == []
    assert compute == []  # it cost half a second: the metrics have it
    assert data[0].startswith("rank 0 has been ") and "since step 1: reading data takes" in data[0]
    assert "in 10 of 10 steps, reading data" in data[1] and len(data) == 2
    run = RunFolder(tmp_path / "runcompute")
    last = [json.loads(run.rank_stats(rank).read_text().splitlines()[-1]) for rank in range(2)]
    assert last[1]["slowdown"] > 1.5 and "slowdown" not in last[0]
    assert last[1]["own_time"] >= 0.060 > last[0]["own_time"]
    metrics = json.loads((tmp_path / "runcompute" / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["straggler"] == 1 and metrics["slowdown"] > 1.5
