"""torch's activation checkpointing in the user's model: the recomputed forward draws the numbers of the first one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts
from torch.utils.data import Dataset, TensorDataset

import paceline
import samples
from worlds import launch

WIDTH = 6
Run = Callable[[nn.Module, Tensor], Tensor]


class Part(nn.Module):
    """Dropout, stochastic depth and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.tanh(self.up(x))) * (torch.rand(len(x), 1, dtype=x.dtype) < 0.8)
        return x + self.drop(self.down(hidden + 0.1 * paceline.noise(hidden)))


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.last = how, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.parts, self.drop = nn.ModuleList(Part() for _ in range(3)), nn.Dropout(0.2)
        if how == "composable":
            for part in self.parts:
                composable(part)

    def forward(self, x: Tensor) -> Any:
        hidden = self.drop(self.first(x))
        if self.how.startswith("sequential"):
            reentrant = self.how.endswith("reentrant")
            hidden = checkpoint_sequential(nn.Sequential(*self.parts), 2, hidden, use_reentrant=reentrant)
        else:
            for part in self.parts:
                hidden = HOWS[self.how](part, hidden)
        return self.last(self.drop(hidden))


def two_levels(part: nn.Module, x: Tensor, *, outer: bool, inner: bool) -> Tensor:
    def run(x: Tensor) -> Tensor:
        return part.drop(checkpoint(part, part.drop(x), use_reentrant=inner))

    return checkpoint(run, x, use_reentrant=outer)


class OwnCheckpoint(torch.autograd.Function):
    """As other libraries have it."""

    @staticmethod
    def forward(ctx: Any, part: nn.Module, x: Tensor) -> Any:
        ctx.part, ctx.state = part, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return part(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            result = ctx.part(x)
        torch.autograd.backward(result, gradient)
        return None, x.grad


def save_addmm() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


HOWS: dict[str, Run] = {
    "plain": lambda part, x: part(x),
    "nested, plain": lambda part, x: part.drop(part(part.drop(x))),
    "composable": lambda part, x: part(x),
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "not reentrant, no state": functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False),
    "reentrant, no state": functools.partial(checkpoint, use_reentrant=True, preserve_rng_state=False),
    "selective": functools.partial(checkpoint, use_reentrant=False, context_fn=save_addmm),
    "to the end": functools.partial(checkpoint, use_reentrant=False, early_stop=False, determinism_check="none"),
    "own function": lambda part, x: OwnCheckpoint.apply(part, x),
    **{
        f"nested, {outer} {inner}": functools.partial(two_levels, outer=bool(outer), inner=bool(inner))
        for outer in (0, 1)
        for inner in (0, 1)
    },
}
ALL = [*HOWS, "sequential", "sequential, reentrant"]
SOME = ["plain", "not reentrant", "reentrant, no state", "own function", "nested, 0 1"]
TWICE = ["plain", "not reentrant", "not reentrant, no state", "nested, 0 0", "sequential"]
REENTRANT = ["reentrant", "reentrant, no state", "own function", "nested, 0 1", "nested, 1 0", "nested, 1 1"]
REENTRANT += ["sequential, reentrant"]
NOT_REENTRANT = [how for how in ALL if how not in REENTRANT]
if not samples.ALL:  # all of them are trained on one rank
    SOME, TWICE = SOME[2:], TWICE[2:4]


def by_loop(loop: str, hows: list[str], **settings: Any) -> dict[str, dict[str, Tensor]]:
    warnings.simplefilter("ignore")
    return {how: LOOPS[loop](how, settings) for how in hows}


def sgd_trainer(model: nn.Module, settings: dict[str, Any]) -> paceline.Trainer:
    fixed: dict[str, Any] = {"batch": 10, "precision": "fp64", "run": False, "quiet": True, "device": "cpu"}
    return paceline.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), **fixed, **settings)


def sums() -> TensorDataset:
    inputs = torch.randn(26, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def net_of(how: str) -> Net:
    torch.manual_seed(0)
    return Net(how)


def weights_after(trainer: paceline.Trainer) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in trainer.state_dict().items()}


def in_train(how: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    trainer = sgd_trainer(net_of(how), {"criterion": nn.MSELoss(), **settings})
    trainer.train(sums(), epochs=1)
    return weights_after(trainer)


def with_penalty(model: Any, batch: Any) -> Tensor:
    """Backward passes twice through what is recomputed."""
    inputs, targets = batch[0].requires_grad_(), batch[1]
    outputs = model(inputs)
    slopes = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)[0]
    return functional.mse_loss(outputs, targets) + 0.1 * slopes.square().sum(1).mean()


