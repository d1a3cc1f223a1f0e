"""Batch norm on several ranks gives what one process gives for the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline import dist
from paceline.errors import TrainError
from paceline.parallel.sync_batchnorm import convert_sync_batchnorm, unconverted
from paceline.runtime import noise
from worlds import ranks, run_on_ranks

CHANNELS = 6
# Rows of each rank; 0 is a rank that only joins in with a stand-in.
SPLITS = [(3, 2), (4, 1), (1, 1, 3), (1, 0, 2), (1, 1, 1, 0), (0, 2, 0, 3)]
LAYERS = {
    "1d": (nn.BatchNorm1d, ()),
    "1d-sequence": (nn.BatchNorm1d, (7,)),
    "2d": (nn.BatchNorm2d, (4, 3)),
    "3d": (nn.BatchNorm3d, (2, 3, 2)),
    "torch-sync": (nn.SyncBatchNorm, (4, 3)),
}


class Here(NamedTuple):
    """The samples in the model, as a loader describes them."""

    samples: int
    start: int = 0
    step_samples: int = 5
    step: int = 0


def stand_in() -> AbstractContextManager[Any]:
    return noise.NoiseContext(0, samples=Here(samples=0))


def layer(kind: str, dtype: torch.dtype, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    module = LAYERS[kind][0](CHANNELS, **options).to(dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.5)
    return module


def batch(kind: str, rows: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, CHANNELS, *LAYERS[kind][1])
    return 3 * torch.randn(shape, generator=generator, dtype=dtype) + 2


def plain(module: nn.Module) -> nn.Module:
    """The same layer for one process: torch's nn.SyncBatchNorm does not run on CPU."""
    if not isinstance(module, nn.SyncBatchNorm):
        return copy.deepcopy(module)
    twin = nn.BatchNorm2d(CHANNELS).to(module.weight.dtype)
    twin.load_state_dict(module.state_dict())
    return twin


