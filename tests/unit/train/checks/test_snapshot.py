"""A forward in a snapshot leaves nothing behind, whatever it changes."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter, OrderedDict, deque
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from paceline.train.checks import snapshot


class Note:
    __slots__ = ("text",)

    def __init__(self) -> None:
        self.text = "before"


class Meter:
    def __init__(self) -> None:
        self.total, self.values = 0.0, [1.0]


class Locked(Meter):
    """Used by a thread as well."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Restless(nn.Module):
    """Changes everything that it can reach."""

    instances = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("wide", torch.zeros(1).expand(3))
        self.calls, self.cache, self.last = 0, None, torch.zeros(4)
        self.history, self.recent, self.names = [1, [2]], deque([1], maxlen=2), {"a"}
        self.table, self.order, self.counted = {"x": 1}, OrderedDict(a=1), Counter(a=1)
        self.array, self.ids = numpy.arange(3), itertools.count()
        self.note, self.meter, self.space, self.locked = Note(), Meter(), SimpleNamespace(n=0), Locked()
        self.draws, self.rng, self.generator = random.Random(0), numpy.random.default_rng(0), torch.Generator()
        self.alias = self.history[1]
        self.odd: list[Any] = [threading.Lock(), open, iter([]), (each for each in [1]), memoryview(b"x"), Weird()]

    def forward(self, inputs: Tensor) -> Tensor:
        inputs.mul_(2)
        self.calls += 1
        type(self).instances += 1
        self.cache, self.added = inputs, inputs
        self.last.add_(1)
        self.mean = self.mean + 1
        self.history[1].append(3)
        self.history.insert(0, 9)
        self.recent.append(5)
        self.names.add("b")
        self.table["x"], self.table["y"] = 2, 3
        self.order.move_to_end("a") if "b" in self.order else self.order.update(b=2)
        self.counted["a"] += 1
        self.array += 1
        next(self.ids)
        self.note.text, self.space.n = "after", 1
        self.meter.total += 1
        self.meter.values.append(2.0)
        self.locked.total += 1
        self.draws.random(), self.rng.random(), torch.rand(1, generator=self.generator)
        torch.rand(1), random.random(), numpy.random.rand()
        with torch.no_grad():
            self.layer.weight.clamp_(max=0)
        self.layer.bias.requires_grad_(False)
        self.layer.register_forward_hook(lambda *_: None)
        self.layer.weight.register_hook(lambda _: None)
        return self.norm(self.layer(inputs))


class Weird:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def state(model: Restless) -> list[Any]:
    drawn = [model.draws.getstate(), model.rng.bit_generator.state, model.generator.get_state().tolist()]
    tensors = [t.tolist() for t in (*model.state_dict().values(), model.last)]
    plain = [model.calls, model.cache, model.history, model.recent, model.names, model.table, model.order]
    others = [model.counted, model.array.tolist(), repr(model.ids), model.note.text, vars(model.meter), model.space]
    hooks = [len(model.layer._forward_hooks), len(model.layer.weight._backward_hooks or {})]
    flags = [model.training, [p.requires_grad for p in model.parameters()], hasattr(model, "added"), Restless.instances]
    everywhere = [torch.random.get_rng_state().tolist(), random.getstate(), repr(numpy.random.get_state())]
    return [repr(value) for value in (drawn, tensors, plain, others, hooks, flags, everywhere)]


def test_a_forward_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    model = Restless()
    aliases = [model.mean, model.history, model.history[1], model.table, model.meter]
    inputs = torch.ones(3, 4)
    before = state(model)
    for _ in range(2):
        with snapshot.preserved(model):
            model(snapshot.copied(inputs)).sum().backward()
            model.eval()
            assert state(model) != before and model.layer.weight.grad is not None
        assert state(model) == before
    now = [model.mean, model.history, model.alias, model.table, model.meter]
    assert [id(value) for value in now] == [id(value) for value in aliases]
    assert torch.equal(inputs, torch.ones(3, 4)) and model.layer.weight.grad is None
    assert model.locked.total == 2  # state that another thread may use is left alone
    assert next(model.ids) == 0


def test_gradients_are_as_they_were() -> None:
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.grad = held = torch.ones(1, 2)
    with snapshot.preserved(layer):
        assert layer.weight.grad is None
        layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is held and torch.equal(held, torch.ones(1, 2))


def test_extra_state_outside_of_the_module_is_set_back() -> None:
    outside = [0]

    class Counts(nn.Module):
        def get_extra_state(self) -> Tensor:
            return torch.tensor(outside[0])

        def set_extra_state(self, state: Tensor) -> None:
            outside[0] = int(state)

        def forward(self) -> None:
            outside[0] += 1

    model = Counts()
    with snapshot.preserved(model):
        model()
    assert outside == [0]


def test_variables_that_a_loss_function_has_enclosed_are_set_back() -> None:
    calls, seen = 0, []

    def loss(model: nn.Module, batch: Tensor) -> None:
        nonlocal calls
        calls += 1
        seen.append(batch)

    with snapshot.preserved(loss):
        loss(nn.Identity(), torch.ones(1))
    assert (calls, seen) == (0, [])


def test_a_failing_forward_leaves_nothing_behind() -> None:
    layer = nn.BatchNorm1d(2)
    try:
        with snapshot.preserved(layer):
            layer(torch.randn(3, 2))
            raise ValueError
    except ValueError:
        pass
    assert layer.num_batches_tracked == 0 and torch.equal(layer.running_mean, torch.zeros(2))


class Instances(dict[str, Any]):
    """Creates what it is asked for, like the activations of transformers."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()

    def keys(self) -> Any:
        return list(super().keys())


KINDS = Instances(relu=nn.ReLU)
SEEN: list[Tensor] = []
AVERAGE = torch.ones(())


class UsesGlobals(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        global AVERAGE
        AVERAGE = AVERAGE * 0.9 + inputs.detach().mean() * 0.1
        SEEN.append(inputs)
        return KINDS["relu"](inputs) / AVERAGE


def test_globals_that_a_forward_assigns_or_fills_are_restored() -> None:
    model, before = UsesGlobals(), AVERAGE
    with snapshot.preserved(model, lambda: SEEN.clear()):
        model(torch.rand(3))
        assert SEEN and AVERAGE is not before
    assert not SEEN and AVERAGE is before
    assert dict.__getitem__(KINDS, "relu") is nn.ReLU
