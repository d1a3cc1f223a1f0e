"""Small models with dropout, and layouts on which they must agree with one process. Tests run a part of them,
benchmarks/dropout_parity.py all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from paceline import ModelSpec, PipelineSpec, Trainer, launch
from paceline.errors import LayoutError
from paceline.models.dropout import functions
from paceline.models.gpt import GPT
from paceline.runtime.sample_keys import SampleKeys
from paceline.tools.testing import comparison
from paceline.tools.testing.comparison import ParityLayout, ParityRow, ParityRun

BOUNDS = {"fp64": 1e-9, "fp32": 1e-5}
VOCABULARY, TOKENS, SAMPLES = 64, 12, 26
STEPS = 3
BATCH = 10  # which 3 and 4 ranks do not divide; 26 samples: the third batch has 6


class Tokens(Dataset[dict[str, Tensor]]):
    """Random tokens, with the names of a model's arguments. `label`: one class per sample."""

    draws_randomness = False

    def __init__(self, inputs: str, targets: str, *, label: bool = False) -> None:
        self.names, self.label = (inputs, targets), label
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(3, VOCABULARY, (SAMPLES, TOKENS), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.tokens[index]
        return dict(zip(self.names, (row, row[0] % 2 if self.label else row), strict=True))


class Images(Tokens):
    def __init__(self) -> None:
        super().__init__("pixel_values", "labels", label=True)
        self.pixels = torch.randn(SAMPLES, 3, 8, 8, generator=torch.Generator().manual_seed(1))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.pixels[index], "labels": self.tokens[index][0] % 2}


class Points(Tokens):
    """(input, target) pairs."""

    def __init__(self) -> None:
        super().__init__("inputs", "targets")
        self.points = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1))

    def __getitem__(self, index: int) -> Any:
        return self.points[index], self.tokens[index][0] % 2