def run(module: nn.Module, rows: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows.clone().requires_grad_()
    output = module(rows)
    output.backward(grad)
    assert rows.grad is not None
    return output.detach(), rows.grad


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    difference = (actual - expected).abs().max() / expected.abs().max()
    assert difference <= tolerance, f"relative difference {difference:.1e}"


def compare_with_one_process(
    kind: str,
    split: tuple[int, ...],
    dtype: torch.dtype,
    *,
    tolerance: float,
    rounds: int = 2,
    convert: Callable[[nn.Module], object] = convert_sync_batchnorm,
    **options: Any,
) -> None:
    """A converted layer on this rank's rows, against a plain one on all rows."""
    module = layer(kind, dtype, **options)
    reference = plain(module)
    convert(module)
    start, own = sum(split[: dist.rank()]), split[dist.rank()]
    for seed in range(rounds):
        rows, grad = batch(kind, sum(split), dtype, seed), batch(kind, sum(split), dtype, seed + 100)
        output, grad_rows = run(reference, rows, grad)
        if own:
            mine = slice(start, start + own)
            with noise.NoiseContext(0, samples=Here(own, start, sum(split))):
                my_output, my_grad_rows = run(module, rows[mine], grad[mine])
            assert_close(my_output, output[mine], tolerance)
            assert_close(my_grad_rows, grad_rows[mine], tolerance)
        else:
            # A stand-in with values and gradients that would be seen in any sum.
            with stand_in():
                run(module, 1e3 * batch(kind, 1, dtype, 7), 1e3 * batch(kind, 1, dtype, 8))
    for parameter, expected in zip(module.parameters(), reference.parameters(), strict=True):
        assert parameter.grad is not None and expected.grad is not None
        dist.all_reduce(parameter.grad)
        assert_close(parameter.grad, expected.grad, tolerance)
    for buffer, expected in zip(module.buffers(), reference.buffers(), strict=True):
        assert_close(buffer, expected, tolerance)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_ranks_give_what_one_process_gives(split: tuple[int, ...]) -> None:
    def every_layer() -> None:
        for kind in LAYERS:
            compare_with_one_process(kind, split, torch.float64, tolerance=1e-12)
            # fp32 keeps six digits for one step; a second one adds up gradients of the first.
            compare_with_one_process(kind, split, torch.float32, tolerance=1e-6, rounds=1)

    run_on_ranks(len(split), every_layer)


@ranks(3)
def test_each_option_means_what_it_means_on_one_rank() -> None:
    settings = ({"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.5, "momentum": 0.7})
    for options in settings:
        compare_with_one_process("2d", (2, 0, 3), torch.float64, tolerance=1e-12, rounds=3, **options)


@ranks(2)
def test_the_comparison_bites_without_synchronisation() -> None:
    for kind in ("1d", "2d", "3d"):
        with pytest.raises(AssertionError, match="relative difference"):
            compare_with_one_process(kind, (3, 2), torch.float64, tolerance=1e-3, convert=lambda module: None)


@ranks(2)
def test_without_running_statistics_evaluation_is_over_all_ranks_too() -> None:
    module = layer("2d", torch.float64, track_running_stats=False).eval()
    reference = copy.deepcopy(module)
    convert_sync_batchnorm(module)
    rows = batch("2d", 5, torch.float64, 0)
    mine = slice(0, 3) if dist.rank() == 0 else slice(3, 5)
    assert_close(module(rows[mine]), reference(rows)[mine], 1e-12)


@ranks(2)
def test_a_stand_in_is_normalised_with_the_statistics_of_the_others() -> None:
    module = layer("1d", torch.float64)
    rows, other = batch("1d", 5, torch.float64, 0), batch("1d", 1, torch.float64, 1)
    convert_sync_batchnorm(module)
    with stand_in() if dist.rank() == 1 else nullcontext():
        output = module(rows if dist.rank() == 0 else other)
    if dist.rank() == 1:
        normalised = (other - rows.mean(0)) / (rows.var(0, correction=0) + module.eps).sqrt()
        assert_close(output, normalised * module.weight + module.bias, 1e-12)


@ranks(2)
def test_a_stand_in_passes_no_gradient_on_to_earlier_layers() -> None:
    model = nn.Sequential(nn.Linear(3, CHANNELS), layer("1d", torch.float32), nn.ReLU(), nn.Linear(CHANNELS, 1))
    convert_sync_batchnorm(model)
    with stand_in() if dist.rank() == 1 else nullcontext():
        model(torch.randn(4, 3)).sum().backward()
    total = model[0].weight.grad.abs().sum() + model[1].weight.grad.abs().sum()
    assert (total == 0) == (dist.rank() == 1)


@ranks(2)
def test_a_micro_batch_of_stand_ins_alone_is_not_remembered() -> None:
    module = layer("2d", torch.float64)
    convert_sync_batchnorm(module)
    before = copy.deepcopy(module.state_dict())
    with stand_in():
        output, grad = run(module, batch("2d", 1, torch.float64, 0), batch("2d", 1, torch.float64, 1))
    assert output.isfinite().all() and not grad.any()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_one_rank_does_not_remember_a_stand_in_and_otherwise_is_torchs_own() -> None:
    module, rows = layer("2d", torch.float32), batch("2d", 5, torch.float32, 0)
    reference = copy.deepcopy(module)
    convert_sync_batchnorm(module)
    assert torch.equal(module(rows), reference(rows))
    with stand_in():
        module(rows)
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), reference.buffers(), strict=True))


@ranks(3)
def test_a_rank_without_rows_joins_in() -> None:
    module = layer("2d", torch.float64)
    reference = copy.deepcopy(module)
    convert_sync_batchnorm(module)
    rows = batch("2d", 5, torch.float64, 0)
    reference(rows)
    run(module, mine := rows[[slice(0, 2), slice(2, 5), slice(5, 5)][dist.rank()]], torch.ones_like(mine))
    assert_close(module.running_var, reference.running_var, 1e-12)


@ranks(2)
def test_one_value_per_channel_over_all_ranks_is_an_error_on_each() -> None:
    module = layer("1d", torch.float32)
    convert_sync_batchnorm(module)
    with stand_in() if dist.rank() == 1 else nullcontext(), pytest.raises(TrainError) as caught:
        module(torch.randn(1, CHANNELS))
    assert caught.value.code == "train.one-value-per-channel"


