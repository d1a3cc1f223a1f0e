"""One's own loop: the same bits as train(), at both heights."""

from __future__ import annotations

import copy
import gc
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

import paceline
import resumable
import tiny
from paceline.errors import TrainError

SETTINGS: list[dict[str, Any]] = [
    {},
    {"accumulate": 3, "clip_norm": 0.1, "ema": 0.9},
    {"accumulate": 2, "schedule": {"name": "cosine", "steps": 12, "warmup": 2}},
    {"precision": "fp16", "scaler": {"initial": 2.0**20}, "accumulate": 2, "clip_norm": 0.5},
    {"precision": "bf16", "optimizer": {"name": "muon", "lr": 1e-2}},
]


def by_training_step(trainer: paceline.Trainer, data: Any, epochs: int) -> None:
    for _ in range(epochs):
        for batch in trainer.loader(data):
            trainer.training_step(batch)


def by_parts(trainer: paceline.Trainer, data: Any, epochs: int) -> None:
    groups = trainer.config.accumulate or 1
    for _ in range(epochs):
        batches = list(trainer.loader(data)) if groups == 1 else trainer.loader(data)
        for number, batch in enumerate(batches):
            last = (number + 1) % groups == 0
            if last:
                trainer.backward(trainer.forward(batch))
                trainer.step()
            else:
                with trainer.no_sync():
                    trainer.backward(trainer.forward(batch))


@pytest.mark.parametrize("loop", [by_training_step, by_parts])
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_custom_loop_gives_the_bits_of_train(settings: dict[str, Any], loop: Any) -> None:
    data = tiny.blobs(48)
    whole = tiny.classifier_trainer(**settings)
    whole.train(data, epochs=2)
    own = tiny.classifier_trainer(**settings)
    loop(own, data, 2)
    assert own.step_count == whole.step_count == 6
    assert torch.equal(tiny.weights(own), tiny.weights(whole))
    if "ema" in settings:
        with own.ema_weights(), whole.ema_weights():
            assert torch.equal(tiny.weights(own), tiny.weights(whole))


def test_a_training_step_returns_the_local_loss_and_whether_it_stepped() -> None:
    trainer = tiny.classifier_trainer(accumulate=2)
    results = [trainer.training_step(batch) for batch in trainer.loader(tiny.blobs(32))]
    assert [result.stepped for result in results] == [False, True, False, True]
    assert all(not result.loss.requires_grad for result in results)
    loss, stepped = results[0]
    assert loss.item() == pytest.approx(0.7, abs=0.3) and not stepped


def test_a_weighted_loss_is_returned_as_its_mean() -> None:
    def total(model: nn.Module, batch: Any) -> paceline.Loss:
        return paceline.Loss(nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))

    trainer, plain = tiny.classifier_trainer(loss_fn=total), tiny.classifier_trainer()
    batch = tiny.blobs(16)[:]
    assert trainer.training_step(batch).loss == pytest.approx(plain.training_step(batch).loss.item(), rel=1e-6)
    assert trainer.forward(batch).item() == pytest.approx(plain.forward(batch).item(), rel=1e-5)


def test_custom_batches_step_when_the_batch_is_full() -> None:
    data = tiny.blobs(48)
    trainer = tiny.classifier_trainer(batch=16)
    stepped = [trainer.training_step(data[start : start + 8]).stepped for start in range(0, 48, 8)]
    assert stepped == [False, True] * 3 and trainer.step_count == 3


def test_own_batches_train_as_a_hand_written_loop() -> None:
    data, model = tiny.blobs(48), tiny.classifier()
    reference, criterion = copy.deepcopy(model), nn.CrossEntropyLoss()
    trainer = tiny.classifier_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), accumulate=2)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for start in (0, 16, 32):
        for half in (start, start + 8):
            trainer.training_step(data[half : half + 8])
        inputs, targets = data[start : start + 16]
        optimizer.zero_grad()
        criterion(reference(inputs), targets).backward()
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in reference.parameters()])
    assert torch.allclose(tiny.weights(trainer), expected, rtol=1e-5, atol=1e-7)


def test_a_loss_may_be_changed_before_its_backward() -> None:
    """A penalty on the weights, added to the mean."""
    data, plain = tiny.blobs(16)[:], tiny.classifier()
    sgd = {"name": "sgd", "lr": 0.1}
    with_penalty = tiny.classifier_trainer(copy.deepcopy(plain), optimizer=sgd)
    loss = with_penalty.forward(data)
    with_penalty.backward(loss + sum(p.square().sum() for p in with_penalty.model.parameters()))
    with_penalty.step()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    (
        nn.functional.cross_entropy(plain(data[0]), data[1]) + sum(p.square().sum() for p in plain.parameters())
    ).backward()
    optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    assert torch.allclose(tiny.weights(with_penalty), expected, rtol=1e-5, atol=1e-7)


