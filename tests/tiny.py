"""Small recipes, models and data sets that are easy to learn: a loss falls within twenty steps."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from paceline import Config, Trainer, dist, register_data, register_model
from paceline.models.gpt import GPT
from paceline.models.resnet import BasicBlock, ResNet, _small_stem


class Patterns(Dataset[dict[str, torch.Tensor]]):
    """Four fixed binary patterns with a few flipped pixels. Sample i is a function of i."""

    draws_randomness = False

    def __init__(self, length: int, labels: bool = True, first: int = 0) -> None:
        self.length, self.labels, self.first = length, labels, first
        self.prototypes = (torch.rand(4, 64, generator=torch.Generator().manual_seed(7)) > 0.5).float()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        label = index % 4
        flips = torch.rand(64, generator=generator) < 0.03
        sample = {"inputs": (self.prototypes[label] - flips.float()).abs().reshape(1, 8, 8)}
        if self.labels:
            sample["targets"] = torch.tensor(label)
        return sample


@register_data("tiny-patterns")
def tiny_patterns(length: int = 50, labels: bool = True) -> tuple[Patterns, Patterns]:
    return Patterns(length, labels), Patterns(13, labels, first=1000)


class Phrases(Dataset[dict[str, torch.Tensor]]):
    """Windows of one sentence, repeated; some end in padding (target -100) when asked."""

    draws_randomness = False
    TEXT = torch.tensor(list(b"the riders share the wind and hold one speed; " * 4))

    def __init__(self, length: int, context: int, padded: bool) -> None:
        self.length, self.context, self.padded = length, context, padded

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * 5 % 46
        window = self.TEXT[start : start + self.context + 1]
        targets = window[1:].clone()
        if self.padded:
            targets[self.context - index % self.context :] = -100
        return {"inputs": window[:-1], "targets": targets}


@register_data("tiny-text")
def tiny_text(length: int = 50, context: int = 16, padded: bool = False) -> tuple[Phrases, Phrases]:
    return Phrases(length, context, padded), Phrases(13, context, padded)


class Images(Dataset[dict[str, torch.Tensor]]):
    """Small noisy pictures of four kinds."""

    draws_randomness = False

    def __init__(self, length: int, first: int = 0) -> None:
        self.length, self.first = length, first
        self.kinds = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(11))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        noise = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(self.first + index))
        return {"inputs": self.kinds[index % 4] + 0.3 * noise, "targets": torch.tensor(index % 4)}


@register_data("tiny-images")
def tiny_images(length: int = 50) -> tuple[Images, Images]:
    return Images(length), Images(13, first=1000)


@register_model("tiny-resnet")
def tiny_resnet() -> ResNet:
    return ResNet(_small_stem(8), BasicBlock, [1, 1], [8, 16], 4)


class Labelled(Dataset[dict[str, torch.Tensor]]):
    """What a Hugging Face language model takes; rows have labels of different lengths, some none at all."""

    draws_randomness = False

    def __init__(self, length: int, context: int = 16) -> None:
        self.phrases = Phrases(length, context, padded=False)

    def __len__(self) -> int:
        return len(self.phrases)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.phrases[index]["inputs"]
        labels = tokens.clone()
        labels[len(labels) - index * 3 % len(labels) :] = -100
        if index % 8 == 5:
            labels[:] = -100
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


@register_data("tiny-labelled")
def tiny_labelled(length: int = 50) -> tuple[Labelled, Labelled]:
    return Labelled(length), Labelled(13)


@register_model("tiny-hf-gpt2")
def tiny_hf_gpt2() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = GPT2Config(
        vocab_size=256, n_positions=16, n_embd=32, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model: torch.nn.Module = GPT2LMHeadModel(settings)
    return model


class Pixels(Dataset[dict[str, torch.Tensor]]):
    """What a Hugging Face image classifier takes."""

    draws_randomness = False

    def __init__(self, length: int, first: int = 0) -> None:
        self.images = Images(length, first)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = self.images[index]
        return {"pixel_values": sample["inputs"], "labels": sample["targets"]}


@register_data("tiny-pixels")
def tiny_pixels(length: int = 50) -> tuple[Pixels, Pixels]:
    return Pixels(length), Pixels(13, first=1000)


@register_model("tiny-hf-vit")
def tiny_hf_vit() -> torch.nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    settings = ViTConfig(
        image_size=8, patch_size=4, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
        num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model: torch.nn.Module = ViTForImageClassification(settings)
    return model


@register_data("tiny-pairs")
def tiny_pairs() -> tuple[TensorDataset, TensorDataset]:
    return blobs(50), blobs(13, first=1)


def trainer_of(settings: dict[str, Any]) -> Trainer:
    """For a recipe; or, under the name `sequential`, for layers and a criterion as a user writes them."""
    if settings["model"]["name"] != "sequential":
        return Trainer.from_config(Config.from_dict(settings))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        sizes = [8, 16, 16, 16, 16]
        layers = [part for a, b in pairwise(sizes) for part in (torch.nn.Linear(a, b), torch.nn.Tanh())]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(16, 2))
    own = {key: value for key, value in settings.items() if key not in ("model", "train")}
    return Trainer(model, criterion=torch.nn.CrossEntropyLoss(), **own)


@register_model("tiny-llama")
def tiny_llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, pad_token_id=32,
    )  # fmt: skip
    model: torch.nn.Module = LlamaForCausalLM(settings)
    return model


def hand_written_loop(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: Dataset[Any], batches: list[list[int]]
) -> None:
    """The loop that an expert writes, with a mean squared error: what the Trainer has to equal."""
    for indices in batches:
        inputs, targets = data[indices]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def recipe(name: str, **changes: Any) -> dict[str, Any]:
    """A recipe by its model's name; it writes nothing and says nothing."""
    gpt = {"name": "gpt", "layers": 2, "width": 32, "heads": 2, "context": 16}
    parts: dict[str, dict[str, Any]] = {
        "mlp": {
            "model": {"name": "mlp", "inputs": 64, "width": 32, "hidden": 1},
            "data": {"name": "tiny-patterns"},
            "optimizer": {"name": "adamw", "lr": 3e-3},
        },
        "vae": {
            "model": {"name": "vae", "size": 8, "channels": 1, "width": 64, "latent": 4},
            "data": {"name": "tiny-patterns", "labels": False},
            "optimizer": {"name": "adamw", "lr": 1e-2},
        },
        # AdamW divides key biases' gradients, which are pure rounding, by themselves; SGD leaves rounding small, at a
        # rate well below the one (0.3) at which bf16's begins to grow.
        "gpt": {"model": gpt, "data": {"name": "tiny-text"}, "optimizer": {"name": "sgd", "lr": 0.1}},
        "padded-gpt": {
            "model": {**gpt, "ignore_index": -100},
            "data": {"name": "tiny-text", "padded": True},
            "optimizer": {"name": "sgd", "lr": 0.1},
        },
        "resnet": {
            "model": {"name": "tiny-resnet"},
            "data": {"name": "tiny-images"},
            "optimizer": {"name": "sgd", "lr": 0.1},
        },
        "sequential": {
            "model": {"name": "sequential"},
            "data": {"name": "tiny-pairs"},
            "optimizer": {"name": "sgd", "lr": 0.3},
        },
        "hf-vit": {
            "model": {"name": "tiny-hf-vit"},
            "data": {"name": "tiny-pixels"},
            "optimizer": {"name": "sgd", "lr": 0.1},
        },
        "hf-gpt2": {
            "model": {"name": "tiny-hf-gpt2"},
            "data": {"name": "tiny-labelled"},
            "optimizer": {"name": "sgd", "lr": 0.1},
        },
        "llama": {
            "model": {"name": "tiny-llama"},
            "data": {"name": "tiny-labelled"},
            "optimizer": {"name": "sgd", "lr": 0.1},
        },
    }
    return {"train": {"max_steps": 20}, "run": False, "quiet": True, **parts[name], **changes}


