"""Models with dropout have the same loss on any number of ranks and on any layout."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import dropout_models
import tiny
from dropout_models import cell
from heard import heard
from paceline import Trainer, dist
from samples import ALL, sample
from worlds import launch

CORE = [
    cell("gpt2", "ddp:3", accumulate=3),
    cell("gpt2", "fsdp:2", recompute="full"),
    cell("ragged", "ddp:3", accumulate=2),
    cell("gpt2", "fsdp:2", then="ddp:3", accumulate=2),
    cell("gpt", "tp:2"),
    cell("gpt", "pp:2", recompute="full"),
]
MORE = [
    *(cell(model, "ddp:3", accumulate=3) for model in ("vit", "bert", "t5")),
    cell("vit", "fsdp:2", "fp32", recompute="selective"),
    cell("llama", "tp:2", tensor={"sequence": False}),
    *(cell(model, "pp:2") for model in ("sequential", "staged-llama")),
    cell("gpt", "shard=2 tensor=2"),
]
DETECTED_BY = {
    "wrong sample": [cell("ragged", "ddp:2"), cell("gpt", "fsdp:2"), *([cell("vit", "ddp:2")] if ALL else [])],
    "wrong step": [cell("ragged", "ddp:2", accumulate=2), cell("gpt", "fsdp:2", accumulate=2)],
    "flat index": [cell("ragged", "ddp:2"), cell("gpt", "tp:2")],
}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view", "ignore:Grad strides do not match")
@pytest.mark.timeout(600)
def test_a_model_with_dropout_has_the_same_loss_on_every_layout() -> None:
    rows = dropout_models.compare([*CORE, *(MORE if ALL else [])])
    assert {str(each): row for each, row in rows.items() if not row.holds or row.refused} == {}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", list(DETECTED_BY)[: sample(1, 3)])
def test_the_comparison_detects_a_wrong_mask(fault: str) -> None:
    rows = dropout_models.compare(DETECTED_BY[fault], fault)
    assert {str(each): row for each, row in rows.items() if row.loss < 1e-4 or row.refused} == {}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.drop(self.down(self.drop(torch.tanh(self.up(inputs)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tied = Block()
        self.drop, self.blocks, self.out = nn.Dropout(0.3), nn.ModuleList([tied, Block(), tied]), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Any:
        hidden = self.drop(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(hidden)


class TimeMajor(nn.Module):
    """Encoder layers on (tokens, samples, width)."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.3)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(12, 2)

    def forward(self, inputs: Tensor) -> Any:
        tokens = inputs.repeat(1, 3)[..., None].expand(-1, -1, 12).transpose(0, 1)
        return self.out(self.encoder(tokens).mean(0))


