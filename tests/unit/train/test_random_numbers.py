"""What the start table says about dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.config.recipe import Config
from paceline.runtime.noise import NoiseContext
from paceline.runtime.sample_keys import SampleKeys
from paceline.train.random_numbers import dropout_rows

DATA = TensorDataset(torch.zeros(4, 3), torch.zeros(4, 1))


class Drops(nn.Linear):
    """Calls the function with a probability of its own."""

    def __init__(self, p: float) -> None:
        super().__init__(3, 3)
        self.attention_dropout = p


def table_of(model: nn.Module, capsys: pytest.CaptureFixture[str], **settings: str) -> str:
    model = nn.Sequential(model, nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = paceline.Trainer(model, optimizer, criterion=nn.MSELoss(), batch=4, run=False, device="cpu", **settings)
    capsys.readouterr()
    trainer.train(DATA, max_steps=1)
    return "\n".join(line for line in capsys.readouterr().out.splitlines() if line.startswith("  dropout"))


def test_start_table_says_that_dropout_is_by_sample(capsys: pytest.CaptureFixture[str]) -> None:
    assert "by sample" in table_of(nn.Dropout(0.1), capsys)
    assert "the same masks on any layout" in table_of(Drops(0.1), capsys)


def test_start_table_says_that_dropout_is_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert "per rank" in table_of(nn.Dropout(0.1), capsys, dropout="per-rank")


def test_start_table_is_silent_about_models_without_dropout(capsys: pytest.CaptureFixture[str]) -> None:
    assert table_of(nn.Dropout(0.0), capsys) == ""
    assert table_of(Drops(0.0), capsys) == ""


@pytest.mark.parametrize(("dropout", "except_fused"), [("by-sample", True), ("exact", False)])
def test_start_table_excepts_fused_attention_on_gpus(dropout: str, except_fused: bool) -> None:
    keys = SampleKeys(0, torch.device("cpu"))
    keys.device, keys.exact_attention = torch.device("cuda"), dropout == "exact"
    rows = dropout_rows(
        Config.from_dict({"dropout": dropout}), nn.LSTM(2, 2, 2, dropout=0.1), NoiseContext(0, keys=keys)
    )
    assert ("except in fused attention" in rows["dropout"].reason) is except_fused


def test_start_table_names_data_parallel() -> None:
    rows = dropout_rows(Config.from_dict({}), nn.MultiheadAttention(2, 1, dropout=0.1), NoiseContext(0))
    assert (rows["dropout"].value, 'strategy="dp"' in rows["dropout"].reason) == ("per GPU", True)
    assert dropout_rows(Config.from_dict({}), nn.LSTM(2, 2, 1), NoiseContext(0)) == {}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(3, 3), nn.Dropout(0.0)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.drop(self.linear(inputs)) + inputs


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"accumulate": 3}, {"recompute": "full"}, {"compile": True}])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_dropout_that_begins_later_is_by_sample_from_its_first_step(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: compiled(*args, **{**options, "backend": "eager"}))

    def losses(**settings: Any) -> list[float]:
        torch.manual_seed(0)
        blocks = [Block() for _ in range(2)]
        model = nn.Sequential(*blocks, nn.Linear(3, 1)).double()
        data = TensorDataset(torch.randn(24, 3).double(), torch.randn(24, 1).double())

        class Later:
            def on_step(self, step: paceline.Step) -> None:
                for block in blocks:
                    block.drop.p = 0.5 if step.step >= 2 else 0.0

        trainer = paceline.Trainer(
            model, {"name": "sgd", "lr": 0.1}, criterion=nn.MSELoss(), batch=6, run=False, quiet=True, device="cpu",
            log_every=1, callbacks=[Later()], **settings,
        )  # fmt: skip
        return trainer.train(data, max_steps=4).losses

    assert losses(**settings) == pytest.approx(losses(), rel=1e-9)
