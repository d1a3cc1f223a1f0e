"""The Trainer on several ranks: agreement, data, checkpoints, losses that depend on the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import paceline
import tiny
from paceline import dist
from paceline.errors import PacelineError
from worlds import ranks


def points(n: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def trainer(**changes: Any) -> paceline.Trainer:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"run": False, "quiet": True, "batch": 8, **changes}
    return paceline.Trainer(nn.Linear(3, 1), criterion=nn.MSELoss(), **settings)


@ranks(2)
def test_histories_and_weights_are_equal_on_every_rank() -> None:
    own = trainer(clip_norm=1.0)
    history = own.train(points(), points(10), epochs=2)
    assert dist.all_gather_object(history.to_json())[0] == history.to_json()
    weights = [torch.empty(1, 3) for _ in range(2)]
    dist.all_gather(weights, own.model.weight.detach())
    assert torch.equal(*weights)


@ranks(2)
def test_models_that_start_differently_take_rank_zeros_weights() -> None:
    torch.manual_seed(dist.rank())
    own = paceline.Trainer(nn.Linear(3, 1), criterion=nn.MSELoss(), run=False, quiet=True, batch=8)
    weights = [torch.empty(1, 3) for _ in range(2)]
    dist.all_gather(weights, own.model.weight.detach())
    assert torch.equal(*weights)


@ranks(2)
def test_ranks_that_disagree_on_the_recipe_are_named() -> None:
    with pytest.raises(PacelineError) as caught:
        trainer(seed=dist.rank(), batch=8 + dist.rank())
    assert caught.value.code == "world.different-recipes"
    assert "batch" in str(caught.value) and "rank 1: 9" in str(caught.value)


@ranks(2)
def test_single_in_a_world_of_two_is_refused() -> None:
    with pytest.raises(PacelineError) as caught:
        trainer(strategy="single")
    assert caught.value.code == "config.single-in-a-world"


class Seen(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Recording(nn.Module):
    """Notes which samples passed through it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: list[float] = []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += batch.flatten().tolist()
        return (self.weight * batch).mean()


@ranks(3)
def test_ranks_see_every_sample_once_and_stand_ins_weigh_nothing() -> None:
    model = Recording()
    own = paceline.Trainer(model, {"name": "sgd", "lr": 1e-3}, batch=5, run=False, quiet=True, preflight=False)
    history = own.train(Seen(), epochs=1)
    together = [x for seen in dist.all_gather_object(model.seen) for x in seen]
    assert set(together) == set(range(22))
    # 5 samples over 3 ranks fill all of them; the last step has 2, so one rank joined with a stand-in.
    assert len(together) == 23
    assert len(history.steps) == 5


@ranks(2)
def test_a_distributed_samplers_ranks_add_up_to_the_global_batch() -> None:
    data = points()
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
    own = trainer(batch=None)
    history = own.train(loader, epochs=1)
    assert len(history.steps) == 3
    torch.manual_seed(0)
    reference = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.0)
    tiny.hand_written_loop(reference, optimizer, data, [[*range(start, start + 8)] for start in (0, 8, 16)])
    assert torch.allclose(own.model.weight, reference.weight, rtol=1e-5)


@pytest.mark.parametrize("claim", ["replicas", "rank"])
def test_a_distributed_sampler_that_does_not_fit_the_world_has_a_code(claim: str) -> None:
    def train() -> None:
        data = points()
        replicas, rank = (1, 0) if claim == "replicas" else (2, 0)
        sampler = DistributedSampler(data, num_replicas=replicas, rank=rank)
        trainer(batch=None).train(DataLoader(data, batch_size=4, sampler=sampler), epochs=1)

    with pytest.raises(PacelineError) as caught:
        paceline.launch(train, ranks=2)
    assert caught.value.code == "data.wrong-sampler"


@ranks(2)
def test_running_statistics_are_one_models_in_evaluation_and_afterwards() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    own = paceline.Trainer(model, criterion=nn.MSELoss(), batch=8, run=False, quiet=True)
    own.train(points(), epochs=1)
    statistics = [torch.empty(4) for _ in range(2)]
    dist.all_gather(statistics, model[1].running_mean)
    assert torch.equal(*statistics)
    x, y = points(10).tensors
    model.eval()
    assert own.evaluate(points(10)) == pytest.approx(nn.functional.mse_loss(model(x), y).item(), rel=1e-5)


@pytest.mark.parametrize("number", [1, 2])
def test_parameters_that_the_loss_does_not_use_are_named_on_several_ranks(number: int) -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    def train() -> int:
        own = paceline.Trainer(Part(), criterion=nn.MSELoss(), batch=8, run=False, quiet=True)
        return len(own.train(points(), epochs=1).steps)

    if number == 1:
        assert paceline.launch(train, ranks=1) == 3
        return
    with pytest.raises(PacelineError) as caught:
        paceline.launch(train, ranks=number)
    assert caught.value.code == "train.unused-parameters"
    assert "spare.weight, spare.bias" in str(caught.value)


@ranks(2)
def test_a_step_in_which_nothing_counts_changes_nothing() -> None:
    def nothing(model: nn.Module, batch: Any) -> paceline.Loss:
        return paceline.Loss(model(batch[0]).sum() * 0.0, torch.tensor(0.0))

    torch.manual_seed(0)
    own = paceline.Trainer(nn.Linear(3, 1), {"name": "sgd"}, loss_fn=nothing, run=False, quiet=True, batch=8)
    before = own.model.weight.detach().clone()
    own.train(points(), max_steps=2)
    assert torch.equal(own.model.weight, before)


@ranks(2)
def test_saving_on_rank_zero_alone_or_on_all_ranks_both_work(tmp_path: Path) -> None:
    own = trainer()
    own.train(points(), max_steps=2)
    if own.is_main_process:
        own.save_checkpoint(tmp_path / "alone")
    own.save_checkpoint(tmp_path / "all")
    for name in ("alone", "all"):
        other = trainer(seed=3)
        other.load_checkpoint(tmp_path / name)
        assert other.step_count == 2
        assert torch.equal(other.model.weight, own.model.weight)


@pytest.mark.parametrize("number", [1, 3])
def test_a_checkpoint_of_two_ranks_resumes_on_another_number_of_ranks(tmp_path: Path, number: int) -> None:
    config = paceline.Config.from_dict(tiny.recipe("vae", batch=10, precision="fp64"))
    expected = paceline.Trainer.from_config(config).train().losses

    def begin() -> None:
        first = paceline.Trainer.from_config(config)
        first.train(max_steps=7)
        first.save_checkpoint(tmp_path / "c")

    def go_on() -> list[float]:
        second = paceline.Trainer.from_config(config)
        second.load_checkpoint(tmp_path / "c")
        return second.train(max_steps=20).losses

    paceline.launch(begin, ranks=2)
    losses = paceline.launch(go_on, ranks=number)
    assert losses == pytest.approx(expected[7:], rel=1e-9)
