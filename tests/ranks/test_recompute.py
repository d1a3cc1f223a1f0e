"""Recomputation and compilation inside the layouts: the same bits, and the same losses."""

from __future__ import annotations

import functools
import shutil
import warnings
from typing import Any

import pytest
import torch

import paceline
import tiny
import warm
from worlds import launch

KINDS = ("off", "full", "every-2", "selective")
GPT = {"name": "gpt", "layers": 3, "width": 32, "heads": 2, "context": 16, "dropout": 0.1}


def trainer_of(name: str, **changes: Any) -> paceline.Trainer:
    recipe = tiny.recipe(name, **{"batch": 10, "train": {"max_steps": 4}, **changes})
    return paceline.Trainer.from_config(paceline.Config.from_dict(recipe))


def outcomes(cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Losses and final weights and buffers of several trainings, one after the other."""
    found = []
    for name, changes in cases:
        trainer = trainer_of(name, **changes)
        losses = trainer.train().losses
        found.append((losses, {key: value.clone() for key, value in trainer.state_dict().items()}))
    return found


@pytest.mark.parametrize(
    ("strategy", "kinds"), [pytest.param("ddp", KINDS, marks=pytest.mark.nightly), ("fsdp", KINDS[:2])]
)
def test_recomputation_changes_no_bit_on_two_ranks(strategy: str, kinds: tuple[str, ...]) -> None:
    """Dropout under autocast, a batch norm over all ranks with its running statistics, and noise."""
    models: list[tuple[str, dict[str, Any]]] = [
        ("gpt", {"model": GPT, "precision": "bf16"}),
        ("resnet", {"accumulate": 2}),
        ("vae", {"blocks": ["encoder", "decoder"]}),
    ]
    shared = {"strategy": strategy, "train": {"max_steps": 2}}
    cases = [(name, {**shared, **changes, "recompute": kind}) for name, changes in models for kind in kinds]
    found = launch(outcomes, ranks=2, cases=cases)
    for number in range(0, len(cases), len(kinds)):
        expected, *others = found[number : number + len(kinds)]
        for losses, state in others:
            assert losses == expected[0]
            assert all(torch.equal(state[key], value) for key, value in expected[1].items())


def switched_on_the_way(strategy: str, kinds: list[str]) -> list[tuple[list[float], int, str]]:
    return [switched_on_to(kind, strategy) for kind in kinds]


def switched_on_to(kind: str, strategy: str) -> tuple[list[float], int, str]:
    trainer = trainer_of("gpt", strategy=strategy, model=GPT)
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    # A layer in a block is called once more for every forward that is computed again.
    trainer.model.blocks[0].norm1.register_forward_hook(count)  # type: ignore[index, union-attr]
    first = trainer.train(max_steps=2).losses
    trainer.enable_gradient_checkpointing(kind)
    return first + trainer.train(max_steps=4).losses, calls, trainer.config.recompute


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.nightly), "fsdp"])
def test_it_can_be_switched_on_between_two_calls_of_train(strategy: str) -> None:
    found = launch(switched_on_the_way, ranks=2, strategy=strategy, kinds=["off", "full"])
    (plain, calls, _), (losses, more_calls, kind) = found
    assert losses == plain and kind == "full" and more_calls == calls + 2


def compiled(cases: list[tuple[str, dict[str, Any]]], backend: str) -> list[list[float]]:
    """`aot_eager` is the compiler without its last step, which takes a C++ compiler minutes."""
    warnings.simplefilter("ignore")  # torch's compiler uses what torch deprecates
    torch.compile = functools.partial(torch.compile, backend=backend)  # type: ignore[assignment]
    return [losses for losses, _ in outcomes(cases)]


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # torch.compile imports it
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
@pytest.mark.parametrize(
    ("strategy", "kinds"),
    [
        pytest.param("ddp", ("full",), marks=pytest.mark.nightly),
        ("fsdp", ("selective",)),
        pytest.param("ddp", ("off",), marks=pytest.mark.nightly),
        pytest.param("fsdp", ("off", "full"), marks=pytest.mark.nightly),
    ],
)
def test_compiled_and_recomputed_blocks_give_the_plain_losses(strategy: str, kinds: tuple[str, ...]) -> None:
    hows: list[dict[str, Any]] = [{}, *({"compile": True, "recompute": kind} for kind in kinds)]
    cases = [("gpt", {"strategy": strategy, **how}) for how in hows]
    warm.import_compiler()
    plain, *others = paceline.launch(compiled, ranks=2, cases=cases, backend="aot_eager")
    for losses in others:
        assert losses == pytest.approx(plain, rel=1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_a_compiled_model_gives_the_plain_losses(backend: str) -> None:
    cases = [("mlp", {}), ("mlp", {"compile": "model"})]
    plain, losses = paceline.launch(compiled, ranks=1, cases=cases, backend=backend)
    assert losses == pytest.approx(plain, rel=1e-5)
