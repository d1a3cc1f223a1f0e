"""Two Trainers that train against each other, and one Trainer over both models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import LayoutError, TrainError
from worlds import ranks


def adversaries() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    return generator, nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))


def samples() -> torch.Tensor:
    return torch.randn(48, 2, generator=torch.Generator().manual_seed(1)) * 0.5 + 2


def noise(real: torch.Tensor) -> torch.Tensor:
    return real.repeat(1, 2).sin()


def critic_loss(critic: nn.Module, generator: nn.Module, real: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        fake = generator(noise(real))
    return nn.functional.softplus(-critic(real)).mean() + nn.functional.softplus(critic(fake)).mean()


def generator_loss(critic: nn.Module, generator: nn.Module, real: torch.Tensor) -> torch.Tensor:
    return nn.functional.softplus(-critic(generator(noise(real)))).mean()


def weights(*models: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])


def by_hand() -> torch.Tensor:
    generator, critic = adversaries()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
    for _ in range(2):
        for real in samples().split(16):
            for optimizer, loss in ((optimizers[1], critic_loss), (optimizers[0], generator_loss)):
                optimizer.zero_grad()
                loss(critic, generator, real).backward()
                optimizer.step()
    return weights(generator, critic)


def two_trainers(generator: nn.Module, critic: nn.Module, **settings: Any) -> list[paceline.Trainer]:
    kw: dict[str, Any] = {"batch": 16, "run": False, "quiet": True, "shuffle": False, **settings}
    trainers = []
    for model, loss_fn in (
        (critic, lambda model, batch: critic_loss(model, generator, batch[0])),
        (generator, lambda model, batch: generator_loss(critic, model, batch[0])),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainers.append(paceline.Trainer(model, optimizer, loss_fn=loss_fn, **kw))
    for _ in range(2):
        for batch in trainers[0].loader(TensorDataset(samples())):
            for trainer in trainers:
                trainer.training_step(batch)
    return trainers


@pytest.mark.parametrize("world", [1, 2])
def test_two_trainers_give_the_weights_of_a_plain_loop(world: int) -> None:
    @ranks(world)
    def body() -> None:
        models = adversaries()
        two_trainers(*models)
        if world == 1:
            assert torch.equal(weights(*models), by_hand())
        assert torch.allclose(weights(*models), by_hand(), rtol=1e-5, atol=1e-6)

    body()


def test_two_trainers_that_alternate_within_a_step_have_a_code() -> None:
    with pytest.raises(TrainError) as caught:
        two_trainers(*adversaries(), accumulate=2)
    assert caught.value.code == "train.gradients-changed"


@ranks(2)
def test_a_sharded_critic_inside_the_loss_of_the_generator_has_a_code() -> None:
    with pytest.raises(LayoutError) as caught:
        two_trainers(*adversaries(), strategy="fsdp")
    assert caught.value.code == "layout.called-by-itself"


class Both(nn.Module):
    """Both models with the sum of both losses, each of which has gradients in its own model only."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = adversaries()

    def forward(self, real: torch.Tensor) -> torch.Tensor:
        frozen = {name: parameter.detach() for name, parameter in self.critic.named_parameters()}
        fake = self.generator(noise(real))
        judged = torch.func.functional_call(self.critic, frozen, fake)
        return critic_loss(self.critic, self.generator, real) + nn.functional.softplus(-judged).mean()


def both_by_hand() -> torch.Tensor:
    model = Both()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for real in samples().split(16):
            optimizer.zero_grad()
            model(real).backward()
            optimizer.step()
    return weights(model)


def both_losses(model: nn.Module, batch: Any) -> Any:
    return model(batch[0])


@ranks(2)
def test_one_trainer_over_both_models_gives_the_weights_of_a_plain_loop() -> None:
    model = Both()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = paceline.Trainer(
        model, optimizer, loss_fn=both_losses, batch=16, shuffle=False, run=False, quiet=True, strategy="ddp"
    )
    trainer.train(TensorDataset(samples()), epochs=2)
    assert torch.allclose(weights(model), both_by_hand(), rtol=1e-5, atol=1e-6)
