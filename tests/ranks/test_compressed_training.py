"""`sync: {compress: …}` through the Trainer: with what else a step does, and across checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tiny
from paceline import Loss, Trainer, dist
from samples import ALL
from worlds import ranks, run_on_ranks

POWERSGD = {"compress": "powersgd", "rank": 1}
METHODS: list[Any] = ["fp16", "bf16", "int8", POWERSGD]
USUAL = [method for method in METHODS if method != "bf16"]  # which is cast as fp16 is


def model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2))


def trainer(sync: Any, **settings: Any) -> Trainer:
    return tiny.classifier_trainer(settings.pop("model", None) or model(), sync=sync, strategy="ddp", **settings)


def counts_targets(model: nn.Module, batch: Any) -> Loss:
    """The weight depends on the data."""
    counted = batch[1] > 0
    losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return Loss(sum=(losses * (1 + counted)).sum(), weight=(1 + counted).sum())


class Alternating:
    """Trains one layer in odd steps, and the others in even ones."""

    def __init__(self, model: nn.Sequential) -> None:
        self.model = model

    def on_step(self, record: Any) -> None:
        for number in (0, 2, 4):
            self.model[number].requires_grad_(record.step % 2 == (number == 2))


def feedback(trainer: Trainer) -> dict[str, Tensor]:
    assert trainer._engine.features.reduction.compression is not None
    return trainer._engine.features.reduction.compression.local_state()


@ranks(2)
def test_a_compressed_run_follows_the_uncompressed_one() -> None:
    cases: list[dict[str, Any]] = [
        {"accumulate": 2, "clip_norm": 0.5, "ema": 0.9},
        {"loss_fn": counts_targets, "precision": "bf16", "ddp": {"bucket_mb": 0.002}},
        {"precision": "fp16", "scaler": {"initial": 2.0**40, "backoff": 0.001}, "unused_parameters": "allow"},
    ]
    for settings in cases:
        expected = trainer(None, **settings).train(tiny.blobs(), max_steps=30).losses
        assert expected[-1] < 0.6 * expected[0], settings
        some = ("int8", POWERSGD) if ALL else ("int8",) if "accumulate" in settings else (POWERSGD,)
        for sync in (METHODS if ALL else USUAL) if "ddp" in settings else some:
            compressed = trainer(sync, **settings)
            losses = compressed.train(tiny.blobs(), max_steps=30).losses
            assert losses != expected, (sync, settings)
            last, wanted = (sum(each[-6:]) / 6 for each in (losses, expected))
            assert last == pytest.approx(wanted, abs=0.03 * expected[0]), (sync, settings)
            assert all(error.isfinite().all() for error in feedback(compressed).values())


@ranks(2)
def test_powersgd_sends_the_factors_of_a_small_model_at_once() -> None:
    wide = nn.Sequential(nn.Linear(8, 600), nn.Linear(600, 600), nn.Linear(600, 2))  # more than DDP's first bucket
    run, reduced = trainer(POWERSGD, model=wide), []
    assert run._engine.features.reduction.compression is not None
    exchange = run._engine.features.reduction.compression.exchange
    reduce = exchange.all_reduce

    def counted(tensor: Tensor, **how: Any) -> Any:
        reduced.append(tensor)
        return reduce(tensor, **how)

    exchange.all_reduce = counted  # type: ignore[method-assign]
    run.train(tiny.blobs(), max_steps=3)
    assert len(reduced) == 3 * 2


@ranks(2)
def test_what_was_not_sent_waits_for_frozen_layers_and_survives_a_skipped_step() -> None:
    net = model()
    run = trainer("int8", model=net, callbacks=[Alternating(net)], nonfinite="skip", optimizer="sgd")
    data = tiny.blobs()
    run.train(data, max_steps=8)
    before = {name: error.clone() for name, error in feedback(run).items()}
    assert set(before) == {name for name, _ in net.named_parameters()} and all(map(torch.any, before.values()))
    inputs, targets = data[:8]
    run.training_step((inputs if dist.rank() else inputs / 0.0, targets))
    after = feedback(run)
    assert all(torch.equal(after[name], error) for name, error in before.items())
    run.training_step((inputs, targets))
    changed = {name for name, error in feedback(run).items() if not torch.equal(error, before[name])}
    assert changed == {"2.weight", "2.bias"} or changed == {"0.weight", "0.bias", "4.weight", "4.bias"}


@pytest.mark.parametrize("sync", ["int8", POWERSGD], ids=["int8", "powersgd"])
@ranks(2)
def test_a_resumed_run_has_the_same_bits(sync: Any, tmp_path: Path) -> None:
    settings = {"precision": "fp16", "accumulate": 2, "ema": 0.9, "clip_norm": 1.0}
    whole, first, second = (trainer(sync, **settings) for _ in range(3))
    whole.train(tiny.blobs(), max_steps=14)
    first.train(tiny.blobs(), max_steps=6)
    first.save_checkpoint(tmp_path / "c")
    second.load_checkpoint(tmp_path / "c")
    second.train(tiny.blobs(), max_steps=14)
    expected = whole.model.state_dict()
    assert [name for name, each in second.model.state_dict().items() if not torch.equal(each, expected[name])] == []
    expected = feedback(whole)
    assert [name for name, each in feedback(second).items() if not torch.equal(each, expected[name])] == []


class Raises:
    """After step 5, on some ranks."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def on_step(self, record: Any) -> None:
        if record.step == 5 and dist.rank() in self.ranks:
            raise ZeroDivisionError


