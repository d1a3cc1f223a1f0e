"""Steps of fused optimizers equal torch's own bit for bit, whatever happens to the optimizer in between."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

import paceline
from paceline.optim.fused import FusedStep
from paceline.train.checks.foreign_steps import RequireOwner
from worlds import ranks

Make = Callable[[list[dict[str, Any]]], Optimizer]
KINDS: dict[str, Make] = {
    "sgd": lambda groups: SGD(groups, lr=0.1, weight_decay=0.01, fused=True),
    "sgd with momentum": lambda groups: SGD(groups, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "adam": lambda groups: Adam(groups, lr=0.01, weight_decay=0.1, fused=True),
    "adamw": lambda groups: AdamW(groups, lr=0.01, fused=True),
    "adamw, maximized": lambda groups: AdamW(groups, lr=0.01, maximize=True, fused=True),
    "amsgrad": lambda groups: AdamW(groups, lr=0.01, amsgrad=True, fused=True),
    "tensor as learning rate": lambda groups: AdamW(groups, lr=torch.tensor(0.01), fused=True),
}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    # Not bfloat16: torch's fused SGD with momentum is not reproducible in it on the CPU.
    dtypes = (torch.float32, torch.float64, torch.float32, torch.float64, torch.float32)
    return [nn.Parameter(torch.randn(3, 5 + i % 2, generator=generator).to(dtype)) for i, dtype in enumerate(dtypes)]


def groups_of(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:3], "weight_decay": 0.3}, {"params": params[3:]}]


def set_gradients(optimizer: Optimizer, step: int, without: tuple[int, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(step)
    params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(params):
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        parameter.grad = None if number in without else gradient


def replace_state(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = value * 0.5 if key != "step" else value.clone()


def swap_state(optimizer: Optimizer) -> None:
    """The keys change places, the values remain in order."""
    keys, values = list(optimizer.state), list(optimizer.state.values())
    optimizer.state.clear()
    optimizer.state |= dict(zip([*keys[2:3], *keys[1:2], *keys[:1], *keys[3:]], values, strict=True))


def replace_parameter(optimizer: Optimizer) -> None:
    old = optimizer.param_groups[0]["params"][0]
    new = nn.Parameter(old.detach() * 2)
    optimizer.param_groups[0]["params"][0] = new
    if old in optimizer.state:
        optimizer.state[new] = optimizer.state.pop(old)


def to_double(optimizer: Optimizer) -> None:
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.data = parameter.data.double()
    for key, value in optimizer.state.get(parameter, {}).items():
        optimizer.state[parameter][key] = value.double() if key != "step" else value


EVENTS: dict[str, Callable[[Optimizer], object]] = {
    "another learning rate": lambda o: o.param_groups[0].update(lr=0.003),
    "other settings": lambda o: o.param_groups[1].update(weight_decay=0.2, maximize=True),
    "another group": lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones(4))]}),
    "loaded state": lambda o: o.load_state_dict(copy.deepcopy(o.state_dict())),
    "cleared state": lambda o: o.state.clear(),
    "emptied state": lambda o: [state.clear() for state in o.state.values()],
    # Not with momentum: torch's own step fails.
    "emptied state of the last parameter": lambda o: "betas" in o.defaults and list(o.state.values())[-1].clear(),
    "foreach": lambda o: "momentum" in o.param_groups[0] and o.param_groups[0].update(foreach=True),
    "replaced state": replace_state,
    "state of another parameter": swap_state,
    "replaced parameter": replace_parameter,
    "another dtype": to_double,
    "moved to another group": lambda o: o.param_groups[1]["params"].insert(0, o.param_groups[0]["params"].pop()),
    "removed parameter": lambda o: o.state.pop(o.param_groups[1]["params"].pop(), None),
    "hook": lambda o: o.register_step_pre_hook(lambda *arguments: o.param_groups[0].update(lr=0.02)),
    "patched step": lambda o: setattr(o, "step", lambda: None),
    "not fused": lambda o: o.param_groups[0].update(fused=False, foreach=False),
    "momentum": lambda o: "momentum" not in o.param_groups[0] or o.param_groups[0].update(momentum=0.0, nesterov=False),
}


@pytest.fixture
def torch_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Optimizer]]:
    """The optimizers that took a step of torch's own, in order."""
    taken: list[Optimizer] = []
    monkeypatch.setattr(Optimizer, "_optimizer_step_code", lambda self: taken.append(self))
    yield taken


