"""What holds for every compression, as a hook of DDP on real ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn

import hooked
from paceline.config.sections import SyncSection
from paceline.parallel.sync.compression import Compression, NamedState, Slot, StepEnd, build_compression
from worlds import ranks

ALL = ("fp16", "bf16", "int8", "powersgd")
WITH_STATE = ("int8", "powersgd")
SECTIONS = {
    "fp16": SyncSection(compress="fp16"),
    "bf16": SyncSection(compress="bf16"),
    "int8": SyncSection(compress="int8"),
    "powersgd": SyncSection(compress="powersgd", rank=2),
}
SIZES = ((40, 60), (60,), (2, 3), (30, 40), (0, 4), (3, 20, 5), ())
# Relative to the largest value. PowerSGD of random matrices misses most of it in the first step.
BOUNDS = {"fp16": 1e-3, "bf16": 8e-3, "int8": 3e-2}


def build(method: str) -> Compression:
    return build_compression(SECTIONS[method], hooked.own_exchange())


@ranks(3)
def test_every_rank_gets_the_mean_of_every_dtype_and_size() -> None:
    for method in ALL:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            model = hooked.ChosenGradients(*SIZES, dtype=dtype)
            ddp = hooked.wrap(model, build(method))
            for step in range(3):  # DDP rebuilds its buckets after the first
                got = hooked.step(ddp, hooked.random_like(model, torch_dist.get_rank(), step))
                assert hooked.same_on_all_ranks(got), (method, dtype)
                for gradient, mean in zip(got, hooked.true_mean(model, step), strict=True):
                    if (method == "powersgd" and gradient.dim() > 1) or not gradient.numel():
                        continue
                    bound = BOUNDS.get(method, 1e-6) + (1e-2 if dtype == torch.bfloat16 else 0)
                    assert (gradient - mean).abs().max() <= bound * max(1.0, mean.abs().max()), (method, dtype)


@ranks(2)
def test_a_bucket_that_is_smaller_than_the_number_of_ranks() -> None:
    for method in ALL:
        model = hooked.ChosenGradients((40, 60), (1,))
        ddp = hooked.wrap(model, build(method), bucket_cap_mb=1e-6)
        for _ in range(3):
            _, got = hooked.step(ddp, [torch.randn(40, 60), torch.tensor([1.0 + 2 * torch_dist.get_rank()])])
            assert got.item() == pytest.approx(2.0, rel=1e-2), method


@ranks(2)
def test_nothing_is_lost_but_what_error_feedback_holds() -> None:
    """Also across the rebuild of buckets after the first step, and across another wrapper with fewer parameters."""
    for method in WITH_STATE:
        model = hooked.ChosenGradients(*SIZES[:5], dtype=torch.float64)
        compression = build(method)
        ddp = hooked.wrap(model, compression)
        missing = [torch.zeros(size, dtype=torch.float64) for size in SIZES[:5]]
        for step in range(8):
            model.weights[0].requires_grad_(step != 5)
            if step in (5, 6):
                ddp = hooked.wrap(model, compression)
            got = hooked.step(ddp, hooked.random_like(model, torch_dist.get_rank(), step))
            for number in range(len(SIZES[:5])):
                if step == 5 and number == 0:
                    continue
                position = number - 1 if step == 5 else number
                missing[number] += hooked.true_mean(model, step)[number] - got[position]
        held = hooked.mean_over_ranks(compression.local_state())
        assert held["weights.0"].norm() > 0
        for number, total in enumerate(missing):
            assert torch.allclose(
                total, held.get(f"weights.{number}", torch.zeros((), dtype=torch.float64)).expand_as(total), atol=1e-9
            )


@ranks(2)
def test_a_non_finite_gradient_shows_on_every_rank_and_leaves_the_state_as_it_was() -> None:
    for method in ALL:
        for bad in (float("inf"), float("nan")) if method in WITH_STATE else (float("nan"),):
            model = hooked.ChosenGradients(*SIZES)
            compression = build(method)
            ddp = hooked.wrap(model, compression)
            own = torch_dist.get_rank()
            for step in range(2):
                hooked.step(ddp, hooked.random_like(model, own, step))
            before = {n: t.clone() for n, t in {**compression.replicated_state(), **compression.local_state()}.items()}
            gradients = hooked.random_like(model, own, 2)
            if own == 1:
                gradients[0][3, 5] = bad
            got = hooked.step(ddp, gradients)
            assert not got[0].isfinite().all(), method
            after = {**compression.replicated_state(), **compression.local_state()}
            assert before.keys() == after.keys() and bool(after) == (method in WITH_STATE)
            assert all(torch.equal(before[name], after[name]) for name in before if name != "steps"), method
            for gradient in hooked.step(ddp, hooked.random_like(model, own, 3)):
                assert gradient.isfinite().all()


@ranks(2)
def test_a_suspended_hook_averages_exactly_and_changes_no_state() -> None:
    for method in ALL:
        model = hooked.ChosenGradients(*SIZES)
        compression = build(method)
        hook = hooked.hook_of(compression)
        ddp = hooked.wrap(model, compression, hook)
        own = torch_dist.get_rank()
        hooked.step(ddp, hooked.random_like(model, own, 0))
        state = {**compression.replicated_state(), **compression.local_state()}
        before = {name: tensor.clone() for name, tensor in state.items()}
        with hook.suspended():
            got = hooked.step(ddp, hooked.random_like(model, own, 1))
        assert all(
            torch.allclose(a.double(), b, atol=1e-6) for a, b in zip(got, hooked.true_mean(model, 1), strict=True)
        )
        after = {**compression.replicated_state(), **compression.local_state()}
        assert all(torch.equal(before[name], after[name]) for name in after)


@ranks(2)
def test_error_feedback_does_not_depend_on_the_loss_scale() -> None:
    for method in WITH_STATE:
        results = []
        for scales in ((1.0,) * 4, (65536.0, 65536.0, 32768.0, torch.tensor(1024.0))):
            model = hooked.ChosenGradients(*SIZES)
            compression = build(method)
            ddp = hooked.wrap(model, compression)
            for step, scale in enumerate(scales):
                compression.scale = lambda scale=scale: scale  # type: ignore[misc]
                got = hooked.step(ddp, hooked.random_like(model, torch_dist.get_rank(), step), float(scale))
            unscaled = [gradient / scales[-1] for gradient in got]
            results.append([*unscaled, *(tensor.clone() for tensor in compression.local_state().values())])
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*results, strict=True)), method


@ranks(2)
def test_a_resumed_run_has_the_same_bits() -> None:
    cold = SyncSection(compress="powersgd", rank=2, start=1, warm_start=False)
    for section in (SECTIONS["int8"], SECTIONS["powersgd"], cold):
        own = torch_dist.get_rank()
        outcomes = []
        saved: list[dict[str, torch.Tensor]] = []
        for first in (0, 3):
            model = hooked.ChosenGradients(*SIZES)
            compression = build_compression(section, hooked.own_exchange())
            hook = hooked.hook_of(compression)
            ddp = hooked.wrap(model, compression, hook)
            with hook.suspended():
                hooked.step(ddp, hooked.random_like(model, own, 0))  # settles the buckets
            if saved:
                compression.load(*saved)
            for step in range(first, 6):
                if step == 3 and not saved:
                    states = compression.replicated_state(), compression.local_state()
                    saved = [{name: tensor.clone() for name, tensor in state.items()} for state in states]
                got = hooked.step(ddp, hooked.random_like(model, own, step))
            outcomes.append(got)
        assert saved[1] and hooked.same_on_all_ranks([saved[0][name] for name in sorted(saved[0])])
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True)), section


@ranks(2)
def test_convolutions_in_channels_last_and_accumulated_gradients() -> None:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 3)).double()
    for method in ALL:
        results = []
        for compression in (None, build(method)):
            model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 3)).double()
            model.load_state_dict(first.state_dict())
            model = model.to(memory_format=torch.channels_last)
            plain = nn.parallel.DistributedDataParallel(model)
            ddp = plain if compression is None else hooked.wrap(model, compression)
            total = [torch.zeros_like(p) for p in model.parameters()]
            torch.manual_seed(torch_dist.get_rank())
            for _ in range(4):
                ddp.zero_grad()
                with ddp.no_sync():
                    ddp(torch.randn(2, 8, 6, 6).double()).square().mean().backward()
                ddp(torch.randn(2, 8, 6, 6).double()).square().mean().backward()
                for sum_, parameter in zip(total, model.parameters(), strict=True):
                    sum_ += parameter.grad
            if compression is not None:
                for name, error in hooked.mean_over_ranks(compression.local_state()).items():
                    total[[n for n, _ in model.named_parameters()].index(name)] += error
            results.append(total)
        bound = 1e-9 if method in WITH_STATE else BOUNDS[method]
        for got, expected in zip(*results, strict=True):
            assert (got - expected).abs().max() <= bound * max(1.0, expected.abs().max()), method


@ranks(2)
def test_an_error_of_a_collective_is_raised_by_the_backward() -> None:
    class Fails(hooked.Exchange):
        def all_reduce(self, tensor: torch.Tensor, *, async_op: bool = False) -> object:
            raise RuntimeError("the link is down")

    model = hooked.ChosenGradients((20, 30), (4,))
    section = SyncSection(compress="powersgd")
    ddp = hooked.wrap(model, build_compression(section, Fails(torch_dist.new_group())), bucket_cap_mb=1e-6)
    with pytest.raises(RuntimeError, match="the link is down"):
        hooked.step(ddp, [torch.ones(20, 30), torch.ones(4)])


A, B = Slot("a", (2, 3), (3, 1), 0), Slot("b", (2,), (1,), 6)
YES, NO = torch.tensor(True), torch.tensor(False)


def test_values_follow_their_names_to_other_buckets_and_memory_formats() -> None:
    state = NamedState()
    together = state.collect([A, B], like=torch.empty(8))
    together.value.copy_(torch.arange(8.0))
    alone = state.collect([Slot("a", (2, 3), (1, 2), 4)], like=torch.empty(10))
    assert alone.value[4:].tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    found = state.state()
    assert found["a"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] and found["b"].tolist() == [6.0, 7.0]


def test_loaded_values_wait_for_their_bucket() -> None:
    state = NamedState(initial=lambda name, view: view.fill_(9.0))
    state.collect([A], like=torch.empty(6))
    state.load({"a": torch.ones(2, 3), "frozen": torch.zeros(1)})
    kept = state.collect([A, B], like=torch.empty(8))
    assert kept.value.tolist() == [1.0] * 6 + [9.0] * 2
    assert state.state().keys() == {"a", "b", "frozen"}


def test_a_step_counts_for_all_buckets_or_for_none() -> None:
    state, end = NamedState(), StepEnd()
    first, last = state.collect([A], like=torch.empty(6)), state.collect([B], like=torch.empty(8))
    first.next.fill_(1.0)
    last.next.fill_(2.0)
    end.add(True, False, YES, first)
    end.add(False, True, NO, last)
    assert not first.value.any() and not last.value.any()
    end.add(True, False, NO, first)  # a backward that failed after its first bucket
    end.add(True, False, YES, first)
    assert not first.value.any()
    end.add(False, True, YES, last)
    assert first.value.unique().tolist() == [1.0] and last.value.unique().tolist() == [2.0]
