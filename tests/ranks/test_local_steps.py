"""DynamicDDP that train by themselves between rounds (`sync: {every: …}`), against loops written by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline
import tiny
from paceline import dist
from paceline.errors import PacelineError
from paceline.parallel.shards import local_shard
from worlds import ranks

Build = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def regression(samples: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :2].sin() + inputs[:, 2:4])


def trainer_for(model: nn.Module, build: Build, sync: Any, **settings: Any) -> paceline.Trainer:
    defaults = {"batch": 8, "precision": "fp64", "shuffle": False, "run": False, "quiet": True}
    return paceline.Trainer(model, build(model.parameters()), sync=sync, **{**defaults, **settings})


def double_classifier() -> nn.Module:
    return tiny.classifier().double()


def full_weights(trainer: paceline.Trainer) -> dict[str, Tensor]:
    """The weights of this replica that this rank has a part of."""
    named = trainer.model.named_parameters()
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for name, p in named}


def require_close(found: dict[str, Tensor], expected: nn.Module, tolerance: float) -> None:
    for name, weight in found.items():
        assert (weight - expected.get_parameter(name)).abs().max() < tolerance, name


def diloco(
    model: nn.Module,
    build: Build,
    loss: Callable[[nn.Module, slice], Tensor],
    *,
    replicas: int,
    steps: int,
    every: int,
    warmup: int = 0,
    lr: float = 0.7,
    momentum: float = 0.9,
    clip: float | None = None,
    batch: int = 8,
) -> nn.Module:
    """DiLoCo as its paper describes it, all replicas in this process."""
    models = [copy.deepcopy(model) for _ in range(replicas)]
    inner = [build(each.parameters()) for each in models]
    outer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=True)
    own = batch // replicas
    for step in range(steps):
        for number, (each, optimizer) in enumerate(zip(models, inner, strict=True)):
            start = step * batch + number * own
            window = slice(step * batch, (step + 1) * batch) if step < warmup else slice(start, start + own)
            optimizer.zero_grad()
            loss(each, window).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(each.parameters(), clip)
            optimizer.step()
        if step + 1 == warmup:
            model.load_state_dict(models[0].state_dict())
        elif step >= warmup and (step + 1 - warmup) % every == 0:
            for parts in zip(model.parameters(), *(each.parameters() for each in models), strict=True):
                parts[0].grad = parts[0].detach() - torch.stack([part.detach() for part in parts[1:]]).mean(0)
            outer.step()
            for each in models:
                each.load_state_dict(model.state_dict())
    return model


@ranks(2)
def test_averaging_after_every_step_of_sgd_equals_synchronous_training() -> None:
    def error(model: nn.Module, batch: Any) -> Tensor:  # a mean that does not show what it was divided by
        return (model(batch[0]) - batch[1]).square().sum(1).sqrt().sum() / len(batch[0])

    kinds: list[dict[str, Any]] = [{"criterion": nn.MSELoss()}, {"loss_fn": error}]
    for kind in kinds:
        for accumulate in (1, 2):
            found = []
            for sync in (None, {"every": 1, "outer": "average"}):
                settings = {"batch": 5, "accumulate": accumulate, **kind}  # one replica has a sample more
                trainer = trainer_for(double_classifier(), sgd, sync, **settings)
                history = trainer.train(regression(), max_steps=6)
                found.append((tiny.weights(trainer), [record["loss"] for record in history.steps]))
            assert (found[0][0] - found[1][0]).abs().max() < 1e-12
            assert found[0][1] == pytest.approx(found[1][1], abs=1e-12)


@ranks(2)
def test_diloco_equals_a_loop_written_by_hand() -> None:
    data, sync = regression(), {"every": 3, "warmup": 2, "outer": {"name": "nesterov", "lr": 0.6, "momentum": 0.8}}
    inputs, targets = data.tensors
    trainer = trainer_for(double_classifier(), adamw, sync, criterion=nn.MSELoss(), clip_norm=0.5, log_every=4)
    spreads = trainer.train(data, max_steps=5).steps
    assert 0 < spreads[-1]["replica_spread"] < 1

    def loss(model: nn.Module, window: slice) -> Tensor:
        return functional.mse_loss(model(inputs[window]), targets[window])

    hyper = {"every": 3, "warmup": 2, "lr": 0.6, "momentum": 0.8, "clip": 0.5}
    require_close(full_weights(trainer), diloco(double_classifier(), adamw, loss, replicas=2, steps=5, **hyper), 1e-10)


@pytest.mark.nightly  # tests/ranks/test_local_state.py resumes such replicas
@ranks(4)
def test_replicas_of_shards_equal_a_loop_written_by_hand() -> None:
    data = tiny.Sequences(48)

    def loss(model: nn.Module, window: slice) -> Tensor:
        result: Tensor = model(**data[window])["loss"]
        return result

    sync = {"every": 2, "warmup": 1, "outer": {"name": "nesterov"}}
    initial = copy.deepcopy(tiny.gpt_trainer(sync=None, strategy="ddp", batch=8).model)
    expected = diloco(initial, sgd, loss, replicas=2, steps=5, every=2, warmup=1, clip=0.1)
    for layout in ({"replicate": 2, "shard": 2}, {"replicate": 2, "tensor": 2}, {"replicate": 2, "pipeline": 2}):
        trainer = tiny.gpt_trainer(sync=sync, layout=layout, clip_norm=0.1, batch=8, shuffle=False)
        trainer.train(data, max_steps=5)
        require_close(full_weights(trainer), expected, 1e-10)


@ranks(2)
def test_the_warm_up_equals_synchronous_training() -> None:
    found = []
    for sync in (None, {"every": 9, "warmup": 4, "compress": "int8"}):
        settings = tiny.recipe("padded-gpt", precision="fp64", batch=6, accumulate=2, clip_norm=0.1, sync=sync)
        trainer = paceline.Trainer.from_config(paceline.Config.from_dict(settings))
        trainer.train(max_steps=4)
        found.append(tiny.weights(trainer))
    assert (found[0] - found[1]).abs().max() < 1e-12


@ranks(2)
def test_replicas_with_other_numbers_of_tokens_count_by_their_samples() -> None:
    data = tiny.Phrases(12, 16, padded=True)
    settings = tiny.recipe("padded-gpt", precision="fp64", batch=3, shuffle=False, sync={"every": 1})
    trainer = paceline.Trainer.from_config(paceline.Config.from_dict(settings))
    reference = copy.deepcopy(trainer.model)
    trainer.train(data, max_steps=1)
    for part, share in ((slice(0, 1), 1 / 3), (slice(1, 3), 2 / 3)):  # of the samples of each replica
        samples = [data[index] for index in range(3)[part]]
        batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
        loss = reference(**batch)
        (share * loss.sum / loss.weight).backward()
    sgd(reference.parameters()).step()
    require_close(full_weights(trainer), reference, 1e-12)


@ranks(2)
def test_a_step_between_rounds_makes_no_collective() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)).double()
    trainer = trainer_for(model, adamw, {"every": 4}, criterion=nn.MSELoss(), clip_norm=1.0, log_every=100)
    counts = []
    for batch in trainer.loader(regression(80)):
        trainer.training_step(batch)
        counts.append(torch_dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]
    exchanged = [after > before for before, after in pairwise(counts[1:])]
    assert exchanged == [step % 4 == 0 for step in range(3, 11)]


@ranks(2)
def test_replicas_hold_the_same_bits_after_a_round() -> None:
    for outer in ("average", "nesterov"):
        for compress in (None, "bf16", "fp16", "int8"):
            sync = {"every": 3, "outer": {"name": outer}, "compress": compress}
            trainer = tiny.classifier_trainer(sync=sync)
            trainer.train(tiny.blobs(), max_steps=3)
            both = dist.all_gather_object(tiny.weights(trainer).tolist())
            assert both[0] == both[1]
            if compress is None:
                exact = tiny.weights(trainer)
            else:
                assert 0 < (tiny.weights(trainer) - exact).abs().max() < 1e-3


@ranks(2)
def test_error_feedback_keeps_what_rounding_took() -> None:
    means = {}
    for compress in (None, "int8"):
        trainer = tiny.classifier_trainer(sync={"every": 1, "compress": compress}, optimizer={"name": "sgd", "lr": 0.1})
        trainer.train(tiny.blobs(), max_steps=12)
        means[compress] = tiny.weights(trainer)
    assert (means["int8"] - means[None]).abs().max() < 1e-4


@ranks(2)
def test_training_that_ends_between_rounds_returns_the_mean_of_all_replicas() -> None:
    own: list[Tensor] = []

    class Keep:
        def on_step(self, step: Any) -> None:
            own.append(tiny.weights(trainer).clone())

    trainer = trainer_for(
        double_classifier(), adamw, {"every": 10}, criterion=nn.MSELoss(), callbacks=[Keep()], log_every=1
    )
    trainer.train(regression(), max_steps=2)
    both = torch.tensor(dist.all_gather_object(own[-1].tolist()), dtype=torch.float64)
    assert (both[0] - both[1]).abs().max() > 1e-3
    assert torch.equal(tiny.weights(trainer), both.mean(0))


@ranks(2)
def test_running_statistics_are_averaged_in_a_round() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)).double()
    seen: list[Tensor] = []
    model[1].register_forward_hook(lambda *call: seen.append(model[1].running_mean.clone()))
    trainer_for(model, adamw, {"every": 2}, criterion=nn.MSELoss()).train(regression(), max_steps=2)
    before = torch.tensor(dist.all_gather_object(seen[-1].tolist()), dtype=torch.float64)
    assert (before[0] - before[1]).abs().max() > 1e-3  # each replica has its own
    assert torch.allclose(model[1].running_mean, before.mean(0), atol=1e-15)
    assert model[1].num_batches_tracked == 2


@ranks(2)
def test_a_non_finite_loss_of_one_replica_ends_the_run_on_all() -> None:
    data = regression()
    data.tensors[0][21] = float("nan")  # step 3, the second replica
    trainer = trainer_for(double_classifier(), adamw, {"every": 4}, criterion=nn.MSELoss(), log_every=4)
    with pytest.raises(PacelineError, match="Non-finite loss at step 3 on rank 1"):
        trainer.train(data, max_steps=5)


@ranks(2)
def test_an_overflow_of_one_replica_skips_its_step_only() -> None:
    data, stepped = tiny.blobs(), []
    data.tensors[0][12] = 4e3  # in the first step, of the second replica

    class Look:
        def on_step(self, step: Any) -> None:
            stepped.append(not torch.equal(tiny.weights(trainer), before))

    trainer = tiny.classifier_trainer(
        sync={"every": 10},
        precision="fp16",
        scaler={"initial": 1024},
        shuffle=False,
        callbacks=[Look()],
        loss_fn=summed,
    )
    before = tiny.weights(trainer).clone()
    assert trainer.train(data, max_steps=1).steps[0]["skipped"]
    assert stepped == [dist.rank() == 0]


@ranks(2)
def test_a_skipped_step_of_one_replica_leaves_all_with_the_same_learning_rate() -> None:
    data, model = regression(), double_classifier()
    data.tensors[0][13] = float("nan")  # step 2, the second replica
    optimizer = sgd(model.parameters())
    trainer = paceline.Trainer(
        model,
        optimizer,
        criterion=nn.MSELoss(),
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        scheduler_interval="step",
        sync={"every": 2},
        nonfinite="skip",
        batch=8,
        precision="fp64",
        shuffle=False,
        run=False,
        quiet=True,
    )
    assert trainer.train(data, max_steps=3).steps[1]["skipped"]
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3


def summed(model: nn.Module, batch: Any) -> Tensor:
    """Finite, with gradients that overflow in float16 for large inputs."""
    result: Tensor = model(batch[0]).float().sum(1).mean()
    return result


@ranks(2)
def test_a_difference_that_a_round_leaves_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = double_classifier()
    model[2].bias.requires_grad_(False)

    class Drift:
        def on_step(self, step: Any) -> None:
            if dist.rank() == 1 and step.step == 1:
                model[2].bias.data[0] += 1e-6  # autograd does not see it

    sync = {"every": 2, "warmup": 1}
    trainer = trainer_for(model, adamw, sync, criterion=nn.MSELoss(), callbacks=[Drift()], log_every=4)
    with pytest.raises(PacelineError, match="After the last round before step 4, replicas had different weights"):
        trainer.train(regression(), max_steps=8)


@ranks(2)
def test_unfrozen_parameters_join_the_next_round() -> None:
    model = double_classifier()
    model[0].requires_grad_(False)

    class Unfreeze:
        def on_step(self, step: Any) -> None:
            model[0].requires_grad_(step.step >= 3)

    sync = {"every": 2, "outer": {"name": "nesterov"}}
    trainer = trainer_for(model, adamw, sync, criterion=nn.MSELoss(), callbacks=[Unfreeze()])
    start = local_shard(model[0].weight).detach().clone()
    trainer.train(regression(), max_steps=6)
    both = dist.all_gather_object(tiny.weights(trainer).tolist())
    assert both[0] == both[1] and not torch.equal(start, model[0].weight)


@ranks(2)
def test_one_replica_is_refused() -> None:
    with pytest.raises(PacelineError) as caught:
        tiny.classifier_trainer(sync={"every": 5}, strategy="fsdp")
    assert caught.value.code == "layout.every-and-fsdp" and "hsdp" in caught.value.fix
