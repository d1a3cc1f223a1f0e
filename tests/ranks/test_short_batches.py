"""How often a compiled model is compiled. Graphs are traced but run by torch's `eager` backend, which takes no time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import TensorDataset

import paceline
from worlds import run_on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*torch.jit")  # of Dynamo itself


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
    counters.clear()


def compilations() -> int:
    return int(counters["stats"]["unique_graphs"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.batches: list[int] = []  # that ran eagerly

    def forward(self, hidden: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.batches.append(len(hidden))
        return hidden + torch.tanh(self.inner(hidden))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.head(hidden if hidden.dim() == 2 else hidden.mean(1))
        return scores


def rows(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.arange(count) % 4)


def trainer(model: nn.Module, **settings: Any) -> paceline.Trainer:
    defaults: dict[str, Any] = {"batch": 8, "run": False, "quiet": True, "device": "cpu", "log_every": 1}
    criterion = nn.CrossEntropyLoss()
    return paceline.Trainer(model, {"name": "sgd", "lr": 0.1}, criterion=criterion, **{**defaults, **settings})


@pytest.mark.parametrize(
    "settings",
    [{"compile": True}, {"compile": "model"}, {"compile": True, "recompute": "full"}],
    ids=["blocks", "model", "recomputed"],
)
def test_a_short_last_batch_is_not_compiled(settings: dict[str, Any]) -> None:
    """22 samples are batches of 8, 8 and 6; an evaluation of 13 has 8 and 5, and one of 11 has 8 and 3."""
    torch.manual_seed(0)
    plain, model = Blocks(), Blocks()
    model.load_state_dict(plain.state_dict())
    expected = trainer(plain).train(rows(22), epochs=2).steps
    own = trainer(model, **settings)
    found = own.train(rows(22), epochs=2).steps
    assert [each["loss"] for each in found] == pytest.approx([each["loss"] for each in expected], rel=1e-6)
    assert compilations() == 1
    for count in (13, 13, 11):
        own.evaluate(rows(count))
    own.predict(rows(21))
    assert compilations() == 2  # without gradients


def test_a_short_last_batch_on_two_ranks_is_not_compiled() -> None:
    def on_rank() -> None:
        torch.manual_seed(0)
        own = trainer(Blocks(), compile=True, strategy="ddp")
        own.train(rows(23), epochs=2)  # of the last 7 samples, rank 0 has 4 and rank 1 has 3
        own.train(rows(17), epochs=4)  # rank 1 has none of the last one
        assert compilations() == 1

    run_on_ranks(2, on_rank)


def test_batches_of_different_lengths_are_compiled_for_any_length() -> None:
    model = Blocks()
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 7, 11, 9, 13, 10]
    batches = [(torch.randn(8, length, 6, generator=generator), torch.arange(8) % 4) for length in lengths]
    trainer(model, compile=True).train(batches, epochs=2)
    assert compilations() <= 3
    assert not any(block.batches for block in model.blocks)


def test_a_batch_size_that_keeps_changing_is_compiled() -> None:
    """After 16 eager ones, torch compiles for any size."""
    model = Blocks()
    sizes = [8, *[5, 7, 4, 6] * 10]
    batches = [(torch.randn(size, 6), torch.arange(size) % 4) for size in sizes]
    trainer(model, compile=True).train(batches, epochs=1)
    assert len(model.blocks[0].batches) == 16
    assert compilations() == 2


@pytest.mark.parametrize("compiled", [True, "model"])
def test_layers_of_torch_are_compiled(compiled: bool | str) -> None:
    """torch's own `module.compile()` compiles nothing of a model or block whose class is in torch.nn."""
    layers = [nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True) for _ in range(2)]
    model = nn.Sequential(nn.Unflatten(1, (1, 6)), *layers, nn.Flatten(), nn.Linear(6, 4))
    trainer(model, compile=compiled).train(rows(16), epochs=2)
    assert compilations() == (2 if compiled is True else 1)  # the input of the first block needs no gradient


def test_halves_of_a_compiled_model_may_be_rounded_to_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    """The loss has this dtype as well."""

    def warnings_of(loss_fn: Callable[[Any, Any], Tensor]) -> str:
        torch.manual_seed(0)
        paceline.Trainer(
            Blocks(), {"name": "sgd", "lr": 0.1}, loss_fn=loss_fn, accumulate=2, run=False, quiet=True, compile=True,
            device="cpu", batch=8, precision="bf16",
        ).train(rows(16), epochs=1)  # fmt: skip
        return capsys.readouterr().out

    assert warnings_of(lambda model, batch: model(batch[0]).mean() + 3.0) == ""
    assert "from its slices" in warnings_of(lambda model, batch: model(batch[0]).var(0).mean())
