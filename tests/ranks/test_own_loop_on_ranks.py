"""One's own loop on several ranks: what each rank brings may differ, what they end with may not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import paceline
import tiny
from paceline import dist, testing
from paceline.errors import ConfigError, TrainError
from worlds import ranks

SGD = {"name": "sgd", "lr": 0.1}


def by_hand(slices: list[tuple[int, int]]) -> torch.Tensor:
    """Plain SGD on the mean over each slice of the data."""
    model, data = tiny.classifier(), tiny.blobs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start, stop in slices:
        optimizer.zero_grad()
        inputs, targets = data[start:stop]
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def equal_on_all_ranks(weights: torch.Tensor) -> bool:
    everyone = [torch.empty_like(weights) for _ in range(dist.world())]
    dist.all_gather(everyone, weights)
    return all(torch.equal(weights, other) for other in everyone)


@pytest.mark.parametrize("height", ["training_step", "parts"])
@pytest.mark.parametrize("batch", [None, 12])
def test_batches_of_different_sizes_are_weighed_by_their_samples(height: str, batch: int | None) -> None:
    @ranks(2)
    def body() -> None:
        trainer = tiny.classifier_trainer(optimizer=SGD, batch=batch)
        for step in range(3):
            start, stop = (0, 4) if dist.rank() == 0 else (4, 12)
            own = tiny.blobs()[step * 12 + start : step * 12 + stop]
            if height == "training_step":
                assert trainer.training_step(own).stepped
            else:
                trainer.backward(trainer.forward(own))
                trainer.step()
        weights = tiny.weights(trainer)
        assert equal_on_all_ranks(weights)
        assert torch.allclose(weights, by_hand([(0, 12), (12, 24), (24, 36)]), rtol=1e-5, atol=1e-7)

    body()


LAYOUT = {"strategy": "ddp"}  # of the test that runs on these ranks


class Norms:
    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_gradients(self, record: Any) -> None:
        squares = torch.stack([gradient.double().square().sum() for gradient in record.gradients.values()]).sum()
        if LAYOUT["strategy"] == "fsdp":  # of this rank's shards
            dist.all_reduce(squares)
        self.norms.append(squares.sqrt().item())
        for gradient in record.gradients.values():
            gradient.mul_(2.0)


@pytest.mark.parametrize(("world", "strategy"), [(1, "ddp"), (2, "ddp"), (3, "ddp"), (2, "fsdp")])
@pytest.mark.parametrize("source", ["loader", "own batches", "a Loss"])
def test_a_loss_of_ones_own_gives_the_same_step_on_any_number_of_ranks(world: int, strategy: str, source: str) -> None:
    """With uneven micro-batches, accumulation, clipping and gradients that a callback reads and changes."""

    @ranks(world)
    def body() -> None:
        LAYOUT["strategy"] = strategy
        seen = Norms()
        trainer = tiny.classifier_trainer(
            optimizer=SGD, strategy=strategy, batch=12, accumulate=2, callbacks=[seen], clip_norm=0.05, criterion=None
        )
        data = tiny.blobs(36)
        cut = [data[start : start + 6] for start in range(0, 36, 6)]
        bounds = [round(6 * rank / world) for rank in range(world + 1)]
        mine = slice(bounds[dist.rank()], bounds[dist.rank() + 1])
        batches: Any = [(inputs[mine], targets[mine]) for inputs, targets in cut]
        if source == "loader":
            batches = trainer.loader(torch.utils.data.DataLoader(data, batch_size=12))
        for number, (inputs, targets) in enumerate(batches):
            losses = nn.functional.cross_entropy(
                trainer.compute(lambda model, x: model(x), inputs), targets, reduction="none"
            )
            if source == "a Loss":
                trainer.backward(paceline.Loss(losses.sum(), len(targets)))
            else:
                trainer.backward(losses.mean(), weight=len(targets))
            if number % 2:
                trainer.step()
        plain, norms = clipped_by_hand([(0, 12), (12, 24), (24, 36)])
        weights = torch.cat([value.flatten() for value in gathered(trainer).values()])
        assert trainer.step_count == 3 and seen.norms == pytest.approx(norms, rel=1e-5)
        assert (
            torch.equal(weights, plain)
            if world == 1 and source != "a Loss"
            else torch.allclose(weights, plain, atol=1e-6)
        )

    body()


def gathered(trainer: paceline.Trainer) -> dict[str, torch.Tensor]:
    state = trainer.state_dict()
    if LAYOUT["strategy"] == "fsdp" and dist.rank() > 0:
        state = {name: torch.empty(p.shape) for name, p in trainer.model.named_parameters()}
    for value in state.values():
        dist.broadcast(value)
    return state


def clipped_by_hand(slices: list[tuple[int, int]]) -> tuple[torch.Tensor, list[float]]:
    """As the loop above: gradients of two micro-batches, doubled, then clipped. Returns the norms before that."""
    model, data, norms = tiny.classifier(), tiny.blobs(36), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for start, stop in slices:
        optimizer.zero_grad()
        for first in range(start, stop, 6):
            inputs, targets = data[first : first + 6]
            nn.functional.cross_entropy(model(inputs), targets, reduction="none").mean().backward()
        gradients = [p.grad.mul_(0.5) for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt()))
        for gradient in gradients:
            gradient.mul_(2.0)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), norms


@ranks(2)
def test_losses_of_both_kinds_in_one_step_are_refused() -> None:
    trainer = tiny.classifier_trainer(strategy="ddp", batch=8)
    inputs, targets = tiny.blobs()[4 * dist.rank() : 4 * dist.rank() + 4]
    with trainer.no_sync():
        trainer.backward(trainer.forward((inputs, targets)))
    with pytest.raises(TrainError, match="losses with a weight of their own") as caught:
        trainer.backward(trainer.model(inputs).mean(), weight=4)
    assert caught.value.code == "train.not-reduced"


def test_uneven_micro_batches_of_one_rank_are_weighed_by_their_samples() -> None:
    trainer = tiny.classifier_trainer(optimizer=SGD, batch=None, accumulate=4)
    start = 0
    for size in (5, 3, 6, 2):
        trainer.training_step(tiny.blobs()[start : start + size])
        start += size
    assert torch.allclose(tiny.weights(trainer), by_hand([(0, 16)]), rtol=1e-5, atol=1e-7)


def test_a_short_last_batch_is_a_step_of_its_own() -> None:
    trainer = tiny.classifier_trainer(batch=16)
    for _ in range(2):
        for start in (0, 16, 32):
            trainer.training_step(tiny.blobs(40)[start : start + 16])
    assert trainer.step_count == 6


@pytest.mark.parametrize("world", [1, 2])
def test_a_nan_in_a_custom_loop_is_an_error_with_the_rank_and_samples(world: int) -> None:
    @ranks(world)
    def body() -> None:
        inputs, targets = tiny.blobs().tensors
        inputs = inputs.clone()
        inputs[7] = float("nan")
        trainer = tiny.classifier_trainer(log_every=2)
        with pytest.raises(TrainError) as caught:
            for _ in range(3):
                for batch in trainer.loader(TensorDataset(inputs, targets)):
                    trainer.training_step(batch)
        assert caught.value.code == "train.nonfinite" and "sample 7" in str(caught.value)
        if world == 1:  # somebody has looked: it goes on
            before = tiny.weights(trainer)
            for batch in trainer.loader(tiny.blobs()):
                trainer.training_step(batch)
            assert not torch.equal(tiny.weights(trainer), before)

    body()


@ranks(2)
def test_the_rank_whose_loss_was_not_finite_is_named_with_or_without_clipping() -> None:
    class OnRankOne(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.layer(inputs)
            return outputs * float("nan") if dist.rank() == 1 and trainer.step_count == 2 else outputs

    for clip_norm in (None, 1.0):
        trainer = tiny.classifier_trainer(OnRankOne(), log_every=8, clip_norm=clip_norm)
        with pytest.raises(TrainError) as caught:
            trainer.train(tiny.blobs(), epochs=9)
        assert "at step 3 on rank 1" in str(caught.value)


def test_a_schedule_without_a_horizon_is_refused_and_one_that_needs_none_runs() -> None:
    with pytest.raises(ConfigError) as caught:
        tiny.classifier_trainer(schedule={"name": "cosine"}).training_step(tiny.blobs(16)[:])
    assert caught.value.code == "config.no-horizon"
    trainer = tiny.classifier_trainer(schedule={"name": "constant", "warmup": 4})
    for batch in trainer.loader(tiny.blobs()):
        trainer.training_step(batch)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 3 / 4)


def test_an_epoch_scheduler_steps_and_the_epoch_is_counted() -> None:
    model = tiny.classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    trainer = tiny.classifier_trainer(model, optimizer=optimizer, scheduler=scheduler, clip_norm=1e-3)
    for _ in range(3):
        for batch in trainer.loader(tiny.blobs()):
            trainer.training_step(batch)
    assert optimizer.param_groups[0]["lr"] == 0.125 and trainer.epoch == 3


def test_breaking_off_a_pass_forgets_its_unfinished_group() -> None:
    whole, broken = tiny.classifier_trainer(accumulate=2), tiny.classifier_trainer(accumulate=2)
    for batch in broken.loader(tiny.blobs()):
        broken.training_step(batch)
        break
    for trainer in (whole, broken):
        for batch in trainer.loader(tiny.blobs()):
            trainer.training_step(batch)
    assert torch.equal(tiny.weights(whole), tiny.weights(broken))


@ranks(2)
def test_a_step_whose_last_backward_was_not_reduced_has_a_code() -> None:
    trainer = tiny.classifier_trainer()
    own = tiny.blobs()[8 * dist.rank() : 8 * dist.rank() + 8]
    with trainer.no_sync():
        trainer.backward(trainer.forward(own))
    with pytest.raises(TrainError) as caught:
        trainer.step()
    assert caught.value.code == "train.not-reduced"


def test_a_step_on_averaged_weights_has_a_code() -> None:
    trainer = tiny.classifier_trainer(ema=0.9)
    with pytest.raises(TrainError) as caught, trainer.ema_weights():
        trainer.training_step(tiny.blobs(16)[:])
    assert caught.value.code == "train.step-on-average"


def test_frozen_batch_norms_stay_frozen_in_a_custom_loop() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[1].eval()
    tiny.classifier_trainer(model).training_step(tiny.blobs(16)[:])
    assert not model[1].training


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([tiny.blobs()[index] for index in range(32)])


def test_data_without_length_steps_an_epoch_scheduler_after_its_last_epoch_too() -> None:
    rates = []
    for data in (TensorDataset(*tiny.blobs(32).tensors), Stream()):
        model = tiny.classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        trainer = tiny.classifier_trainer(model, optimizer=optimizer, scheduler=scheduler, clip_norm=1e-3)
        trainer.train(data, epochs=2)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.25, 0.25]


@ranks(2)
def test_averaged_weights_begin_with_rank_zeros() -> None:
    torch.manual_seed(dist.rank())
    trainer = tiny.classifier_trainer(nn.Sequential(nn.Linear(8, 2)), ema=0.99)
    with trainer.ema_weights():
        assert equal_on_all_ranks(tiny.weights(trainer))


def padded(model: nn.Module, batch: Any) -> dict[str, Any]:
    inputs, targets = batch
    loss = nn.functional.cross_entropy(model(inputs), targets)
    return {"loss": loss, "weight": (targets != -100).sum()}


@pytest.mark.parametrize("world", [1, 2])
def test_a_mean_over_nothing_counts_nothing(world: int) -> None:
    """One rank's rows, or a whole step's, are all padding."""

    @ranks(world)
    def body() -> None:
        inputs, targets = tiny.blobs().tensors
        targets = targets.clone()
        targets[16:24] = -100  # half of a step: one of two ranks'
        targets[32:48] = -100  # a whole step
        trainer = tiny.classifier_trainer(criterion=None, loss_fn=padded, shuffle=False, batch=16, optimizer=SGD)
        trainer.train(TensorDataset(inputs, targets), epochs=2)
        assert torch.isfinite(tiny.weights(trainer)).all() and equal_on_all_ranks(tiny.weights(trainer))
        expected = by_hand([(0, 16), (24, 32)] * 2)
        assert torch.allclose(tiny.weights(trainer), expected, rtol=1e-4, atol=1e-6)

    body()


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]))])
def test_a_criterion_that_leaves_targets_out_or_weighs_classes_is_exact(criterion: nn.Module) -> None:
    @ranks(3)
    def body() -> None:
        inputs, targets = tiny.blobs(30).tensors
        targets = targets.clone()
        targets[::4] = -100
        losses = []
        trainer = tiny.classifier_trainer(criterion=criterion, batch=10, shuffle=False, optimizer=SGD)
        history = trainer.train(TensorDataset(inputs, targets), epochs=1)
        model = tiny.classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for start in (0, 10, 20):
            optimizer.zero_grad()
            loss = criterion(model(inputs[start : start + 10]), targets[start : start + 10])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert history.losses == pytest.approx(losses, rel=1e-5)

    body()


def test_a_criterion_that_does_not_return_a_mean_has_a_code() -> None:
    with pytest.raises(TrainError) as caught:
        tiny.classifier_trainer(criterion=nn.CrossEntropyLoss(reduction="sum")).train(tiny.blobs(), max_steps=1)
    assert caught.value.code == "train.criterion-not-a-mean"


class Named(nn.BatchNorm1d):
    """A subclass that only has another name."""


@ranks(2)
def test_a_plain_subclass_of_batch_norm_counts_all_ranks_too() -> None:
    torch.manual_seed(0)
    trainer = tiny.classifier_trainer(nn.Sequential(nn.Linear(8, 4), Named(4), nn.Linear(4, 2)), preflight=False)
    trainer.train(tiny.blobs(16), epochs=1)
    inputs = tiny.blobs(16).tensors[0]
    assert isinstance(trainer.model[1], Named)
    torch.manual_seed(0)
    seen = nn.Linear(8, 4)(inputs)
    assert torch.allclose(trainer.model[1].running_mean, 0.1 * seen.mean(0), rtol=1e-4, atol=1e-6)


@ranks(2)
def test_a_parameter_that_a_later_step_does_not_use_is_named() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.at_first = nn.Linear(8, 2), nn.Linear(8, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs: torch.Tensor = self.always(inputs)
            return outputs + self.at_first(inputs) if trainer.step_count < 2 else outputs

    trainer = tiny.classifier_trainer(Sometimes())
    with pytest.raises(TrainError) as caught:
        trainer.train(tiny.blobs(), epochs=3)
    assert caught.value.code == "train.unused-parameters" and "at_first.weight" in str(caught.value)


def test_other_codes_of_a_trainers_values() -> None:
    with pytest.raises(TrainError) as caught:
        tiny.classifier_trainer().log("loss", 1.0)
    assert caught.value.code == "train.reserved-name"
    with pytest.raises(TrainError) as caught:
        tiny.classifier_trainer().log("several", torch.ones(3))
    assert caught.value.code == "train.not-a-number"
    with pytest.raises(TrainError) as caught:
        tiny.classifier_trainer(early_stop=2).train(tiny.blobs(), epochs=1)
    assert caught.value.code == "train.no-evaluation"
    with pytest.raises(TrainError) as caught:
        paceline.Trainer(model := tiny.classifier(), torch.optim.LBFGS(model.parameters()))
    assert caught.value.code == "train.needs-closure"


@pytest.mark.parametrize("settings", [{"save_every": 3}, {"save_minutes": 1e-9}, {"save_every": 3, "strategy": "fsdp"}])
def test_checkpoints_that_are_due_are_saved_and_resumed(tmp_path: Path, settings: dict[str, Any]) -> None:
    def train(run: str, stop: int) -> list[Any]:
        trainer = tiny.classifier_trainer(run=str(tmp_path / run), resume="auto", log_every=2, **settings)
        began = trainer.step_count
        while trainer.step_count < stop:
            for batch in trainer.loader(tiny.blobs()):
                trainer.training_step(batch)
                if trainer.step_count == stop:
                    break
        return [began, {name: tensor.tolist() for name, tensor in trainer.state_dict().items()}]

    paceline.launch(partial(train, "broken", 4), ranks=2)
    began, weights = paceline.launch(partial(train, "broken", 8), ranks=2)
    assert began == (3 if "save_every" in settings else 4)
    assert [0, weights] == paceline.launch(partial(train, "whole", 8), ranks=2)


def test_settings_that_a_custom_loop_cannot_honour_are_named(
    in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = {"eval_every": 2, "save_best": "loss", "save_every": 2, "run": False}
    trainer = tiny.classifier_trainer(**wanted)
    for batch in trainer.loader(tiny.blobs()):
        trainer.training_step(batch)
    said = capsys.readouterr().out
    assert said.count("no effect in a custom loop: eval_every") == 1 and "save_best (evaluations are yours" in said
    assert said.count("no effect without a run folder (run=False): save_every, save_best") == 1


class Branching(nn.Module):
    """On rank 1, later batches do not use the second layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.forwards = nn.Linear(8, 2), nn.Linear(8, 2), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.forwards += self.training
        first: torch.Tensor = self.first(inputs)
        return first if self.forwards > 4 and dist.rank() == 1 else first + self.second(inputs)


@testing.ranks(2)  # rank 0 learns of the end of rank 1 by the end of its process
def test_a_layer_that_a_rank_stops_using_is_named_before_the_step() -> None:
    trainer = tiny.classifier_trainer(Branching(), strategy="ddp", batch=8)
    code, text = "", ""
    try:
        for batch in trainer.loader(tiny.blobs()):
            trainer.backward(trainer.forward(batch))
            trainer.step()
    except TrainError as error:
        code, text = error.code, str(error)
    except RuntimeError:  # rank 0, whose reduction waits for the gradients of rank 1
        assert dist.rank() == 0
    if dist.rank() == 1:
        assert code == "train.unused-parameters" and "second.weight, second.bias" in text
