from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paceline import dist
from paceline.errors import TrainError
from paceline.log import rank_log
from paceline.monitor.progress_bar import Display
from paceline.run.history import History
from paceline.runtime import collectives
from paceline.train.callbacks import Callbacks
from paceline.train.recorder import Recorder, Sinks
from worlds import ranks

Parts = list[tuple[torch.Tensor, Any]]


def is_bad(record: dict[str, Any]) -> bool:
    return not math.isfinite(record["loss"]) or not math.isfinite(record.get("grad_norm", 0.0))


def recorder(history: History, *callbacks: Any) -> Recorder:
    hooks = Callbacks(callbacks)
    log = rank_log(0, quiet=True)
    return Recorder(history, Sinks(), Display(None, 0), torch.device("cpu"), hooks, is_bad, log, None)


def step(number: int, parts: Parts, *, means: bool = True, norm: float | None = None, skipped: float = 0.0) -> Any:
    grad_norm = None if norm is None else torch.tensor(norm)
    return (number, 0, 0.1, 4, parts, means, grad_norm, skipped)


def loss(value: float) -> torch.Tensor:
    return torch.tensor(value)


@ranks(2)
def test_a_loss_is_the_weighted_mean_over_micro_batches_and_ranks() -> None:
    history = History()
    made = recorder(history)
    mine: Parts = [(loss(1.0), 3), (loss(5.0), 1)] if dist.is_main() else [(loss(4.0), 2)]
    sums: Parts = [(loss(6.0), torch.tensor(3.0))] if dist.is_main() else [(loss(0.0), 0)]
    made.pending.extend([step(1, mine, norm=2.0), step(2, sums, means=False)])
    flushed = made.flush()
    assert history.losses == [16 / 6, 2.0]
    assert [record.get("grad_norm") for record in flushed.records] == [2.0, None]
    assert history.steps == flushed.records and made.pending == [] and not made.flush().records


def test_a_placeholder_batch_counts_nothing_whatever_its_loss() -> None:
    history = History()
    made = recorder(history)
    made.pending.append(step(1, [(loss(math.nan), 0), (loss(2.0), 4)]))
    assert made.flush().nonfinite is None and history.losses == [2.0]


def test_the_first_nonfinite_step_is_found_and_a_skipped_one_is_marked() -> None:
    made = recorder(History())
    made.pending.extend([
        step(1, [(loss(1.0), 1)]),
        step(2, [(loss(1.0), 1)], norm=math.inf, skipped=1.0),
        step(3, [(loss(math.nan), 1)]),
    ])  # fmt: skip
    flushed = made.flush()
    assert flushed.nonfinite is not None and flushed.nonfinite["step"] == 2
    assert [record.get("skipped", False) for record in flushed.records] == [False, True, False]


def test_a_step_without_weight_has_no_loss_and_is_not_an_error() -> None:
    history = History()
    made = recorder(history)
    made.pending.append(step(1, [(loss(0.0), 0)], means=False))
    assert made.flush().nonfinite is None and math.isnan(history.losses[0])


@ranks(2)
def test_logged_values_are_averaged_even_where_only_one_rank_has_them() -> None:
    seen: list[dict[str, Any]] = []

    class Log:
        def on_log(self, record: dict[str, Any]) -> None:
            seen.append(record)

    made = recorder(History(), Log())
    made.log("everywhere", torch.tensor(float(dist.rank())), weight=1 + 2 * dist.rank())
    if dist.is_main():
        made.log("here", 1.0)
        made.log("here", 4.0)
    made.pending.append(step(1, [(loss(1.0), 1)]))
    made.flush()
    assert [(record["everywhere"], record["here"]) for record in seen] == [(0.75, 2.5)]


@ranks(2)
def test_a_stop_that_one_rank_requests_is_known_on_every_rank() -> None:
    made = recorder(History())
    made.stop_requested = not dist.is_main()
    made.pending.append(step(1, [(loss(1.0), 1)]))
    assert made.flush().stop


def test_a_logged_tensor_must_be_a_scalar_and_a_metric_must_not_use_a_reserved_name() -> None:
    made = recorder(History())
    with pytest.raises(TrainError) as shape:
        made.log("values", torch.ones(2))
    with pytest.raises(TrainError) as name:
        made.log_metrics([({"lr": 1.0}, 1)])
    assert (shape.value.code, name.value.code) == ("train.not-a-number", "train.reserved-name")


@ranks(2)
def test_records_that_could_not_be_reduced_are_written_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    made = recorder(history)
    made.pending.append(step(1, [(loss(1.0 + dist.rank()), 2)]))
    made.log("mine", float(dist.rank()))
    with monkeypatch.context() as broken:
        broken.setattr(collectives, "all_reduce", lambda tensor: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            made.flush()
    assert made.flush_last() == dist.is_main()
    if dist.is_main():
        assert history.steps == [{"step": 1, "epoch": 0, "loss": 1.5, "lr": 0.1, "mine": 0.5}]
    assert made.pending == [] and made.flush_last()
