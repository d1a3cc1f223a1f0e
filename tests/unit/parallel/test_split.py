from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
import tiny
from paceline.config.sections import SplitSection
from paceline.errors import PacelineError
from paceline.models.gpt import GPT
from paceline.parallel import split as splitting
from paceline.parallel.split import _layers as layers_of
from paceline.parallel.split import spans_devices, split

TWO = ["cpu", "cpu"]


def train(name: str, **changes: Any) -> tuple[list[float], Tensor, list[Any]]:
    recipe = tiny.recipe(name, batch=10, precision="fp64", clip_norm=0.5, train={"max_steps": 5}, **changes)
    trainer = paceline.Trainer.from_config(paceline.Config.from_dict(recipe))
    history = trainer.train()
    return history.losses, tiny.weights(trainer), [record["loss"] for record in history.evaluations]


@pytest.mark.parametrize("name", ["gpt", "padded-gpt", "mlp", "vae", "resnet", "hf-gpt2"])
def test_a_split_model_trains_as_a_whole_one(name: str) -> None:
    assert_same(train(name), train(name, strategy="split", split={"devices": TWO}))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["gpt", "padded-gpt", "vae", "hf-gpt2"])
def test_parts_that_follow_each_other_give_the_same_step(name: str, accumulate: int) -> None:
    """Ten samples in parts of 4, 3, 3, or 5 in parts of 2, 2, 1; the vae's noise belongs to its samples."""
    whole = train(name, accumulate=accumulate)
    parts = train(name, accumulate=accumulate, strategy="split", split={"devices": TWO, "microbatches": 3})
    assert_same(whole, parts)


def assert_same(expected: tuple[list[float], Tensor, list[Any]], found: tuple[list[float], Tensor, list[Any]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-12) and found[2] == pytest.approx(expected[2], rel=1e-12)
    assert torch.allclose(found[1], expected[1], rtol=1e-10, atol=1e-13)


class Reports(nn.Module):
    """A loss with a metric beside it; the metric of parts is weighed as the loss is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        logits = self.layers(inputs)
        hits = (logits.argmax(1) == targets).double().mean()
        return {"loss": nn.functional.cross_entropy(logits, targets), "metrics": {"hits": hits}}


def test_metrics_beside_the_loss_are_those_of_the_whole_micro_batch() -> None:
    found = []
    for changes in ({}, {"strategy": "split", "split": {"devices": TWO, "microbatches": 3}}):
        torch.manual_seed(0)
        trainer = paceline.Trainer(Reports(), batch=16, run=False, quiet=True, log_every=1, **changes)  # type: ignore[arg-type]
        found.append([record["hits"] for record in trainer.train(tiny.blobs(), epochs=2).steps])
    assert found[0] == pytest.approx(found[1]) and len(set(found[0])) > 1


def moves(monkeypatch: pytest.MonkeyPatch, model: nn.Module, devices: int, **settings: Any) -> list[int]:
    """The numbers of the devices that layers were called on, in a world where a device is known by its number."""
    called: list[int] = []
    numbers = [torch.device("cpu", number) for number in range(devices)]
    monkeypatch.setattr(splitting, "devices_of", lambda settings: numbers)
    monkeypatch.setattr(splitting, "_to", lambda tensor, device: called.append(device.index) or tensor)
    split(model, SplitSection(**settings))
    return called


def test_gpts_head_computes_where_the_embedding_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT(layers=4, width=16, heads=2, vocabulary=32, context=8)
    called = moves(monkeypatch, model, devices=2, balance=[1, 3])
    model(torch.zeros(1, 8, dtype=torch.long))
    # Tokens, positions and dropout; one block, three blocks; the norm; the head, and what it gives.
    assert called == [0, 0, 0, *[0], *[1, 1, 1], *[1], *[0, 0]]


def test_the_output_of_an_inner_sequential_returns_to_the_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = paceline.get_model("vae")(size=4, channels=1, width=8, latent=2)
    called = moves(monkeypatch, model, devices=3, balance=[1, 4, 1])
    model(torch.rand(2, 1, 4, 4))
    # The encoder's three layers and its result, the decoder's three and (as the last layer and as a whole) its result.
    assert called == [0, 1, 1, *[0], *[1, 1, 2], *[0, 0]]


def test_layers_are_what_is_before_the_blocks_the_blocks_and_what_is_after() -> None:
    model = GPT(layers=2, width=16, heads=2)
    names = [[name for name, _ in part] for part in layers_of(model, None)]
    assert names == [["tokens", "positions", "drop"], ["blocks.0", "blocks.1"], ["norm", "head"]]
    plain = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Conv1d(1, 1, 1))
    assert [name for name, _ in layers_of(plain, None)[1]] == ["0", "1", "2", "3"]


def test_balance_may_be_counts_or_names() -> None:
    for balance in ([1, 2, 1], ["blocks.1", "blocks.3"], ["blocks.0", "blocks.1", "blocks.3"]):
        said = split(GPT(layers=4, width=16, heads=2), SplitSection(devices=["cpu", "cpu:0", "cpu"], balance=balance))
        assert [part.split(" of ")[0][-1] for part in said.split(";")] == ["1", "2", "1"]


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"devices": ["cpu", "cuda:77"]}, "layout.no-such-device"),
        ({"devices": ["cpu", "tape"]}, "layout.no-such-device"),
        ({"devices": ["cpu"]}, "layout.one-device"),
        ({"devices": ["cpu"] * 3}, "layout.fewer-layers-than-devices"),
        ({"devices": TWO, "balance": [1, 2]}, "layout.split-balance"),
        ({"devices": TWO, "balance": [2]}, "layout.split-balance"),
        ({"devices": TWO, "balance": ["blocks.0"]}, "layout.split-balance"),
        ({"devices": TWO, "balance": ["blocks.7"]}, "layout.no-such-layer"),
    ],
)
def test_an_impossible_placement_is_refused(settings: dict[str, Any], code: str) -> None:
    with pytest.raises(PacelineError) as caught:
        train("gpt", strategy="split", split=settings)
    assert caught.value.code == code


def test_parts_of_a_batch_norms_batch_are_refused() -> None:
    with pytest.raises(PacelineError) as caught:
        train("resnet", strategy="split", split={"devices": TWO, "microbatches": 2})
    assert caught.value.code == "layout.microbatches-and-batchnorm"


def test_a_micro_batch_that_is_looked_for_needs_the_model_on_one_device() -> None:
    with pytest.raises(PacelineError) as caught:
        train("gpt", strategy="split", split={"devices": TWO}, micro_batch="auto")
    assert caught.value.code in ("layout.finder-and-layout", "train.finder-on-cpu")


def test_a_model_on_several_devices_is_told_from_one_that_is_partly_on_meta() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    assert not spans_devices(model)