def test_logged_values_are_in_the_metrics_file(tmp_path: Path) -> None:
    trainer = tiny.classifier_trainer(run=str(tmp_path / "own"), log_every=2)
    for number, batch in enumerate(trainer.loader(tiny.blobs(64))):
        trainer.log("number", number)
        trainer.training_step(batch)
    lines = [json.loads(line) for line in (tmp_path / "own" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line.get("number") for line in lines] == [None, 0.5, None, 2.5]


def test_calls_out_of_order_have_codes() -> None:
    trainer = tiny.classifier_trainer()
    with pytest.raises(TrainError) as caught:
        trainer.backward(torch.tensor(1.0))
    assert caught.value.code == "train.backward-without-forward"
    with pytest.raises(TrainError) as caught:
        trainer.step()
    assert caught.value.code == "train.step-without-backward"
    for loss, weight in ((torch.tensor(1.0), 4), (trainer.model(tiny.blobs()[:4][0]).sum(), -1)):
        with pytest.raises(TrainError) as caught:
            trainer.backward(loss, weight=weight)
        assert caught.value.code == "train.no-loss"


def test_frozen_weights_stay_and_adapters_train() -> None:
    model = tiny.classifier()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    trainer = tiny.classifier_trainer(model)
    frozen, adapter = model[0].weight.clone(), model[2].weight.clone()
    trainer.train(tiny.blobs(), epochs=1)
    assert torch.equal(model[0].weight, frozen) and not torch.equal(model[2].weight, adapter)


def test_several_optimizers_are_refused_with_a_code() -> None:
    model = tiny.classifier()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    with pytest.raises(TrainError) as caught:
        tiny.classifier_trainer(model, optimizer=optimizers)
    assert caught.value.code == "train.several-optimizers"


def test_a_custom_loop_works_after_train_and_load(tmp_path: Path) -> None:
    one = resumable.trainer(scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5), log_every=5)
    batches = one.loader(resumable.points())
    for batch, _ in zip(batches, range(3), strict=False):
        one.training_step(batch)
    one.train(resumable.points(), epochs=2)
    for _ in range(2):
        for batch in batches:
            one.training_step(batch)
    assert one.step_count == 32 and one.optimizer.param_groups[0]["lr"] == 0.1 / 16


