from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from paceline import noise
from paceline.errors import ModelError
from paceline.runtime.noise import NoiseContext, local_samples


def samples(step: int = 0, *, start: int = 0, own: int, rows: int) -> SimpleNamespace:
    return SimpleNamespace(samples=own, start=start, step_samples=rows, step=step)


def test_noise_of_a_step_does_not_depend_on_how_its_samples_are_sliced() -> None:
    def draw(start: int, rows: int) -> torch.Tensor:
        with NoiseContext(0, samples(5, start=start, own=rows, rows=6)):
            return torch.cat([noise(torch.empty(rows, 3)), noise(torch.empty(rows, 3))], dim=1)

    whole = draw(0, 6)
    assert torch.equal(torch.cat([draw(0, 2), draw(2, 4)]), whole)
    assert not torch.equal(whole[:, :3], whole[:, 3:])


def test_noise_differs_between_steps_and_seeds() -> None:
    def draw(seed: int, step: int) -> tuple[float, ...]:
        with NoiseContext(seed, samples(step, own=4, rows=4)):
            return tuple(noise(torch.empty(4)).tolist())

    assert len({draw(0, 0), draw(1, 0), draw(0, 1)}) == 3


def test_noise_whose_rows_are_not_the_samples_has_a_code() -> None:
    with pytest.raises(ModelError) as caught, NoiseContext(0, samples(own=4, rows=8)):
        noise(torch.empty(12, 3))
    assert caught.value.code == "model.noise-rows"


def test_a_placeholder_batch_has_no_local_samples() -> None:
    assert local_samples() is None
    with NoiseContext(0, samples(own=0, rows=2)):
        assert local_samples() == 0


def test_noise_outside_a_step_is_drawn_from_the_global_generator() -> None:
    torch.manual_seed(4)
    expected = torch.randn(3)
    torch.manual_seed(4)
    assert torch.equal(noise(torch.empty(3)), expected)