def two_views(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    first, second = model(inputs), model(inputs)
    return cross_entropy(first, targets) + (first - second).square().sum(1).mean()


def stacked_views(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    first, second = model(torch.cat([inputs, inputs])).chunk(2)
    return cross_entropy(first, targets) + (first - second).square().sum(1).mean()


def trainer_of(model: Callable[[], nn.Module], **settings: Any) -> Trainer:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        built = model()
    if "loss_fn" not in settings:
        settings["criterion"] = nn.CrossEntropyLoss()
    fixed: dict[str, Any] = {"batch": 10, "precision": "fp64", "run": False, "quiet": True}
    return Trainer(built, torch.optim.SGD(built.parameters(), lr=0.1), **{**fixed, **settings})


def trained(model: Callable[[], nn.Module], **settings: Any) -> list[float]:
    return trainer_of(model, **settings).train(tiny.blobs(26), max_steps=3).losses


def with_callback(**settings: Any) -> list[float]:
    """Runs the model in train mode, copies and saves it, and changes recomputation, after every step."""

    def on_step(record: Any) -> None:
        model = trainer.model
        model(torch.ones(10, 8, dtype=torch.float64)).sum().backward()
        saved = io.BytesIO()
        torch.save(copy.deepcopy(model), saved)
        assert b"ScopedForward" not in saved.getvalue()
        trainer.enable_gradient_checkpointing("full" if record.step % 2 else "off")

    trainer = trainer_of(Net, callbacks=[on_step], **settings)
    return trainer.train(tiny.blobs(26), tiny.blobs(13), max_steps=3).losses


def custom_loop(**settings: Any) -> list[float]:
    trainer = trainer_of(Net, **settings)
    for batch in trainer.loader(tiny.blobs(26)):
        trainer.training_step(batch)
    return [float(parameter.detach().square().sum()) for parameter in trainer.model.parameters()]


def unfrozen(**settings: Any) -> list[float]:
    """DDP is rebuilt after the first step."""
    trainer = trainer_of(Net, callbacks=[lambda record: trainer.model.out.requires_grad_(True)], **settings)
    trainer.model.out.requires_grad_(False)
    return trainer.train(tiny.blobs(26), max_steps=3).losses


def dropout_set_later(**settings: Any) -> list[float]:
    trainer = trainer_of(Net, callbacks=[lambda record: set_dropout(trainer.model, 0.3)], **settings)
    set_dropout(trainer.model, 0.0)
    return trainer.train(tiny.blobs(26), max_steps=3).losses


def set_dropout(model: nn.Module, p: float) -> None:
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = p


def same_programs(**settings: Any) -> dict[str, list[float]]:
    return {
        "a model called twice": trained(Net, loss_fn=two_views, **settings),
        "time-major": trained(TimeMajor, **settings),
        "fewer samples than ranks": trained(Net, batch=2, **settings),
        "a callback": with_callback(**settings),
        "a custom loop": custom_loop(**settings),
        "unfrozen parameters": unfrozen(**settings),
        "dropout that is set later": dropout_set_later(**settings),
    }


@pytest.mark.timeout(300)
def test_masks_do_not_depend_on_what_a_program_does_between_steps() -> None:
    one = launch(same_programs, ranks=1)
    three = launch(same_programs, ranks=3)
    worst = {
        name: max(abs(a - b) / abs(a) for a, b in zip(losses, three[name], strict=True)) for name, losses in one.items()
    }
    assert {name: difference for name, difference in worst.items() if difference > 1e-9} == {}


class Lengths(Dataset[tuple[Tensor, Tensor]]):
    """Batches of different lengths. In the second one, each of two ranks has as many tokens as samples."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(12.0).view(1, 12) * (torch.arange((7, 5, 9)[index // 10]) + index)[:, None]
        return tokens.sin(), torch.tensor(index % 2)


class TokensFirst(TimeMajor):
    def forward(self, inputs: Tensor) -> Any:
        return self.out(self.encoder(inputs.transpose(0, 1)).mean(0))


def with_lengths() -> list[float]:
    return trainer_of(TokensFirst, shuffle=False).train(Lengths(), epochs=1).losses


def test_as_many_tokens_as_samples_are_read_as_in_other_batches() -> None:
    assert launch(with_lengths, ranks=2) == pytest.approx(launch(with_lengths, ranks=1), rel=1e-9)


class LateNoise(nn.Sequential):
    strength = 0.0

    def forward(self, inputs: Tensor) -> Any:
        return super().forward(inputs + torch.randn_like(inputs) if self.strength else inputs)


def switched_on() -> list[str]:
    def switch(record: Any) -> None:
        trainer.model.strength = float(record.step == 2 and dist.rank() == 1)

    trainer = trainer_of(lambda: LateNoise(nn.Linear(8, 2)), callbacks=[switch])
    with heard() as said:
        trainer.train(tiny.blobs(26), max_steps=3)
    return [line for each in dist.all_gather_object(said) for line in each]


def test_a_rank_warns_of_numbers_that_it_begins_to_draw() -> None:
    [warning] = launch(switched_on, ranks=2)
    assert warning.startswith("random numbers: ") and "began in step 3, on rank 1" in warning


def test_rows_that_are_not_known_to_be_samples_keep_the_dropout_of_torch_and_are_noted() -> None:
    trainer = trainer_of(Net, loss_fn=stacked_views)
    trainer.train(tiny.blobs(26), max_steps=1)
    keys = trainer._engine.draw.keys
    assert keys is not None and keys.kept == {"dropout": (20, 8)}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.timeout(300)
def test_blocks_share_a_compiled_graph_and_later_steps_do_not_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: compiled(*args, **{**options, "backend": "eager"}))
    graphs = []
    for dropout in ("per-rank", "by-sample"):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        trainer = dropout_models.trainer_of("gpt", compile="blocks", batch=13, dropout=dropout)
        for steps in (1, 4):
            trainer.train(dropout_models.MODELS["gpt"].data, max_steps=steps)
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == [2, 2, 2, 2]  # one for the four blocks, one for the head