@ranks(2)
def test_every_rank_has_the_same_running_statistics_to_the_bit() -> None:
    module = layer("2d", torch.float32)
    convert_sync_batchnorm(module)
    for seed in range(3):
        module(batch("2d", 2 + dist.rank(), torch.float32, 10 * seed + dist.rank()))
    everyones = [torch.empty(CHANNELS) for _ in range(2)]
    for running in (module.running_mean, module.running_var):
        dist.all_gather(everyones, running)
        assert torch.equal(*everyones)


@ranks(2)
def test_evaluation_and_frozen_layers_use_torch_without_communication() -> None:
    model = nn.Sequential(layer("2d", torch.float32), layer("2d", torch.float32))
    convert_sync_batchnorm(model)
    reference = nn.BatchNorm2d(CHANNELS)
    reference.load_state_dict(model[0].state_dict())
    reference.eval()
    model[0].eval()
    rows = batch("2d", 2, torch.float32, dist.rank())
    if dist.rank() == 0:  # a collective here would meet the other rank's next one, and the runner's comparison
        assert torch.equal(model[0](rows), reference(rows))
    frozen = copy.deepcopy(model[0].state_dict())
    model(rows)
    assert all(torch.equal(value, frozen[name]) for name, value in model[0].state_dict().items())
    assert model[1].num_batches_tracked == 1


def test_layers_change_their_class_and_nothing_else() -> None:
    class Mine(nn.BatchNorm2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2.0

    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm2d(2), Mine(2)), nn.BatchNorm3d(2), nn.ReLU())
    modules, state, seen = list(model.modules()), model.state_dict(keep_vars=True), []
    model[0].register_forward_hook(lambda *_: seen.append("hook"))
    assert convert_sync_batchnorm(model) == ["0", "1.0", "2"]
    assert convert_sync_batchnorm(model) == []
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(state) and all(after[name] is state[name] for name in state)
    assert isinstance(model[1][0], nn.BatchNorm2d) and type(model[1][1]) is Mine and unconverted(model) == ["1.1"]
    model[0](torch.randn(3, 2))
    assert seen == ["hook"]
    with pytest.raises(ValueError, match="4D"):
        model[1][0](torch.randn(3, 2))


@ranks(3)
def test_a_network_under_ddp_gets_one_processs_gradients() -> None:
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
            nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(20, 2),
        ).double()  # fmt: skip
        rows = torch.randn(5, 3, 6, 6, dtype=torch.float64)
        reference = copy.deepcopy(model)
        reference(rows).square().sum().backward()
        convert_sync_batchnorm(model)
        wrapped = DistributedDataParallel(model.to(memory_format=memory_format))
        mine = rows[[slice(0, 2), slice(2, 3), slice(3, 5)][dist.rank()]].contiguous(memory_format=memory_format)
        (3 * wrapped(mine).square().sum()).backward()  # DDP divides by the number of ranks
        largest = max(expected.grad.abs().max() for expected in reference.parameters())
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert (parameter.grad - expected.grad).abs().max() <= 1e-12 * largest


@ranks(2)
def test_ddp_on_cpu_accepts_what_was_torchs_sync_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4))
    assert convert_sync_batchnorm(model) == ["1"]
    DistributedDataParallel(model)(torch.randn(2, 3)).sum().backward()


@ranks(2)
def test_half_precision_input_has_statistics_in_fp32_and_output_as_it_came() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        check_half_precision(dtype)


def check_half_precision(dtype: torch.dtype) -> None:
    module = layer("2d", torch.float32)
    reference = copy.deepcopy(module)
    convert_sync_batchnorm(module)
    rows, grad = batch("2d", 5, torch.float32, 0).to(dtype), batch("2d", 5, torch.float32, 1).to(dtype)
    output, grad_rows = run(reference, rows.float(), grad.float())
    mine = slice(0, 3) if dist.rank() == 0 else slice(3, 5)
    with torch.autocast("cpu", dtype=dtype):
        my_output, my_grad_rows = run(module, rows[mine], grad[mine])
    assert_close(my_output, output[mine].to(dtype), 4 * torch.finfo(dtype).eps)
    assert_close(my_grad_rows, grad_rows[mine].to(dtype), 4 * torch.finfo(dtype).eps)
    assert_close(module.running_var, reference.running_var, 1e-6)
    dist.all_reduce(module.weight.grad)
    assert_close(module.weight.grad, reference.weight.grad, 1e-5)
