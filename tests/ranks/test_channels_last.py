"""`channels_last`: images and weights of convolutions as NHWC, with the results of the default memory format."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import paceline
from worlds import run_on_ranks

NHWC = torch.channels_last


class Net(nn.Module):
    """Kernels of 3 × 3, of one pixel and by channel; the strides of the last two could be read as either format."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, groups=8)
        )
        self.head = nn.Linear(8, 4)
        self.formats: list[bool] = []  # of the images that the model got

    def forward(self, images: Tensor) -> Tensor:
        self.formats.append(images.is_contiguous(memory_format=NHWC) and not images.is_contiguous())
        scores: Tensor = self.head(self.layers(images).mean((2, 3)))
        return scores


def data(rows: int = 22) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(rows, 3, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(4, (rows,), generator=generator))


def trainer(**settings: Any) -> paceline.Trainer:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"batch": 8, "run": False, "quiet": True, "device": "cpu", "channels_last": True}
    optimizer = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    return paceline.Trainer(Net(), optimizer, criterion=nn.CrossEntropyLoss(), **{**defaults, **settings})


def losses(**settings: Any) -> list[float]:
    """Every warning is an error: DDP warns of gradients that it has to copy into its buckets."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [record["loss"] for record in trainer(log_every=1, **settings).train(data(), epochs=2).steps]


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    return torch.empty(tensor.shape, memory_format=NHWC).stride()


def converted(model: nn.Module) -> list[str]:
    named = model.named_parameters()
    return [name for name, each in named if each.dim() == 4 and each.stride() == strides_of(each)]


ALL = ["layers.0.weight", "layers.3.weight", "layers.4.weight"]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"accumulate": 2, "clip_norm": 0.1, "ema": 0.9, "recompute": "full"},
    {"deterministic": True, "nonfinite": "skip"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "accumulated", "deterministic"])
def test_losses_are_those_of_the_default_format(settings: dict[str, Any]) -> None:
    expected = losses(precision="fp64", channels_last=False, **settings)
    assert losses(precision="fp64", **settings) == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_losses_on_two_ranks_are_those_of_one_in_the_default_format(strategy: str) -> None:
    expected = losses(precision="fp64", channels_last=False)

    def on_rank() -> None:
        assert losses(precision="fp64", strategy=strategy) == pytest.approx(expected, rel=1e-12, abs=0)

    run_on_ranks(2, on_rank)


def test_weights_gradients_averages_and_optimizer_state_have_the_same_strides() -> None:
    own = trainer(ema=0.9)
    own.train(data(), max_steps=2)
    assert converted(own.model) == ALL
    for name in ALL:
        weight = own.model.get_parameter(name)
        state = own.optimizer.state[weight]
        assert state["momentum_buffer"].stride() == weight.stride(), name


def test_the_state_of_an_optimizer_that_has_stepped_before_is_converted() -> None:
    """Fused kernels would combine it with the wrong elements of a weight, without an error."""

    def final_weights(channels_last: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net().double()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        model(torch.randn(2, 3, 8, 8, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        own = paceline.Trainer(
            model, optimizer, criterion=nn.CrossEntropyLoss(), precision="fp64", batch=8, device="cpu", run=False,
            quiet=True, channels_last=channels_last,
        )  # fmt: skip
        own.train(data(), max_steps=1)
        return list(model.parameters())

    for one, other in zip(final_weights(True), final_weights(False), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def test_training_evaluation_predictions_and_custom_loops_get_images_in_channels_last() -> None:
    own = trainer()
    own.train(data(), max_steps=1)
    own.evaluate(data())
    own.predict(data())
    for batch in own.loader(data()):
        own.training_step(batch)
    assert len(own.model.formats) > 8 and all(own.model.formats)


class Copies(TorchDispatchMode):
    """Counts copies of images into another memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if isinstance(result, Tensor) and result.dim() == 4 and name in ("clone", "contiguous", "_to_copy", "copy_"):
            self.seen.append(f"{name} {tuple(result.shape)}")
        return result


def test_an_image_is_converted_once_and_not_at_all_if_the_data_has_the_format() -> None:
    def copies_in_a_step(images: Tensor) -> list[str]:
        own, batch, counted = trainer(), (images, torch.zeros(8, dtype=torch.int64)), []
        for steps in (2, 3):
            with Copies() as found:
                own.train([batch] * steps, max_steps=own.step_count + steps)
            counted.append(found.seen)
        return counted[1][len(counted[0]) :]

    assert copies_in_a_step(torch.randn(8, 3, 8, 8)) == ["clone (8, 3, 8, 8)"]
    assert copies_in_a_step(torch.randn(8, 8, 8, 3).permute(0, 3, 1, 2)) == []


@pytest.mark.parametrize(("saved", "resumed"), [(True, True), (True, False), (False, True)])
def test_a_checkpoint_continues_in_either_format(saved: bool, resumed: bool, tmp_path: Path) -> None:
    def run(steps: int, channels_last: bool, **settings: Any) -> paceline.Trainer:
        own = trainer(channels_last=channels_last, ema=0.9, precision="fp64", **settings)
        own.train(data(), max_steps=steps)
        return own

    first = run(2, saved)
    first.save_checkpoint(tmp_path / "saved")
    second = trainer(channels_last=resumed, ema=0.9, precision="fp64")
    second.load_checkpoint(tmp_path / "saved")
    assert all(map(torch.equal, first.model.state_dict().values(), second.model.state_dict().values()))
    assert converted(second.model) == (ALL if resumed else [])
    second.train(data(), max_steps=4)
    straight = run(4, saved)
    exact = saved == resumed
    for name, weight in straight.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], weight, rtol=0, atol=0 if exact else 1e-12)
    held = second.optimizer.state[second.model.get_parameter(ALL[0])]["momentum_buffer"]
    assert held.is_contiguous(memory_format=NHWC) == resumed
