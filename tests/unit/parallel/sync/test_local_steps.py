"""Rounds of local steps on plain tensors. `tests/ranks/test_local_steps.py` trains with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline import dist
from paceline.config.sections import SyncSection
from paceline.parallel.sync.exchange import Exchange
from paceline.parallel.sync.local_steps import FlatTensors, LocalSteps, by_kind, has_gaps
from worlds import ranks

CPU = torch.device("cpu")


def local_steps(
    parameters: dict[str, torch.Tensor], frozen: frozenset[str] = frozenset(), **section: object
) -> LocalSteps:
    settings = SyncSection.model_validate({"every": 2, **section})
    return LocalSteps(settings, Exchange(), parameters, dict, trains=lambda name: name not in frozen, device=CPU)


@ranks(2)
def test_a_round_averages_weights_after_so_many_local_steps() -> None:
    weight, own = torch.zeros(3), dist.rank() + 1.0
    steps = local_steps({"w": weight}, warmup=1)
    found = []
    for step in range(5):
        steps.before_step(step)
        if not steps.is_synchronous(step):
            weight += own
        steps.after_step(step + 1)
        found.append((weight[0].item(), steps.replicas_differ))
    assert found == [(0, False), (own, True), (3, False), (3 + own, True), (6, False)]
    assert steps.spread is not None and abs(steps.spread.item() - 1 / 6) < 1e-7


@ranks(2)
def test_means_leave_weights_as_they_are_until_they_are_averaged() -> None:
    weight, count = torch.full((2,), float(dist.rank())), torch.tensor([dist.rank() + 7])
    steps = local_steps({"w": weight}, outer="nesterov", every=10)
    steps.before_step(0)
    steps.after_step(1)
    means = steps.mean_of({"w": weight, "count": count})
    assert means["w"].tolist() == [0.5, 0.5] and means["count"].tolist() == [7]
    assert weight.tolist() == [float(dist.rank())] * 2 and steps.replicas_differ
    steps.average()
    assert weight.tolist() == [0.5, 0.5] and not steps.replicas_differ
    assert "weights" in steps.state_dict() and "momentum" in steps.state_dict()


@ranks(2)
def test_a_frozen_parameter_that_replicas_change_is_averaged_and_others_are_not_sent() -> None:
    teacher, large, weight = torch.zeros(2), torch.zeros(1000), torch.zeros(1)
    parameters = {"teacher": teacher, "large": large, "w": weight}
    steps = local_steps(parameters, frozen=frozenset({"teacher", "large"}), every=1)
    steps.before_step(0)
    teacher += dist.rank()
    steps.after_step(1)
    assert teacher.tolist() == [0.5, 0.5] and sum(steps.exchange.traffic.sent.values()) < 1000


@ranks(2)
def test_a_state_continues_with_the_same_bits() -> None:
    def train(weight: torch.Tensor, steps: LocalSteps, first: int, last: int) -> None:
        for step in range(first, last):
            steps.before_step(step)
            weight += torch.linspace(0, 1, 5) * (dist.rank() + 0.3) * (step + 1)
            steps.after_step(step + 1)

    section = {"outer": {"name": "nesterov"}, "compress": "int8"}
    weight = torch.zeros(5)
    steps = local_steps({"w": weight}, **section)
    train(weight, steps, 0, 3)
    other = weight.clone()
    again = local_steps({"w": other}, **section)
    saved = {**steps.state_dict(), **steps.local_state()}
    assert set(saved) == {"weights", "momentum", "feedback"}
    again.load_state_dict({kind: {name: t.clone() for name, t in views.items()} for kind, views in saved.items()})
    train(weight, steps, 3, 6)
    train(other, again, 3, 6)
    assert torch.equal(weight, other) and not steps.replicas_differ
    train(weight, steps, 6, 7)
    assert steps.replicas_differ
    steps.load_state_dict({})  # other weights were loaded, the same on all replicas
    assert not steps.replicas_differ


@pytest.mark.parametrize("compress", [None, "int8"])
@ranks(2)
def test_complex_weights_and_gradients_are_averaged(compress: str | None) -> None:
    weight, own = torch.zeros(2, 3, dtype=torch.complex64).t(), complex(dist.rank(), 2 - 2 * dist.rank())
    steps = local_steps({"w": weight}, every=1, compress=compress)
    steps.average_([gradient := torch.full((2,), own)])
    steps.before_step(0)
    weight += own
    steps.after_step(1)
    expected = [torch.full(size, 0.5 + 1j) for size in ((2,), (3, 2))]
    torch.testing.assert_close([gradient, weight], expected, rtol=0.01, atol=0.0)
    assert steps.mean_of({"w": weight})["w"].dtype is torch.complex64
    assert all(torch.equal(each["w"], weight) for each in steps.state_dict().values())


class LateExchange(Exchange):
    """Delivers what it gathers when it is waited for, as over a slow network; until then, this rank's values."""

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> Any:
        gathered = received.copy_(sent.repeat(self.ranks)).clone()
        work = super().all_gather(gathered, sent)
        return SimpleNamespace(wait=lambda: (work.wait(), received.copy_(gathered)))