def blobs(samples: int = 48, first: int = 0) -> TensorDataset:
    """Points of two classes, as (input, target) pairs."""
    generator = torch.Generator().manual_seed(3 + first)
    inputs = torch.randn(samples, 8, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] + inputs[:, 1] > 0).long())


def classifier() -> torch.nn.Sequential:
    """The same weights at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


def classifier_trainer(model: torch.nn.Module | None = None, **changes: Any) -> Trainer:
    """A silent trainer of the classifier on batches of 16."""
    settings: dict[str, Any] = {"batch": 16, "run": False, "quiet": True, **changes}
    if "loss_fn" not in settings:
        settings.setdefault("criterion", torch.nn.CrossEntropyLoss())
    settings.setdefault("optimizer", {"name": "adamw", "lr": 1e-2})
    return Trainer(model or classifier(), **settings)


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, whose targets are a function of them. A slice of it is a batch."""

    draws_randomness = False

    def __init__(self, length: int, tokens: int = 8) -> None:
        self.inputs = torch.randint(0, 32, (length, tokens), generator=torch.Generator().manual_seed(1))
        self.targets = (self.inputs * 3 + 1) % 32

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: Any) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "targets": self.targets[index]}


def gpt_trainer(**changes: Any) -> Trainer:
    """A silent trainer, in float64, of a GPT with four blocks and four heads for `Sequences`."""
    torch.manual_seed(0)
    model = GPT(vocabulary=32, width=16, layers=4, heads=4, context=8)
    settings = {"precision": "fp64", "quiet": True, "run": False, **changes}
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)


class ScriptedMetric:
    """A metric with given values for each rank: like a metric of the user, it need not agree across ranks. Before the
    first step it is tried, which takes another value."""

    def __init__(self, numbers: dict[int, list[float]]) -> None:
        self._numbers = iter([0.0, *numbers[dist.rank()]])

    def to(self, device: torch.device) -> None: ...
    def reset(self) -> None: ...
    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None: ...
    def compute(self) -> float:
        return next(self._numbers)


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
