from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import tiny
from paceline import Loss
from paceline.parallel.dynamic_ddp import WeightInBucket
from worlds import ranks


def summed(weights: list[float], nominal: float, dtype: torch.dtype = torch.float32) -> float | None:
    """The sum that ranks with these weights see, after an average as DDP computes it."""
    carried = WeightInBucket.for_buckets_of([nn.Parameter(torch.zeros(1, dtype=dtype))], len(weights))
    assert carried is not None
    average = torch.zeros_like(carried.slot)
    for weight in weights:
        average = average + carried.gradient(weight, nominal) * (1 / len(weights))
    carried.slot.grad = average.detach()
    return carried.total()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("world", [2, 3, 7, 24, 64])
def test_counts_have_an_exact_sum_on_any_number_of_ranks(world: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(world)
    for most in (2, 4095, 2**20 + 1, 2**31 - 1):
        for nominal in (1.0, float(most), float(world * most)):
            if most > 4000 * nominal:
                continue
            weights = torch.randint(most - most // 2, most, (world,), generator=generator).tolist()
            assert summed(list(map(float, weights)), nominal, dtype) == sum(weights)
    assert summed([4095.0] * world, 4096.0, dtype) == 4095 * world


def test_fractions_lose_less_than_gradients_do() -> None:
    weights = [0.1, 1 / 3, 1e-4]
    assert summed(weights, 0.5) == pytest.approx(math.fsum(weights), rel=1e-10)
    assert summed(weights, 0.5, torch.float64) == pytest.approx(math.fsum(weights), rel=1e-15)


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, 1e12, 1e300])
def test_a_weight_that_digits_cannot_express_is_seen_by_every_rank(weight: float) -> None:
    assert summed([3.0, weight, 5.0], 8.0) is None


def test_halves_and_too_many_ranks_are_not_carried() -> None:
    single, half = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    assert WeightInBucket.for_buckets_of([half], 2) is None
    assert WeightInBucket.for_buckets_of([half, single], 2) is not None
    assert WeightInBucket.for_buckets_of([single], 25) is None
    assert WeightInBucket.for_buckets_of([single.requires_grad_(False)], 2) is None


def masked(model: Any, batch: Any, scale: float = 1.0) -> Loss:
    inputs, targets = batch
    kept = inputs[:, 2] > -0.5
    return Loss(cross_entropy(model(inputs), targets, reduction="none")[kept].sum() * scale, kept.sum() * scale)


def trained(monkeypatch: Any, **settings: Any) -> tuple[Tensor, list[Tensor]]:
    """The weights, and what was all-reduced beside gradients after the pre-flight."""
    reduced: list[Tensor] = []
    all_reduce = torch_dist.all_reduce

    def recorded(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        reduced.append(tensor)
        return all_reduce(tensor, *arguments, **options)

    monkeypatch.setattr(torch_dist, "all_reduce", recorded)
    trainer = tiny.classifier_trainer(loss_fn=masked, log_every=100, **settings)
    names = set(trainer.model.state_dict())
    trainer.train(tiny.blobs(), max_steps=1)
    reduced.clear()
    trainer.train(tiny.blobs(), max_steps=6)
    sizes = [tensor for tensor in reduced if tensor.dtype == torch.float64 and tensor.numel() == 1]
    assert set(trainer.model.state_dict()) == names and len(list(trainer.model.parameters())) == 4
    monkeypatch.undo()
    return tiny.weights(trainer), sizes


@ranks(3)
def test_weights_ride_with_the_gradients_and_give_the_result_of_their_own_all_reduce(monkeypatch: Any) -> None:
    for settings in ({}, {"accumulate": 2, "batch": 12}, {"precision": "fp64"}):
        weights, reduced = trained(monkeypatch, **settings)
        assert reduced == []
        expected, reduced = trained(monkeypatch, unused_parameters="allow", **settings)
        assert len(reduced) == 5
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7)


@ranks(2)
def test_weights_out_of_the_range_of_digits_are_reduced_alone(monkeypatch: Any) -> None:
    def growing(model: Any, batch: Any) -> Loss:
        growing.calls += 1
        return masked(model, batch, scale=1.0 if growing.calls < 8 else 1e9)

    growing.calls = 0
    trainer = tiny.classifier_trainer(loss_fn=growing)
    trainer.train(tiny.blobs(), max_steps=12)
    assert torch.isfinite(tiny.weights(trainer)).all()
    plain = tiny.classifier_trainer(loss_fn=masked)
    plain.train(tiny.blobs(), max_steps=12)
    torch.testing.assert_close(tiny.weights(trainer), tiny.weights(plain), rtol=1e-5, atol=1e-6)


@ranks(2)
def test_layers_frozen_during_training_leave_the_weight_in_place() -> None:
    results = []
    for settings in ({}, {"unused_parameters": "allow"}):
        trainer = tiny.classifier_trainer(loss_fn=masked, **settings)
        for step, frozen in enumerate((False, True, False, True, False, True), start=1):
            trainer.model[0].requires_grad_(not frozen)
            trainer.train(tiny.blobs(), max_steps=2 * step)
        results.append(tiny.weights(trainer))
    assert torch.equal(*results)


@ranks(2)
def test_a_custom_loop_may_reduce_several_backwards_of_a_step() -> None:
    results = []
    for settings in ({}, {"unused_parameters": "allow"}):
        trainer = tiny.classifier_trainer(loss_fn=masked, **settings)
        for number, batch in enumerate(trainer.loader(tiny.blobs())):
            trainer.backward(trainer.forward(batch))
            if number % 2:
                trainer.step()
        results.append(tiny.weights(trainer))
    assert torch.equal(*results)