def test_ignored_targets_leave_a_step_of_one_micro_batch_as_in_a_plain_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(8, 5, generator=generator), torch.arange(8) % 3) for _ in range(4)]
    for _, targets in batches[1:]:
        targets[:5] = -100

    def start() -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layer = nn.Linear(5, 3)
        return layer, torch.optim.SGD(layer.parameters(), lr=0.3)

    plain, optimizer = start()
    for inputs, targets in batches:
        nn.functional.cross_entropy(plain(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    for own_loop in (False, True):
        layer, optimizer = start()
        trainer = paceline.Trainer(layer, optimizer, criterion=nn.CrossEntropyLoss(), quiet=True, run=False)
        if own_loop:
            for batch in batches:
                trainer.backward(trainer.forward(batch))
                trainer.step()
        else:
            trainer.train(batches, epochs=1)
        assert torch.equal(layer.weight, plain.weight) and torch.equal(layer.bias, plain.bias)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        data = tiny.blobs(40)
        return iter([data[index] for index in range(40)])


STOPS = [(5, False), (5, True), (7, True), (10, False)]  # after so many steps, in an epoch or at its end


def own_epochs(data: Any, folder: Path, *, stops_after: int | None, breaks: bool = False) -> list[Any]:
    """Three epochs, resumed from a checkpoint that was saved after an epoch or in the middle of one."""
    ended: list[tuple[int, int]] = []

    class Epochs:
        def on_epoch(self, record: Any) -> None:
            ended.append((record.epoch, record.step))

    model = tiny.classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    trainer = tiny.classifier_trainer(model, optimizer=optimizer, scheduler=scheduler, callbacks=[Epochs()], batch=8)
    if folder.exists():
        trainer.load_checkpoint(folder)
    for epoch in range(trainer.epoch, 3):
        for batch in trainer.loader(data):
            trainer.training_step(batch)
            assert trainer.epoch == epoch
            if breaks and trainer.step_count == stops_after:
                break
        if stops_after is not None and trainer.step_count >= stops_after:
            trainer.save_checkpoint(folder)
            break
    return [tiny.weights(trainer), trainer.step_count, trainer.epoch, optimizer.param_groups[0]["lr"], ended]


@pytest.mark.parametrize(
    ("data", "after", "breaks"),
    [
        *((TensorDataset(*tiny.blobs(40).tensors), *stop) for stop in STOPS),
        *(pytest.param(Stream(), *stop, marks=pytest.mark.nightly) for stop in STOPS[:2]),  # it forks 16 workers
        *((Stream(), *stop) for stop in STOPS[2:]),
    ],
)
def test_a_loop_over_the_remaining_epochs_resumes_where_it_stopped(
    data: Any, after: int, breaks: bool, tmp_path: Path
) -> None:
    whole, *expected, ended = own_epochs(data, tmp_path / "none", stops_after=None)
    assert expected == [15, 3, 0.125] and ended == [(0, 5), (1, 10), (2, 15)]
    first = own_epochs(data, tmp_path / "saved", stops_after=after, breaks=breaks)
    assert breaks or first[1:3] == [after, after // 5]
    weights, *found, resumed = own_epochs(data, tmp_path / "saved", stops_after=None)
    assert found == expected and torch.equal(weights, whole) and first[-1] + resumed == ended


def test_a_custom_loop_continues_after_the_epochs_of_train(tmp_path: Path) -> None:
    trainer = tiny.classifier_trainer(batch=8)
    trainer.train(tiny.blobs(40), epochs=1)
    for _ in range(trainer.epoch, 3):
        for batch in trainer.loader(tiny.blobs(40)):
            trainer.training_step(batch)
    assert (trainer.step_count, trainer.epoch) == (15, 3)


def test_a_stream_that_was_broken_off_is_continued_in_the_same_epoch() -> None:
    trainer, seen = tiny.classifier_trainer(batch=8), []
    for stop in (2, 9, 9):
        for number, batch in enumerate(trainer.loader(Stream()), start=1):
            trainer.training_step(batch)
            seen.append(trainer.epoch)
            if number == stop:
                break
    assert seen == [0] * 5 + [1] * 5


def test_own_batches_of_one_rank_give_the_bits_of_a_plain_loop() -> None:
    data, reference = tiny.blobs(40), tiny.classifier()
    model = copy.deepcopy(reference)
    trainer = tiny.classifier_trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for start in (0, 16, 32):
        inputs, targets = data[start : start + 16]
        trainer.training_step((inputs, targets))
        optimizer.zero_grad()
        nn.functional.cross_entropy(reference(inputs), targets).backward()
        optimizer.step()
    assert torch.equal(tiny.weights(trainer), torch.cat([p.detach().flatten() for p in reference.parameters()]))


@pytest.mark.parametrize("data", [TensorDataset(*tiny.blobs(40).tensors), Stream()], ids=["dataset", "stream"])
def test_batches_that_the_loop_leaves_out_belong_to_their_epoch(data: Any) -> None:
    trainer, seen = tiny.classifier_trainer(batch=16), []
    assert len(list(trainer.loader(data))) == 3  # nothing is trained
    for _ in range(3):
        for batch in trainer.loader(data):
            if len(batch[0]) == 16:
                trainer.training_step(batch)
                seen.append(trainer.epoch)
    assert seen == [0, 0, 1, 1, 2, 2]


class Growing(Sampler[int]):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 16 * (self.epoch + 1)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


def test_a_checkpoint_after_the_last_step_of_an_epoch_that_grows_begins_with_the_next_one(tmp_path: Path) -> None:
    def data() -> DataLoader[Any]:
        return DataLoader(tiny.blobs(64), batch_size=8, sampler=Growing())

    trainer = tiny.classifier_trainer(batch=None)
    for number, batch in enumerate(trainer.loader(data()), start=1):
        trainer.training_step(batch)
        if number == 2:
            trainer.save_checkpoint(tmp_path / "saved")
            break
    resumed = tiny.classifier_trainer(batch=None)
    resumed.load_checkpoint(tmp_path / "saved")
    assert resumed.epoch == 1
    assert sum(1 for _ in resumed.loader(data())) == 4


def test_a_loader_whose_batches_are_not_trained_on_is_warned_about(capsys: Any) -> None:
    trainer = tiny.classifier_trainer()
    for _ in trainer.loader(tiny.blobs(32)):
        pass
    assert "yields the same epoch again" in capsys.readouterr().out


def test_a_trainer_that_is_garbage_collected_under_a_fake_mode_writes_its_records(tmp_path: Path) -> None:
    trainer = tiny.classifier_trainer(run=tmp_path, log_every=100)
    for batch in trainer.loader(tiny.blobs(32)):
        trainer.training_step(batch)
    trainer.itself = trainer  # type: ignore[attr-defined]  # only the garbage collector can free it
    del trainer
    with FakeTensorMode():  # as while the FLOPs of another model are counted
        gc.collect()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    assert all(math.isfinite(record["loss"]) for record in records)
