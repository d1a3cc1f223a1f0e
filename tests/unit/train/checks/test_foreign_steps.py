"""Steps and gradients that do not come from the Trainer."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import paceline
import tiny
from paceline.errors import TrainError
from paceline.parallel.dynamic_ddp import marks_of
from worlds import ranks

SGD = {"name": "sgd", "lr": 0.1}


def batches() -> list[Any]:
    return [tiny.blobs()[start : start + 16] for start in (0, 16, 32)]


def plain_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def by_hand(model: nn.Module) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        optimizer.zero_grad()
        plain_loss(model, batch).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_gradients_left_in_the_parameters_do_not_enter_a_step(capsys: Any) -> None:
    expected = by_hand(tiny.classifier())
    whole, parts = tiny.classifier_trainer(optimizer=SGD), tiny.classifier_trainer(optimizer=SGD)
    for batch in batches():
        plain_loss(whole.model, tiny.blobs()[:5]).backward()
        whole.training_step(batch)
    for batch in batches():
        plain_loss(parts.model, tiny.blobs()[:5]).backward()
        parts.backward(parts.forward(batch))
        parts.step()
    assert torch.equal(tiny.weights(whole), expected) and torch.equal(tiny.weights(parts), expected)
    assert capsys.readouterr().out.count("a backward outside the Trainer") == 2


def test_gradients_of_a_callback_do_not_enter_the_next_step() -> None:
    class Probe:
        def on_start(self, record: Any) -> None:
            plain_loss(trainer.model, tiny.blobs()[:5]).backward()

        on_step = on_log = on_epoch = on_evaluate = on_start

    plain = tiny.classifier_trainer()
    plain.train(tiny.blobs(), tiny.blobs(8), epochs=2)
    trainer = tiny.classifier_trainer(callbacks=[Probe()], log_every=2)
    plain_loss(trainer.model, tiny.blobs()[:5]).backward()
    trainer.train(tiny.blobs(), tiny.blobs(8), epochs=2)
    assert torch.equal(tiny.weights(trainer), tiny.weights(plain))


def test_gradients_of_a_callback_after_an_epoch_of_unknown_length_do_not_enter_the_next_step() -> None:
    class Probe:
        def on_epoch(self, record: Any) -> None:
            plain_loss(trainer.model, tiny.blobs()[:5]).backward()

    def batches() -> Any:
        return iter([tiny.blobs()[:8], tiny.blobs()[8:16]])

    class Batches:
        __iter__ = staticmethod(batches)

    plain = tiny.classifier_trainer(batch=None)
    plain.train(Batches(), epochs=3)
    trainer = tiny.classifier_trainer(callbacks=[Probe()], batch=None)
    trainer.train(Batches(), epochs=3)
    assert torch.equal(tiny.weights(trainer), tiny.weights(plain))


@ranks(2)
def test_a_step_beside_the_trainer_has_a_code() -> None:
    model = tiny.classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = tiny.classifier_trainer(model, optimizer=optimizer)
    with pytest.raises(TrainError) as caught:
        for batch in trainer.loader(tiny.blobs()):
            plain_loss(model, batch).backward()
            optimizer.step()
    assert caught.value.code == "train.foreign-step"
    for batch in trainer.loader(tiny.blobs()):
        trainer.training_step(batch)
    again = tiny.classifier_trainer(model, optimizer=optimizer)  # both may step it
    for each in (trainer, again):
        each.train(tiny.blobs(), max_steps=each.step_count + 2)
    del trainer, again, each
    gc.collect()
    optimizer.step()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_scalers_schedulers_and_averages_step_on_several_ranks(strategy: str) -> None:
    @ranks(2)
    def body() -> None:
        model = tiny.classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        trainer = tiny.classifier_trainer(
            model,
            optimizer=optimizer,
            strategy=strategy,
            precision="fp16",
            ema=0.9,
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1),
            scheduler_interval="step",
        )
        trainer.train(tiny.blobs(), max_steps=3)
        assert trainer.step_count == 3

    body()


def test_a_step_after_zero_grad_has_a_code() -> None:
    trainer = tiny.classifier_trainer(accumulate=2)
    trainer.training_step(tiny.blobs()[:8])
    trainer.optimizer.zero_grad()
    with pytest.raises(TrainError) as caught:
        trainer.training_step(tiny.blobs()[8:16])
    assert caught.value.code == "train.gradients-cleared"
    trainer = tiny.classifier_trainer()
    trainer.backward(trainer.forward(tiny.blobs()[:8]))
    trainer.optimizer.zero_grad()
    with pytest.raises(TrainError) as caught:
        trainer.step()
    assert caught.value.code == "train.gradients-cleared"


@ranks(2)
def test_a_backward_of_ones_own_before_a_step_has_a_code() -> None:
    rank = paceline.dist.rank()
    trainer = tiny.classifier_trainer(optimizer=SGD)
    trainer.backward(trainer.forward(tiny.blobs()[8 * rank : 8 * rank + 8]))
    plain_loss(trainer.model, tiny.blobs()[8 * rank : 8 * rank + 4]).backward()
    with pytest.raises(TrainError) as caught:
        trainer.step()
    assert caught.value.code == "train.not-reduced"


def test_clipping_before_a_step_is_that_of_a_plain_loop_or_has_a_code() -> None:
    expected = tiny.classifier()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    trainer = tiny.classifier_trainer(optimizer=SGD)
    for batch in batches():
        optimizer.zero_grad()
        plain_loss(expected, batch).backward()
        nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        optimizer.step()
        trainer.backward(trainer.forward(batch))
        nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.1)
        trainer.step()
    assert torch.equal(tiny.weights(trainer), torch.cat([p.detach().flatten() for p in expected.parameters()]))
    summed = tiny.classifier_trainer(
        loss_fn=lambda model, batch: paceline.Loss(plain_loss(model, batch) * 11, 11), criterion=None
    )
    summed.backward(summed.forward(batches()[0]))
    nn.utils.clip_grad_norm_(summed.model.parameters(), 0.1)
    with pytest.raises(TrainError) as caught:
        summed.step()
    assert caught.value.code == "train.gradients-changed"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_clipping_before_a_step_on_several_ranks_is_that_of_one(strategy: str) -> None:
    model = tiny.classifier()
    one = tiny.classifier_trainer(copy.deepcopy(model), optimizer=SGD, strategy="single")
    for batch in batches():
        one.backward(one.forward(batch))
        nn.utils.clip_grad_norm_(one.model.parameters(), 0.1)
        one.step()
    expected = tiny.weights(one)

    @ranks(2)
    def body() -> None:
        rank = paceline.dist.rank()
        trainer = tiny.classifier_trainer(model, optimizer=SGD, strategy=strategy)
        for inputs, targets in batches():
            own = slice(8 * rank, 8 * rank + 8)
            trainer.backward(trainer.forward((inputs[own], targets[own])))
            nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.1)
            trainer.step()
        weights = trainer.state_dict()
        if rank == 0:
            assert torch.allclose(torch.cat([w.flatten() for w in weights.values()]), expected, rtol=1e-5, atol=1e-7)

    body()


def test_a_parameter_group_added_later_is_trained_and_saved(tmp_path: Any) -> None:
    class Thaw:
        def on_epoch(self, record: Any) -> None:
            if record.epoch == 0:
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})

    def plain(model: nn.Module) -> torch.Tensor:
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        for epoch in range(2):
            for batch in batches():
                model.zero_grad()
                plain_loss(model, batch).backward()
                nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.1)
                optimizer.step()
            if epoch == 0:
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    model = tiny.classifier()
    expected = plain(copy.deepcopy(model))
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    trainer = tiny.classifier_trainer(model, optimizer=optimizer, callbacks=[Thaw()], clip_norm=0.1, batch=None)
    trainer.train(batches(), epochs=2)
    assert torch.allclose(tiny.weights(trainer), expected, rtol=1e-5, atol=1e-7)
    trainer.save_checkpoint(tmp_path / "saved")


@ranks(2)
def test_a_parameter_group_added_to_sharded_parameters_has_a_code() -> None:
    model = tiny.classifier()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    trainer = tiny.classifier_trainer(model, optimizer=optimizer, strategy="fsdp", unused_parameters="allow")
    optimizer.add_param_group({"params": list(model[0].parameters())})
    with pytest.raises(TrainError) as caught:
        trainer.train(tiny.blobs(), max_steps=1)
    assert caught.value.code == "train.param-group-added"


def test_a_learning_rate_set_by_a_callback_counts_or_is_warned_about(capsys: Any) -> None:
    def lower(record: Any) -> None:
        for group in trainer.optimizer.param_groups:
            group["lr"] = 0.01

    trainer = tiny.classifier_trainer(optimizer=SGD, callbacks=[lower])
    assert [step["lr"] for step in trainer.train(tiny.blobs(), max_steps=3).steps] == [0.1, 0.01, 0.01]
    trainer = tiny.classifier_trainer(optimizer=SGD, schedule={"name": "linear"}, callbacks=[lower], quiet=True)
    trainer.train(tiny.blobs(), max_steps=3)
    assert capsys.readouterr().out.count("the schedule (linear) sets it before every step") == 1


def test_a_gradient_at_the_address_of_an_earlier_one_is_another() -> None:
    parameter, addresses = nn.Parameter(torch.zeros(3)), set()
    for _ in range(50):
        parameter.grad = torch.zeros(3)
        [mark] = marks_of([parameter])
        addresses.add(id(parameter.grad))
        parameter.grad = None
        parameter.grad = torch.zeros(3)
        assert not mark.holds_for(parameter.grad)
    assert len(addresses) < 50  # some were used again


def test_a_gradient_is_the_same_until_it_is_changed_in_place() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    [absent] = marks_of([parameter])
    assert absent.holds_for(None)
    parameter.sum().backward()
    [mark] = marks_of([parameter])
    assert mark.holds_for(parameter.grad) and not mark.holds_for(None) and not absent.holds_for(parameter.grad)
    parameter.sum().backward()
    assert not mark.holds_for(parameter.grad)
