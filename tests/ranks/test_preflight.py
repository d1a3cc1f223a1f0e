"""Before the first step: ranks that do not mean the same thing are named."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, Subset, random_split

import paceline
import tiny
from heard import heard
from paceline import dist, testing
from paceline.errors import PacelineError
from paceline.train.checks import preflight
from samples import sample
from worlds import launch, ranks


def code_of(work: Any) -> tuple[str, str]:
    with pytest.raises(PacelineError) as caught:
        work()
    return caught.value.code, str(caught.value)


@ranks(3)
def test_a_replica_with_other_weights_is_named_with_its_parameter() -> None:
    trainer = tiny.classifier_trainer()
    if dist.rank() == 1:
        with torch.no_grad():
            trainer.model[2].bias[0] += 1e-6
    code, text = code_of(lambda: trainer.train(tiny.blobs(), max_steps=1))
    assert code == "world.different-weights"
    assert "2.bias" in text and "ranks 0, 2" in text and "rank 1" in text and "0.weight" not in text


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_another_model_on_a_rank_is_named_with_the_first_difference(strategy: str) -> None:
    @ranks(2)
    def body() -> None:
        width = 8 + dist.rank()
        model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))
        code, text = code_of(lambda: tiny.classifier_trainer(model, strategy=strategy))
        assert code == "world.different-models" and "rank 1: parameter 0.weight: 9×8, float32" in text

    body()


@ranks(2)
def test_another_module_or_optimizer_on_a_rank_is_named() -> None:
    main = dist.rank() == 0
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU() if main else nn.GELU(), nn.Linear(8, 2))
    code, text = code_of(lambda: tiny.classifier_trainer(model))
    assert code == "world.different-models" and "rank 1: module 1: GELU" in text
    model = tiny.classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if main else 0.2)
    code, text = code_of(lambda: tiny.classifier_trainer(model, optimizer=optimizer))
    assert code == "world.different-models" and "group 0" in text and "lr=0.2" in text


@ranks(2)
def test_batches_of_another_structure_are_named() -> None:
    first = 8 * dist.rank()
    inputs, targets = tiny.blobs()[first : first + 8]
    batch = (inputs, targets[:, None] if dist.rank() else targets)
    code, text = code_of(lambda: tiny.classifier_trainer().training_step(batch))
    assert code == "data.different-structure" and "rank 1: batch[1]: tensor with 2 dims, int64" in text


@ranks(2)
def test_the_same_batch_on_two_ranks_is_found() -> None:
    trainer = tiny.classifier_trainer()
    code, text = code_of(lambda: trainer.training_step(tiny.blobs()[:8]))
    assert code == "data.same-samples" and "Ranks 0 and 1" in text


@ranks(2)
def test_batches_of_each_ranks_own_pass() -> None:
    trainer = tiny.classifier_trainer()
    first = 8 * dist.rank()
    assert trainer.training_step(tiny.blobs()[first : first + 8]).stepped


@ranks(2)
def test_a_random_split_without_a_seed_is_found() -> None:
    torch.manual_seed(dist.rank())
    part, _ = random_split(tiny.blobs(), [32, 16])
    code, text = code_of(lambda: tiny.classifier_trainer().train(part, max_steps=1))
    assert code == "data.different-data" and "Subset" in text


@ranks(2)
def test_ready_batches_that_differ_between_ranks_are_found() -> None:
    batches = [tiny.blobs(16, first=dist.rank())[:]]
    assert code_of(lambda: tiny.classifier_trainer().train(batches, max_steps=1))[0] == "data.different-data"


@ranks(2)
def test_another_version_on_a_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    if dist.rank() == 1:
        monkeypatch.setattr(torch, "__version__", "2.12.9")
    code, text = code_of(lambda: tiny.classifier_trainer().train(tiny.blobs(), max_steps=1))
    assert code == "world.different-versions" and "2.12.9" in text and "rank 1" in text


class Spare(nn.Module):
    """Has a layer that its loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.used(inputs)
        return outputs


@ranks(2)
def test_an_unused_parameter_is_an_error_that_names_it_and_says_what_to_set() -> None:
    code, text = code_of(lambda: tiny.classifier_trainer(Spare()).train(tiny.blobs(), max_steps=1))
    assert code == "train.unused-parameters"
    assert "spare.weight, spare.bias" in text and "Linear" in text and 'unused_parameters="allow"' in text


@ranks(2)
def test_an_unused_parameter_can_be_allowed() -> None:
    torch.manual_seed(0)
    trainer = tiny.classifier_trainer(Spare(), unused_parameters="allow")
    before = trainer.model.spare.weight.clone()
    history = trainer.train(tiny.blobs(), epochs=2)
    assert history.losses[-1] < history.losses[0]
    assert torch.equal(trainer.model.spare.weight, before)


