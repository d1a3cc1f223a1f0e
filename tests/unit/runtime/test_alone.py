"""A world of one: no process group, and every collective gives what its definition gives for one rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from paceline import dist, noise
from paceline.errors import ModelError, WorldError
from paceline.runtime.environment import RankInfo, read_rank_info
from paceline.runtime.noise import NoiseContext, local_samples


def samples(step: int = 0, *, start: int = 0, own: int, rows: int) -> SimpleNamespace:
    return SimpleNamespace(samples=own, start=start, step_samples=rows, step=step)


def test_rank_facts() -> None:
    assert (dist.rank(), dist.world(), dist.local_rank(), dist.is_main(), dist.is_initialized()) == (
        0, 1, 0, True, False,
    )  # fmt: skip


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "product"])
@pytest.mark.parametrize("async_op", [False, True])
def test_reductions_are_the_tensor_itself(op: str, async_op: bool) -> None:
    tensor = torch.tensor([1.0, 2.0])
    for reduce in (dist.all_reduce, dist.reduce):
        work = reduce(tensor, op=op, async_op=async_op)
        if async_op:
            work.wait()
            assert work.is_completed()
    received = torch.zeros(2)
    dist.reduce_scatter(received, [tensor], op=op)
    assert torch.equal(received, torch.tensor([1.0, 2.0]))


def test_moving_collectives_copy() -> None:
    tensor = torch.tensor([1.0, 2.0])
    for move in (
        lambda out: dist.all_gather([out], tensor),
        lambda out: dist.gather(tensor, [out]),
        lambda out: dist.scatter(out, [tensor]),
        lambda out: dist.all_to_all([out], [tensor]),
    ):
        out = torch.zeros(2)
        move(out)
        assert torch.equal(out, tensor)
    dist.broadcast(tensor)
    dist.barrier()
    assert dist.broadcast_object({"a": [1, None]}) == {"a": [1, None]}
    assert dist.all_gather_object(3) == [3]
    with dist.main_first():
        pass


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), op="mean"), "world.mean-of-integers"),
        (lambda: dist.all_reduce(torch.ones(2), op="median"), "world.bad-op"),
        (lambda: dist.broadcast(torch.ones(2), src=1), "world.bad-rank"),
        (lambda: dist.all_gather([], torch.ones(2)), "world.bad-list"),
        (lambda: dist.scatter(torch.ones(2)), "world.bad-list"),
        (lambda: dist.broadcast_object(object()), "world.not-json"),
        (lambda: dist.all_reduce(3.0), "world.not-a-tensor"),
    ],
)
def test_bad_calls_have_codes(call: object, code: str) -> None:
    with pytest.raises(WorldError) as caught:
        call()  # type: ignore[operator]
    assert caught.value.code == code


def test_a_place_is_read_from_a_launchers_environment() -> None:
    assert read_rank_info({}) is None
    full = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert read_rank_info(full) == RankInfo(3, 8, 1, 2)
    assert read_rank_info({"RANK": "1", "WORLD_SIZE": "2"}) == RankInfo(1, 2, 1, 2)


@pytest.mark.parametrize("bad", [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}])
def test_a_place_that_can_not_be_has_a_code(bad: dict[str, str]) -> None:
    with pytest.raises(WorldError) as caught:
        read_rank_info(bad)
    assert caught.value.code == "world.bad-environment"


def test_noise_of_a_step_is_the_same_however_it_is_cut() -> None:
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


def test_a_stand_in_has_no_samples_of_its_own() -> None:
    assert local_samples() is None
    with NoiseContext(0, samples(own=0, rows=2)):
        assert local_samples() == 0


def test_noise_outside_a_step_is_drawn_from_the_global_generator() -> None:
    torch.manual_seed(4)
    expected = torch.randn(3)
    torch.manual_seed(4)
    assert torch.equal(noise(torch.empty(3)), expected)