def two_forwards(how: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    """Of different samples, before one backward, which runs outside of what the forward ran in."""
    trainer = sgd_trainer(net_of(how), settings)
    for inputs, targets in trainer.loader(sums()):
        one = trainer.compute(lambda model, x: model(x), inputs)
        other = trainer.compute(lambda model, x: model(x * 0.5), inputs)
        assert not torch.equal(trainer.model.drop(inputs), inputs)  # outside of a step: torch's
        trainer.backward((one - targets).square().mean() + (one - other).square().mean(), weight=len(inputs))
        trainer.step()
    return weights_after(trainer)


def own_forwards(how: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    trainer = sgd_trainer(net_of(how), {"criterion": nn.MSELoss(), **settings})
    for batch in trainer.loader(sums()):
        trainer.backward(trainer.forward(batch))
        trainer.step()
    return weights_after(trainer)


LOOPS: dict[str, Callable[[str, dict[str, Any]], dict[str, Tensor]]] = {
    "train": in_train,
    "penalty": lambda how, settings: in_train(how, {"criterion": None, "loss_fn": with_penalty, **settings}),
    "two forwards": two_forwards,
    "own forwards": own_forwards,
}


@functools.cache
def without_checkpoints(loop: str) -> dict[str, dict[str, Tensor]]:
    """On one rank, without checkpoints."""
    states: dict[str, dict[str, Tensor]] = launch(by_loop, ranks=1, loop=loop, hows=["plain", "nested, plain"])
    return states


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("loop", "hows", "ranks", "settings"),
    [
        ("train", ALL, 1, {}),
        ("train", SOME, 2, {"strategy": "fsdp", "accumulate": 2}),
        ("two forwards", SOME, 2, {}),
        ("penalty", TWICE, 2, {}),
        pytest.param("train", ALL, 2, {"strategy": "ddp"}, marks=pytest.mark.nightly),
        pytest.param("own forwards", ALL, 2, {}, marks=pytest.mark.nightly),
        pytest.param("two forwards", NOT_REENTRANT, 2, {"strategy": "fsdp"}, marks=pytest.mark.nightly),
    ],
)
def test_a_recomputed_forward_draws_the_numbers_of_the_first_one(
    loop: str, hows: list[str], ranks: int, settings: Any
) -> None:
    one = without_checkpoints(loop)
    found = launch(by_loop, ranks=ranks, loop=loop, hows=hows, **settings)
    apart = {}
    for how, state in found.items():
        expected = one["nested, plain" if how.startswith("nested") else "plain"]
        apart[how] = max(float((state[name] - weight).abs().max()) for name, weight in expected.items())
    assert {how: worst for how, worst in apart.items() if worst > 1e-9} == {}


def codes_of_loops(hows: list[str], loop: str) -> dict[str, str]:
    warnings.simplefilter("ignore")
    found = {}
    for how in hows:
        try:
            LOOPS[loop](how, {"strategy": "fsdp"})
        except paceline.errors.TrainError as error:
            found[how] = error.code
    return found


def test_two_forwards_of_sharded_blocks_that_a_backward_of_their_own_recomputes_are_refused() -> None:
    """torch's FSDP2 would not reduce the gradients of one of them."""
    hows = REENTRANT if samples.ALL else ["reentrant", "own function"]
    assert launch(codes_of_loops, ranks=2, hows=hows, loop="two forwards") == dict.fromkeys(
        hows, "train.gradients-not-reduced"
    )


class Tokens(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.arange(8) * (index + 1) % 50
        return {"input_ids": row, "labels": row}


def train_gpt2(kinds: list[str]) -> list[dict[str, Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    warnings.simplefilter("ignore")  # the method has another name now

    found = []
    for kind in kinds:
        torch.manual_seed(0)
        sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 50}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        if kind:
            reentrant = kind == "reentrant"
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        trainer = sgd_trainer(model, {})
        trainer.train(Tokens(), max_steps=3)
        found.append(weights_after(trainer))
    return found


@pytest.mark.timeout(300)
def test_gradient_checkpointing_of_transformers_keeps_the_dropout_of_gpt2() -> None:
    [expected] = launch(train_gpt2, ranks=1, kinds=[""])
    for found in launch(train_gpt2, ranks=2, kinds=["reentrant", "not reentrant"]):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)


def train_compiled(cases: list[tuple[str, Any]]) -> list[dict[str, Tensor]]:
    warnings.simplefilter("ignore")
    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    return [in_train(how, {"compile": compiled}) for how, compiled in cases]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_compiled_blocks_inside_a_checkpoint_are_recomputed_with_their_dropout() -> None:
    """The last batch is short, and runs eagerly both times."""
    cases = [("plain", False), ("not reentrant", True), ("reentrant", True)]
    expected, *others = paceline.launch(train_compiled, ranks=1, cases=cases)
    for found in others:
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)