def test_on_one_rank_an_unused_parameter_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    tiny.classifier_trainer(Spare()).train(tiny.blobs(), max_steps=1)
    assert "does not depend on spare.weight, spare.bias" in capsys.readouterr().out


class Restless(nn.Module):
    """Draws, counts in a buffer and has a batch norm: everything that a pre-flight has to put back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.register_buffer("forwards", torch.tensor(0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


def restless() -> Restless:
    torch.manual_seed(5)
    return Restless()


@pytest.mark.parametrize("world", [1, 2])
def test_a_preflight_leaves_no_trace(world: int) -> None:
    @ranks(world)
    def body() -> None:
        trained = []
        for checked in (True, False):
            trainer = tiny.classifier_trainer(restless(), preflight=checked)
            trainer.train(tiny.blobs(), epochs=1)
            assert trainer.model.forwards == 3
            trained.append(torch.cat([t.flatten().double() for t in trainer.model.state_dict().values()]))
        assert torch.equal(*trained)

    body()


def test_buffers_that_a_forward_replaces_are_put_back() -> None:
    class Replacing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 2)
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("wide", torch.zeros(1).expand(3))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            outputs: torch.Tensor = self.layer(inputs)
            return outputs

    trainer = tiny.classifier_trainer(Replacing())
    trainer.train(tiny.blobs(), epochs=1)
    assert trainer.model.count == 3


def test_the_nominal_weight_is_a_power_of_two_near_the_real_one() -> None:
    assert [preflight.nominal(weight, 1) for weight in (0.0, 1.0, 3.0, 1000.0)] == [1.0, 1.0, 4.0, 1024.0]
    assert preflight.nominal(1000.0, 3) == 2048.0 or preflight.nominal(1000.0, 3) == 4096.0


@ranks(2)
def test_without_preflight_nothing_is_compared() -> None:
    trainer = tiny.classifier_trainer(preflight=False)
    assert len(trainer.train(Subset(tiny.blobs(), range(dist.rank(), 32 + dist.rank())), epochs=1).steps) == 2


def sampled(data: Any, replicas: int, rank: int) -> DataLoader[Any]:
    return DataLoader(data, batch_size=8, sampler=DistributedSampler(data, replicas, rank, shuffle=False))


@pytest.mark.parametrize("strategy", ["tp", "pp"])
def test_ranks_of_one_replica_must_not_get_different_samples(strategy: str) -> None:
    @ranks(2)
    def body() -> None:
        data, rank = tiny.Sequences(24), dist.rank()
        train = tiny.gpt_trainer(strategy=strategy).train
        assert code_of(lambda: train(sampled(data, 2, rank), max_steps=1))[0] == "data.wrong-sampler"
        step = tiny.gpt_trainer(strategy=strategy, batch=8).training_step
        assert code_of(lambda: step(data[rank * 4 : rank * 4 + 4]))[0] == "layout.different-batches"

    body()


def losses_of_the_same_samples(strategy: str) -> list[float]:
    data = tiny.Sequences(24)
    trained = tiny.gpt_trainer(strategy=strategy).train(sampled(data, 1, 0), max_steps=2).losses
    return [*trained, float(tiny.gpt_trainer(strategy=strategy, batch=8).training_step(data[:8]).loss)]


@pytest.mark.parametrize("strategy", ["tp", "pp"])
def test_ranks_of_one_replica_may_get_the_same_samples_from_a_sampler_or_as_a_batch(strategy: str) -> None:
    one = tiny.gpt_trainer(batch=8, shuffle=False).train(tiny.Sequences(24), max_steps=2).losses
    found = launch(losses_of_the_same_samples, ranks=2, strategy=strategy)
    assert found == pytest.approx([*one, one[0]], rel=1e-9)


class ColumnsOnly(nn.Module):
    """Takes a mean over what a column-parallel layer leaves distributed over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (torch.tanh(self.a(inputs)).mean(-1) - targets).square().mean()


@ranks(2)
def test_a_tensor_plan_that_changes_the_loss_is_found_before_the_first_step() -> None:
    torch.manual_seed(0)
    plan = {"plan": {"a": "column"}}
    trainer = tiny.classifier_trainer(ColumnsOnly(), strategy="tp", tensor=plan, criterion=None, loss_fn=None)
    code, _ = code_of(lambda: trainer.train(tiny.blobs(), max_steps=1))
    assert code == "layout.tensor-plan-changes-loss"


class InPlace(nn.Module):
    """Changes the output of a block in place, which autograd can't follow once the block is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs[:, None].expand(-1, 3, -1)
        for block in self.blocks:
            after = block(hidden)
            after += hidden
            hidden = after
        return hidden.mean(1)


@ranks(2)
def test_a_sharded_block_whose_output_changes_in_place_has_a_code() -> None:
    warnings.simplefilter("ignore")  # torch warns of it, of which a user sees one line among many
    trainer = tiny.classifier_trainer(InPlace(), strategy="fsdp")
    assert code_of(lambda: trainer.train(tiny.blobs(), max_steps=1))[0] == "layout.changed-in-place"


class Sometimes(nn.Module):
    """Runs its second layer only for batches that need it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.first(inputs)
        return outputs + self.second(inputs) if inputs[0, 0] > 0 else outputs