def run(make: Make, *, fast: bool, event: Callable[[Optimizer], object] | None = None) -> list[Any]:
    first = parameters()
    optimizer = make(groups_of(first))
    step = FusedStep(optimizer, RequireOwner).step if fast else lambda: optimizer.step()
    for number in range(9):
        if number == 6 and event is not None:  # step 5 was not torch's
            event(optimizer)
        set_gradients(optimizer, number, without=(1, 4) if number in (2, 3, 7) else (0,) if number == 8 else ())
        step()
    params = first + [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [[parameter.detach() for parameter in params], optimizer.state_dict()]


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_torchs_bit_for_bit_with_gradients_that_come_and_go(kind: str) -> None:
    assert_same(run(KINDS[kind], fast=True), run(KINDS[kind], fast=False))


@pytest.mark.parametrize("kind", ["sgd", "sgd with momentum", "adamw"])
@pytest.mark.parametrize("event", EVENTS)
def test_steps_equal_torchs_after_a_change_to_the_optimizer(kind: str, event: str) -> None:
    expected = run(KINDS[kind], fast=False, event=EVENTS[event])
    assert_same(run(KINDS[kind], fast=True, event=EVENTS[event]), expected)


def test_a_step_that_somebody_wrapped_is_called_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    called, original = [], AdamW.step

    @functools.wraps(original)
    def counted(self: AdamW, *arguments: Any) -> Any:
        called.append(self)
        return original(self, *arguments)

    monkeypatch.setattr(AdamW, "step", counted)
    run(KINDS["adamw"], fast=True)
    assert len(called) == 9


def test_a_sparse_gradient_raises_the_error_of_torch() -> None:
    optimizer = AdamW(parameters(), fused=True)
    fused = FusedStep(optimizer, RequireOwner)
    for number in range(2):
        set_gradients(optimizer, number)
        fused.step()
    first = optimizer.param_groups[0]["params"][0]
    first.grad = first.grad.to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        fused.step()


@pytest.mark.parametrize("kind", ["sgd", "sgd with momentum", "adam", "adamw"])
def test_only_the_first_step_and_those_with_other_gradients_are_torchs(kind: str, torch_steps: list[Any]) -> None:
    optimizer = KINDS[kind](groups_of(parameters()))
    fused = FusedStep(optimizer, RequireOwner)
    counts = []
    for without in ((), (), (), (1,), (1,), ()):
        set_gradients(optimizer, 0, without)
        fused.step()
        counts.append(len(torch_steps))
    assert counts == [1, 1, 1, 2, 2, 3]


def test_the_flags_of_a_loss_scaler_scale_gradients_and_skip_a_step() -> None:
    results = []
    for fast in (True, False):
        optimizer: Any = AdamW(parameters()[:1], lr=0.01, fused=True)
        fused = FusedStep(optimizer, RequireOwner)
        for number, (scale, overflow) in enumerate([(1.0, 0.0), (8.0, 0.0), (8.0, 1.0), (4.0, 0.0)]):
            set_gradients(optimizer, number)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(overflow)
            fused.step() if fast else optimizer.step()
        results.append([optimizer.param_groups[0]["params"][0].detach(), optimizer.state_dict()])
    assert_same(*results)
    assert results[0][1]["state"][0]["step"] == 3


def trained(register: Callable[[Optimizer], object] = lambda optimizer: None, **settings: Any) -> paceline.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    settings = {"optimizer": {"name": "adamw", "lr": 0.01}} | settings
    optimizer = settings.pop("optimizer")
    made = optimizer(model) if callable(optimizer) else optimizer
    trainer = paceline.Trainer(model, made, criterion=cross_entropy, batch=4, quiet=True, run=False, **settings)
    register(trainer.optimizer)
    trainer.train(batches(), max_steps=12)
    return trainer


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 6, generator=generator), torch.tensor([0, 1, 2, 1])) for _ in range(12)]


def test_a_training_equals_a_plain_loop_and_takes_one_step_of_torchs(torch_steps: list[Any]) -> None:
    model = trained().model
    assert len(torch_steps) == 1
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = AdamW(plain.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    for inputs, targets in batches():
        optimizer.zero_grad()
        cross_entropy(plain(inputs), targets).backward()
        optimizer.step()
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))


def test_an_optimizer_passed_by_the_user_is_stepped_the_same_way_also_under_a_scheduler(torch_steps: list[Any]) -> None:
    trained(lambda o: StepLR(o, 1), optimizer=lambda model: AdamW(model.parameters(), lr=0.01, fused=True))
    assert len(torch_steps) == 1


@ranks(2)
def test_on_two_ranks_one_step_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Optimizer] = []
    monkeypatch.setattr(Optimizer, "_optimizer_step_code", lambda self: taken.append(self))
    trained()
    assert len(taken) == 1


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_on_steps_are_called_in_every_step(kind: str) -> None:
    called: list[object] = []
    trained(lambda optimizer: getattr(optimizer, f"register_step_{kind}_hook")(lambda *arguments: called.append(1)))
    assert len(called) == 12


def test_global_hooks_are_called_in_every_step() -> None:
    called: list[object] = []
    handle = register_optimizer_step_post_hook(lambda *arguments: called.append(1))
    try:
        trained()
    finally:
        handle.remove()
    assert len(called) == 12


def test_a_replaced_step_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    trained(lambda optimizer: setattr(optimizer, "step", lambda: called.append(1)))
    assert len(called) == 12
    monkeypatch.setattr(AdamW, "step", lambda self: called.append(1))
    trained()
    assert len(called) == 24


def test_a_profile_names_the_steps_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")  # read once: otherwise it logs in all tests after this one
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        trained()
    assert [event.count for event in profile.key_averages() if event.key == "Optimizer.step#AdamW.step"] == [12]