@ranks(2)
def test_replicas_wait_for_the_checksums_of_others() -> None:
    statistics, weight = torch.full((2,), float(dist.rank())), torch.zeros(1)
    settings = SyncSection.model_validate({"every": 1})
    buffers = {"statistics": statistics}
    steps = LocalSteps(settings, LateExchange(), {"w": weight}, lambda: buffers, trains=lambda name: True, device=CPU)
    steps.before_step(0)
    steps.after_step(1)
    assert statistics.tolist() == [0.5, 0.5]


def test_pieces_of_limited_size_hold_all_elements_of_any_memory_format() -> None:
    tensors = {
        "plain": torch.arange(7.0),
        "none": torch.empty(0, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "images": torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last),
    }
    flat = FlatTensors(tensors, piece_bytes=5 * 4)
    assert [piece.stop - piece.start for piece in flat.pieces] == [5, 5, 5, 5, 5, 4]
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    copied = flat.pack(flat.whole)
    for piece in flat.pieces:
        assert torch.equal(flat.pack(piece), copied[piece])
        flat.unpack(piece, 2 * copied[piece])
    for name, view in flat.views(copied).items():
        assert torch.equal(view, before[name]) and torch.equal(tensors[name], 2 * view)


def test_a_complex_number_is_two_elements() -> None:
    tensors = {"a": torch.randn(2, dtype=torch.complex64), "b": torch.randn(2, 3, dtype=torch.complex64).t()}
    flat = FlatTensors(tensors, piece_bytes=3 * 4)
    copied = flat.pack(flat.whole)
    assert copied.dtype is torch.float32 and len(copied) == 16
    assert all(torch.equal(view, tensors[name]) for name, view in flat.views(copied).items())
    for piece in flat.pieces:
        flat.unpack(piece, 2 * copied[piece])
    assert all(torch.equal(2 * view, tensors[name]) for name, view in flat.views(copied).items())


def test_half_precision_is_averaged_in_float32() -> None:
    half, double = by_kind({"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(1).double()})
    assert half.pack(half.whole).dtype is torch.float32 and double.pack(double.whole).dtype is torch.float64
    half.unpack(half.whole, torch.tensor([1.5, 3.0]))
    assert half.tensors["a"].tolist() == [1.5, 3.0]


def test_gaps_in_memory_are_found() -> None:
    square = torch.zeros(4, 4)
    assert has_gaps(square[:, :2]) and has_gaps(square[::2]) and has_gaps(torch.zeros(1).expand(3))
    assert (
        not has_gaps(square) and not has_gaps(square.t()) and not has_gaps(torch.zeros(())) and not has_gaps(square[:2])
    )