@testing.ranks(2)  # rank 0 learns of the end of rank 1 by the end of its process
def test_a_parameter_that_a_later_batch_of_one_rank_does_not_use_is_named_before_ranks_mix_messages() -> None:
    inputs = torch.ones(16, 8)
    inputs[12:] = -1  # the last batch of rank 1
    data = torch.utils.data.TensorDataset(inputs, torch.zeros(16, dtype=torch.long))
    trainer = tiny.classifier_trainer(Sometimes(), batch=8, shuffle=False, log_every=1)
    if dist.rank() == 1:
        code, text = code_of(lambda: trainer.train(data, epochs=1))
        assert code == "train.unused-parameters" and "second.weight, second.bias" in text
    else:  # it waits for the gradients of the other rank, which has ended
        with pytest.raises(Exception, match="onnection"):
            trainer.train(data, epochs=1)
        os._exit(0)


@testing.ranks(2)  # what gradients leave in memory depends on what a process did before
def test_every_parameter_that_all_micro_batches_use_counts_as_used() -> None:
    """An earlier gradient may have had the address and the version of the view of a bucket that takes its place."""
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    for _ in range(sample(8, 15)):  # a third of such trainings met one
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        trainer = paceline.Trainer(model, criterion=nn.MSELoss(), batch=64, accumulate=8, quiet=True, run=False)
        assert len(trainer.train(data, epochs=1).steps) == 4


class DrawsOnSecondRank(nn.Linear):
    """Draws noise, and leaves a part of its dropout to torch on rank 1."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(functional.dropout(x, 0.1) + torch.randn_like(x))
        return x + functional.dropout(x.new_ones(7), 0.1).sum() if dist.rank() == 1 else x


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_random_numbers_of_any_rank_are_warned_about_with_their_line(strategy: str) -> None:
    @ranks(2)
    def body() -> None:
        torch.manual_seed(0)
        trainer = tiny.classifier_trainer(nn.Sequential(DrawsOnSecondRank(8, 8), nn.Linear(8, 2)), strategy=strategy)
        with heard() as lines:
            trainer.train(tiny.blobs(), max_steps=2)
        found = [line for line in lines if line.startswith("random numbers:")]
        assert len(found) == (dist.rank() == 0)
        for line in found:
            assert "randn_like of shape (" in line and "dropout of shape (7,)" in line and "test_preflight.py:" in line

    body()


class Count:
    """Of the forwards. A snapshot leaves alone what has a lock."""

    def __init__(self) -> None:
        self.lock, self.number = threading.Lock(), 0


class Counted(nn.Module):
    def __init__(self, change: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.count, self.kept, self._change = tiny.classifier(), Count(), None, change

    def forward(self, inputs: Tensor) -> Tensor:
        self.count.number += 1
        outputs: Tensor = self.net(self._change(self, inputs))
        return outputs


def keep(model: Any, inputs: Tensor) -> Tensor:
    model.kept = inputs.mean()
    return inputs


def with_noise_in_training(model: Any, inputs: Tensor) -> Tensor:
    return inputs + torch.randn_like(inputs) if model.training else inputs


# The trial, the loss of the batch, and those of its halves.
FORWARDS: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {
    "plain": (lambda model, inputs: inputs, 1 + 3),
    "dropout": (lambda model, inputs: functional.dropout(inputs, 0.1, model.training), 1 + 3),
    "a cache": (keep, 1 + 2 + 3),
    "draws without effect": (lambda model, inputs: inputs + 0 * torch.randn_like(inputs), 1 + 9 + 3),
    "noise in training": (with_noise_in_training, 1 + 9 + 3),
    "noise": (lambda model, inputs: inputs + torch.randn_like(inputs), 1 + 9 + 3 + 1),  # once more, if random in eval
}


def without_divisor(model: Any, batch: Any) -> Tensor:
    losses = (model(batch[0])[:, 0] - batch[1]).square()
    return losses.sum() * (1.0 / len(losses))


def forwards(change: Callable[[Any, Tensor], Tensor], **settings: Any) -> int:
    model = Counted(change)
    tiny.classifier_trainer(model, **settings).train(tiny.blobs(), max_steps=1)
    return model.count.number - 1


@ranks(2)
def test_the_checks_before_the_first_step_take_few_forwards() -> None:
    for strategy in ("ddp", "fsdp"):
        taken = {name: forwards(change, strategy=strategy) for name, (change, _) in FORWARDS.items()}
        assert taken == {name: number for name, (_, number) in FORWARDS.items()}
    # DDP is built for a weight in its buckets, which needs another trial without it.
    assert forwards(FORWARDS["plain"][0], loss_fn=without_divisor) == 4 + 1