def saved_before_exit(folder: Path, *where: int) -> None:
    """Leaves a run that failed on these ranks, and the error feedback of each rank."""

    def fail() -> None:
        run = trainer("int8", run=str(folder / "run"), callbacks=[Raises(*where)])
        with pytest.raises(ZeroDivisionError if dist.rank() in where else RuntimeError):
            run.train(tiny.blobs(), max_steps=9)
        torch.save(feedback(run), folder / f"{dist.rank()}.pt")

    run_on_ranks(2, fail)


def test_a_failed_run_is_saved_by_all_ranks_or_by_rank_0_for_all(tmp_path: Path) -> None:
    def resume() -> None:
        for name, source in (("both", dist.rank()), ("first", 0)):
            run = trainer("int8")
            run.load_checkpoint(tmp_path / name / "run")
            expected = torch.load(tmp_path / name / f"{source}.pt")
            assert run.step_count == 5
            assert all(torch.equal(error, expected[name]) for name, error in feedback(run).items())
        assert feedback(run)

    for name, where in (("both", (0, 1)), ("first", (0,))):
        (tmp_path / name).mkdir()
        saved_before_exit(tmp_path / name, *where)
    run_on_ranks(2, resume)


def test_other_ranks_take_the_mean_and_checkpoints_are_loaded_with_and_without_sync(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def save() -> None:
        run = trainer(POWERSGD, run=str(folder), log_every=3)
        run.train(tiny.blobs(), max_steps=6)
        torch.save(feedback(run), tmp_path / f"{dist.rank()}.pt")
        plain = trainer(None)
        plain.load_checkpoint(folder)
        plain.train(tiny.blobs(), max_steps=8)
        plain.save_checkpoint(tmp_path / "plain")
        dist.barrier()
        run.load_checkpoint(tmp_path / "plain")
        assert not any(map(torch.any, feedback(run).values()))
        run.train(tiny.blobs(), max_steps=10)
        run.load_checkpoint(folder, weights_only=True)
        assert not any(map(torch.any, feedback(run).values())) and run.step_count == 0

    def load() -> None:
        run = trainer(POWERSGD)
        run.load_checkpoint(folder / "checkpoints" / "step-000006")
        saved = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
        assert feedback(run).keys() == saved[0].keys() != set()
        for name, error in feedback(run).items():
            torch.testing.assert_close(error, (saved[0][name] + saved[1][name]) / 2)
        losses = run.train(tiny.blobs(), max_steps=12).losses
        assert len(losses) == 6

    run_on_ranks(2, save)
    run_on_ranks(3, load)