class Ragged(Tokens):
    """Rows of different lengths. `padded` pads those of a micro-batch to the longest of them."""

    def __getitem__(self, index: int) -> Any:
        return self.tokens[index][: 2 + index * 5 % (TOKENS - 1)]


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    tokens = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    size: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    size |= {"bos_token_id": 0, "eos_token_id": 0}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**size))
    return model


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    settings = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16,
    )  # fmt: skip
    model: nn.Module = BertForSequenceClassification(settings)
    return model


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    settings = T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    model: nn.Module = T5ForConditionalGeneration(settings)
    return model


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    settings = ViTConfig(
        image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    model: nn.Module = ViTForImageClassification(settings)
    return model


def llama() -> nn.Module:
    """With dropout on what each layer adds to the residual stream, and in the hidden layer of its MLP."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, attention_dropout=0.0,
    )  # fmt: skip
    model = LlamaForCausalLM(settings)
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(layer.mlp.act_fn, nn.Dropout(0.1))
        for part in (layer.self_attn, layer.mlp):
            part.residual_dropout = nn.Dropout(0.1)
            part.register_forward_hook(_dropped)
    return model


class StagedLayer(nn.Module):
    """Computes the embeddings of positions itself: stages of a pipeline exchange a single tensor."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, hidden: Tensor) -> Any:
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        return self.layer(hidden, position_embeddings=self.rotary(hidden, positions))


class StagedLlama(nn.Module):
    """The layers of Llama, for a pipeline."""

    model_spec = ModelSpec(
        pipeline=PipelineSpec("embed", "blocks", "read_out", "loss", ("tokens",), ("norm", "head"), targets="labels")
    )

    def __init__(self) -> None:
        super().__init__()
        model: Any = llama()
        inner = model.model
        self.tokens, self.norm, self.head = inner.embed_tokens, inner.norm, model.lm_head
        self.blocks = nn.ModuleList(StagedLayer(layer, inner.rotary_emb) for layer in inner.layers)

    def embed(self, input_ids: Tensor) -> Any:
        return self.tokens(input_ids)

    def read_out(self, hidden: Tensor) -> Any:
        return self.head(self.norm(hidden))

    def loss(self, logits: Tensor, labels: Tensor) -> Any:
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.read_out(hidden)
        return logits if labels is None else self.loss(logits, labels)


def _dropped(part: Any, inputs: Any, outputs: Any) -> Any:
    if isinstance(outputs, tuple):
        return part.residual_dropout(outputs[0]), *outputs[1:]
    return part.residual_dropout(outputs)


def gpt() -> nn.Module:
    return GPT(vocabulary=VOCABULARY, width=16, layers=4, heads=4, context=TOKENS, dropout=0.1)


def sequential() -> nn.Module:
    """With dropout after each layer: some of it begins a stage of a pipeline."""
    sizes = [16, 32, 16, 32, 16]
    pairs = pairwise(sizes)
    layers = [part for a, b in pairs for part in (nn.Linear(a, b), nn.ReLU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(16, 2))


@dataclass(frozen=True)
class Model:
    build: Callable[[], nn.Module]
    data: Any
    settings: dict[str, Any] = field(default_factory=dict)
    lr: float = 0.1


TEXT = Tokens("input_ids", "labels")
MODELS = {
    "gpt2": Model(gpt2, TEXT),
    "bert": Model(bert, Tokens("input_ids", "labels", label=True)),
    "t5": Model(t5, TEXT, lr=0.02),
    "vit": Model(vit, Images()),
    "ragged": Model(gpt2, DataLoader(Ragged("", ""), BATCH, shuffle=True, collate_fn=padded)),
    "llama": Model(llama, TEXT),
    "staged-llama": Model(StagedLlama, TEXT),
    "gpt": Model(gpt, Tokens("inputs", "targets")),
    "sequential": Model(sequential, Points(), {"criterion": nn.CrossEntropyLoss()}),
}


@dataclass(frozen=True)
class Cell:
    """A model, trained on a layout with these settings, and possibly resumed on another one."""

    model: str
    layout: str
    precision: str = "fp64"
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    resumed_on: str | None = None

    @property
    def ranks(self) -> int:
        return ParityLayout.read(self.layout).ranks

    def __str__(self) -> str:
        settings = " ".join(f"{name}={value}" for name, value in self.settings.items())
        resumed = f" then {self.resumed_on}" if self.resumed_on else ""
        return f"{self.model} {self.layout}{resumed} {settings} {self.precision}"


def cell(model: str, layout: str, precision: str = "fp64", *, then: str | None = None, **settings: Any) -> Cell:
    return Cell(model, layout, precision, settings, then)


def trainer_of(model: str, **settings: Any) -> Trainer:
    """The same weights at every call, and SGD."""
    chosen = MODELS[model]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        built = chosen.build()
    optimizer = torch.optim.SGD(built.parameters(), lr=chosen.lr)
    fixed = {"batch": BATCH, "run": False, "quiet": True, "device": "cpu"}
    return Trainer(built, optimizer, **{**fixed, **chosen.settings, **settings})


_on_one_rank: dict[tuple[str, str, int], ParityRun] = {}  # each is trained once


def runs_on_one_rank(cells: Sequence[Cell]) -> list[ParityRun]:
    """Of each cell: its model on one rank."""
    ones = [(each.model, each.precision, each.settings.get("batch", BATCH)) for each in cells]
    new = [one for one in dict.fromkeys(ones) if one not in _on_one_rank]
    alone = [cell(model, "single", precision, batch=batch) for model, precision, batch in new]
    for one, run in zip(new, _launch(alone, [{}] * len(new), None), strict=True):
        assert isinstance(run, ParityRun), run
        _on_one_rank[one] = run
    return [_on_one_rank[one] for one in ones]


def compare(cells: Sequence[Cell], fault: str | None = None) -> dict[Cell, ParityRow]:
    """The difference of each cell from one process. Cells with the same number of ranks share their processes."""
    import paceline.train.trainer  # noqa: F401  # once, before ranks are forked

    for model in {each.model for each in cells}:
        trainer_of(model)  # imports its module
    with TemporaryDirectory() as folder:
        saves = {each: f"{folder}/{number}" for number, each in enumerate(cells) if each.resumed_on}
        runs = dict(zip(cells, _launch(cells, [{"save": saves.get(each)} for each in cells], fault), strict=True))
        later = [Cell(each.model, each.resumed_on or "", each.precision, each.settings) for each in saves]
        resumed = _launch(later, [{"load": path} for path in saves.values()], fault)
    rows: dict[Cell, ParityRow] = {}
    runs |= zip(saves, resumed, strict=True)
    for (each, run), one in zip(runs.items(), runs_on_one_rank(list(runs)), strict=True):
        steps = slice(STEPS // 2 if each in saves else 0, None)
        expected = ParityRun(one.losses[steps], one.norms[steps], one.weights)
        rows[each] = comparison.compare(str(each), expected, run, BOUNDS[each.precision])
    return rows


def _launch(cells: Sequence[Cell], paths: Sequence[dict[str, Any]], fault: str | None) -> list[ParityRun | str]:
    results: dict[int, Any] = {}
    for ranks in sorted({each.ranks for each in cells}):
        numbers = [number for number, each in enumerate(cells) if each.ranks == ranks]
        same = [(cells[number], paths[number]) for number in numbers]
        results |= zip(numbers, launch(_train_all, ranks=ranks, cells=same, fault=fault), strict=True)
    return [each if isinstance(each := results[number], str) else ParityRun(**each) for number in range(len(cells))]


def _train_all(cells: Sequence[tuple[Cell, dict[str, Any]]], fault: str | None) -> list[dict[str, Any] | str]:
    if fault is not None:
        FAULTS[fault]()
    return [_train(each, **paths) for each, paths in cells]


def _train(of: Cell, save: str | None = None, load: str | None = None) -> dict[str, Any] | str:
    """The results, or why the layout is refused. `save`: train half of the steps."""
    layout = ParityLayout.read(of.layout).settings
    try:
        trainer = trainer_of(of.model, precision=of.precision, clip_norm=1e30, **{**layout, **of.settings})
        if load is not None:
            trainer.load_checkpoint(load)
        history = trainer.train(MODELS[of.model].data, max_steps=STEPS // 2 if save else STEPS)
        if save is not None:
            trainer.save_checkpoint(save)
    except LayoutError as error:  # on every rank
        return str(error)
    norms = [record["grad_norm"] for record in history.steps]
    return {"losses": history.losses, "norms": norms, "weights": trainer.state_dict()}


def _wrong_sample() -> None:
    """Each rank counts its samples from zero."""
    exact = SampleKeys._hash
    SampleKeys._hash = lambda self, step, start, count: exact(self, step, 0, count)  # type: ignore[method-assign]


def _wrong_step() -> None:
    """Micro-batches count as steps."""
    exact, calls = SampleKeys._hash, count()
    SampleKeys._hash = lambda self, step, start, n: exact(self, next(calls), start, n)  # type: ignore[method-assign]


def _flat_index() -> None:
    """The mask of an element depends on its index in the padded sample."""
    exact = functions.hash_elements

    def flat(keys: Tensor, call: int, shape: Sequence[int], offsets: Sequence[int] = ()) -> Tensor:
        return exact(keys, call, (shape[0], math.prod(shape[1:]))).view(*shape)

    functions.hash_elements = flat  # type: ignore[attr-defined]


FAULTS = {"wrong sample": _wrong_sample, "wrong step": _wrong_step, "flat index": _flat_index}
