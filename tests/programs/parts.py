"""The parts that random training programs are drawn from: models, losses, data, optimizers and callbacks.

Each part is written as a user would write it, without paceline, so that the same objects also train in a plain loop.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import paceline
from samples import sample

FEATURES, CLASSES, VOCABULARY, TOKENS = 8, 3, 20, 6
# The last step of an epoch has 5 samples, which no layout divides.
SAMPLES, BATCH, VALIDATION = sample(25, 45), 10, 17


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES))


class Residual(nn.Module):
    """Repeated blocks, which FSDP gathers one by one."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 12)
        self.blocks = nn.ModuleList(nn.Sequential(norm(12), nn.Linear(12, 12), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(12, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.last(hidden)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(FEATURES, 12), nn.Linear(12, 12), nn.Linear(12, CLASSES)
        self.mirror = nn.Linear(12, 12)
        self.mirror.weight = self.again.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.mirror(torch.tanh(self.again(self.first(inputs))))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRU(2, 12, batch_first=True), nn.Linear(12, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.cell(inputs.unflatten(1, (4, 2)))[0][:, -1])


class Experts(nn.Module):
    """Each sample runs through one expert, so ranks run different modules."""

    def __init__(self, *, all_run: bool = False) -> None:
        super().__init__()
        self.all_run = all_run
        self.first, self.last = nn.Linear(FEATURES, 12), nn.Linear(12, CLASSES)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        chosen = (inputs[:, 1] > 0).long().tolist()
        if self.all_run:  # all experts run on every rank, but the first sample decides on the order
            outputs: dict[int, Tensor] = {}
            for number in (chosen[0], 1 - chosen[0]):
                outputs[number] = self.experts[number](hidden)
            return self.last(torch.stack([outputs[number][row] for row, number in enumerate(chosen)]))
        return self.last(torch.cat([self.experts[number](hidden[row : row + 1]) for row, number in enumerate(chosen)]))


class RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.net = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * inputs.detach().mean(0))
        return self.net(inputs - self.mean)


def instance_norm() -> nn.Module:
    norm = nn.InstanceNorm1d(2, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (2, 4)), norm, nn.Flatten(), nn.Linear(FEATURES, CLASSES))


def spectral_norm() -> nn.Module:
    net = mlp()
    nn.utils.parametrizations.spectral_norm(net[0])
    return net


def weight_norm() -> nn.Module:
    net = mlp()
    nn.utils.parametrizations.weight_norm(net[2])
    return net


class Stateful(nn.Module):
    """Adds its last mean output to the next one, kept in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.last = mlp(), None

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.net(inputs)
        if self.training:
            outputs = outputs if self.last is None else outputs + 0.1 * self.last
            self.last = outputs.detach().mean(0)
        return outputs


class Checkpointed(Residual):
    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
        return self.last(hidden)


class ChangesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs.mul_(1.5).add_(0.3))


class CountsCalls(nn.Module):
    """An annealed temperature, saved the way torch documents it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = mlp(), 0

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = int(state)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return self.net(inputs) / (1 + 0.02 * self.calls)


def hooked() -> nn.Module:
    net = mlp()
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return net


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.spare = mlp(), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)


class Scaled(nn.Module):
    """With a parameter that has no dim."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale = mlp(), nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs) * self.scale


class LanguageModel(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 12, **options)
        self.place = nn.Parameter(torch.zeros(TOKENS, 12))
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.tokens(inputs) + self.place[: inputs.shape[1]]
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def causal_lm() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=TOKENS, **sizes))


class Wrapper(nn.Module):
    """A model of a library inside one's own module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = causal_lm()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.inner(input_ids=input_ids, labels=labels)


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.002, 0.002)


class Observed(Residual):
    """A hook on an activation, of which the gradient must not depend on ranks and micro-batches."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        if hidden.requires_grad:
            hidden.register_hook(clamped)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.last(hidden)


def observed_module() -> nn.Module:
    net = mlp()
    net[2].register_full_backward_hook(lambda module, gradients, outputs: (clamped(gradients[0]),))
    return net


class Taught(nn.Module):
    """Follows itself: a teacher that the forward moves, and that begins as a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.teacher = mlp(), mlp().requires_grad_(False)
        self.teacher.load_state_dict(self.net.state_dict())

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                for theirs, ours in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                    theirs.lerp_(ours, 0.1)
        return self.net(inputs) + 0.5 * self.teacher(inputs.flip(1))


class Couples(nn.Module):
    """Centers its hidden states over the batch, in training mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 12), nn.Linear(12, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        return self.last(hidden - hidden.mean(0) if self.training else hidden)


@dataclass(frozen=True)
class Model:
    build: Callable[[], nn.Module]
    reads: str = "vectors"  # or tokens, or names: a dict with input_ids and labels
    odd: bool = False  # may be refused or warned about by name; all others must train everywhere
    frozen: bool = False
    settings: tuple[tuple[str, Any], ...] = ()
    stages: bool = False  # a pipeline can partition it


MODELS = {
    "mlp": Model(mlp, stages=True),
    "frozen": Model(mlp, frozen=True, stages=True),
    "residual": Model(Residual),
    "tied": Model(Tied),
    "recurrent": Model(Recurrent),
    "batchnorm": Model(lambda: Residual(nn.BatchNorm1d)),
    "experts": Model(Experts, settings=(("unused_parameters", "allow"),)),
    "experts-in-another-order": Model(lambda: Experts(all_run=True), odd=True),
    "running-mean": Model(RunningMean, odd=True),
    "instance-norm": Model(instance_norm, odd=True),
    "spectral-norm": Model(spectral_norm, odd=True),
    "changes-input": Model(ChangesInput),
    "counts-calls": Model(CountsCalls, odd=True),
    "hooked": Model(hooked, odd=True),
    "spare": Model(Spare, odd=True),
    "scaled": Model(Scaled, odd=True),
    "language-model": Model(LanguageModel, reads="tokens"),
    "hugging-face": Model(causal_lm, reads="names"),
    "wrapped-hugging-face": Model(Wrapper, reads="names"),
    "weight-norm": Model(weight_norm),
    "stateful": Model(Stateful, odd=True),
    "couples-in-training": Model(Couples, odd=True),
    "checkpointed": Model(Checkpointed),
    "sparse-embedding": Model(lambda: LanguageModel(sparse=True), reads="tokens", odd=True),
    "observed": Model(Observed, odd=True),
    "observed-module": Model(observed_module, odd=True),
    "taught": Model(Taught, odd=True),
    "max-norm": Model(lambda: LanguageModel(max_norm=1.0), reads="tokens", odd=True),
}


def pair(batch: Any) -> tuple[Tensor, Tensor]:
    return tuple(batch.values()) if isinstance(batch, dict) else (batch[0], batch[1])


NAMES = {"vectors": ("inputs", "targets"), "tokens": ("inputs", "targets"), "names": ("input_ids", "labels")}


def classes(inputs: Tensor, ignored: slice = slice(0, 0)) -> Tensor:
    targets = inputs[:, :CLASSES].argmax(1)
    targets[ignored] = -100
    return targets


def one_hot(inputs: Tensor) -> Tensor:
    return F.one_hot(classes(inputs), CLASSES).to(inputs.dtype)


def shifted_tokens(inputs: Tensor, padded: bool = False) -> Tensor:
    targets = inputs.roll(-1, 1)
    if padded:
        for row in range(len(targets)):
            targets[row, 1 + row % TOKENS :] = -100
    return targets


def class_weights(like: Tensor) -> Tensor:
    return torch.tensor([0.2, 1.0, 3.0], dtype=like.dtype)


def weighted_loss(model: Any, batch: Any) -> Tensor:
    inputs, targets = pair(batch)
    outputs = model(inputs)
    return F.cross_entropy(outputs, targets, weight=class_weights(outputs))


def plain_loss(model: Any, batch: Any) -> Tensor:
    inputs, targets = pair(batch)
    return F.cross_entropy(model(inputs), targets)


def masked_quotient(model: Any, batch: Any) -> Tensor:
    inputs, targets = pair(batch)
    mask = (inputs[:, 2] > -0.5).to(inputs.dtype)
    return (F.cross_entropy(model(inputs), targets, reduction="none") * mask).sum() / mask.sum()


def masked_mean(model: Any, batch: Any) -> Tensor:
    inputs, targets = pair(batch)
    losses = F.cross_entropy(model(inputs), targets, reduction="none")
    return losses[inputs[:, 2] > -0.5].mean()


def sum_and_weight(model: Any, batch: Any) -> Any:
    inputs, targets = pair(batch)
    weights = 0.5 + inputs[:, 3].abs()
    losses = F.cross_entropy(model(inputs), targets, reduction="none") * weights
    return paceline.Loss(losses.sum(), weights.sum())


def with_metrics(model: Any, batch: Any) -> dict[str, Any]:
    inputs, targets = pair(batch)
    outputs = model(inputs)
    right = (outputs.argmax(1) == targets).to(outputs.dtype).mean()
    return {"loss": F.cross_entropy(outputs, targets), "metrics": {"right": right}}


def contrastive(model: Any, batch: Any) -> Tensor:
    inputs, _ = pair(batch)
    ours = F.normalize(model(inputs), dim=1)
    return F.cross_entropy(ours @ ours.roll(1, 0).T / 0.3, torch.arange(len(inputs)))


def summed(model: Any, batch: Any) -> Tensor:
    inputs, targets = pair(batch)
    return F.cross_entropy(model(inputs), targets, reduction="sum") / 10


def two_means(model: Any, batch: Any) -> Tensor:
    inputs, targets = pair(batch)
    outputs = model(inputs)
    large = inputs[:, 0] > 0
    penalty = outputs[large].square().mean() if large.any() else outputs.sum() * 0
    return F.cross_entropy(outputs, targets) + 0.1 * penalty


def penalized(model: Any, batch: Any) -> Tensor:
    """A mean over samples and a term that does not depend on them."""
    inputs, targets = pair(batch)
    decay = sum(parameter.square().sum() for parameter in model.parameters() if parameter.dim() > 1)
    return 0.5 * F.cross_entropy(model(inputs), targets) + 1e-3 * decay


def multi_task(model: Any, batch: Any) -> Tensor:
    """Targets are ignored from the second batch on."""
    inputs, targets = pair(batch)
    outputs = model(inputs)
    return F.cross_entropy(outputs, targets) + 0.5 * (outputs - inputs[:, :CLASSES]).square().mean()


def errors(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """The error of each sample, and which of them count: all of them in the first batch."""
    inputs, targets = pair(batch)
    return (model(inputs) - inputs[:, :CLASSES]).square().mean(1), targets >= 0


def late_nanmean(model: Any, batch: Any) -> Tensor:
    losses, counts = errors(model, batch)
    return torch.where(counts, losses, torch.nan).nanmean()


def late_selection(model: Any, batch: Any) -> Tensor:
    losses, counts = errors(model, batch)
    return losses.index_select(0, counts.nonzero()[:, 0]).mean()


def late_reciprocal(model: Any, batch: Any) -> Tensor:
    losses, counts = errors(model, batch)
    return (losses * counts).sum() * (1.0 / counts.sum())


def late_weights(model: Any, batch: Any) -> Tensor:
    losses, counts = errors(model, batch)
    shares = counts.to(losses.dtype)  # in float32, AdamW would make rounding of vanishing gradients visible
    return (losses * (shares / shares.sum())).sum()


def dice(model: Any, batch: Any) -> Tensor:
    inputs, targets = pair(batch)
    outputs, masks = model(inputs).sigmoid(), F.one_hot(targets, CLASSES).to(inputs.dtype)
    return 1 - 2 * (outputs * masks).sum() / (outputs.sum() + masks.sum())


def token_loss(model: Any, batch: Any) -> Tensor:
    inputs, targets = pair(batch)
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def token_sum(model: Any, batch: Any) -> Any:
    inputs, targets = pair(batch)
    total = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    return paceline.Loss(total, (targets != -100).sum())


def padded_labels(inputs: Tensor) -> Tensor:
    """Labels that the model shifts by itself; the first batch has no padding."""
    labels = inputs.clone()
    for row in range(BATCH, len(labels)):
        labels[row, 2 + row % (TOKENS - 1) :] = -100
    return labels


def inner_loss(model: Any, batch: Any) -> Tensor:
    return model(**batch).loss


@dataclass(frozen=True)
class LossPart:
    targets: Callable[[Tensor], Tensor]
    function: Callable[[Any, Any], Any] | None = None
    criterion: Callable[[], nn.Module] | None = None
    reads: str = "vectors"
    odd: bool = False


class Centered(nn.Module):
    """The center of DINO: a buffer of the criterion."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(CLASSES))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(outputs - self.center, targets)
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.center.mul_(0.8).add_(0.2 * outputs.detach().mean(0))
        return loss


class Weighing(nn.Module):
    """Two losses, weighed by parameters of the criterion."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = torch.stack([F.cross_entropy(outputs, targets), outputs.square().mean()])
        return ((-self.logs).exp() * losses + self.logs).sum()


def ignoring(inputs: Tensor) -> Tensor:
    """Ignored targets first appear in the second batch."""
    return classes(inputs, slice(13, 19))


LOSSES = {
    "cross-entropy": LossPart(classes, criterion=nn.CrossEntropyLoss),
    "class-weights": LossPart(classes, criterion=lambda: nn.CrossEntropyLoss(torch.tensor([0.2, 1.0, 3.0]))),
    "ignored-later": LossPart(ignoring, criterion=nn.CrossEntropyLoss),
    "label-smoothing": LossPart(classes, criterion=lambda: nn.CrossEntropyLoss(label_smoothing=0.1)),
    "smoothing-ignored": LossPart(ignoring, criterion=lambda: nn.CrossEntropyLoss(label_smoothing=0.1), odd=True),
    "centered": LossPart(classes, criterion=Centered, odd=True),
    "weighing": LossPart(classes, criterion=Weighing, odd=True),
    "mean-squared": LossPart(one_hot, criterion=nn.MSELoss),
    "binary": LossPart(one_hot, criterion=nn.BCEWithLogitsLoss),
    "smooth-l1": LossPart(one_hot, criterion=nn.SmoothL1Loss),
    "function": LossPart(classes, plain_loss),
    "function-class-weights": LossPart(classes, weighted_loss),
    "function-ignored-later": LossPart(ignoring, plain_loss),
    "masked-quotient": LossPart(classes, masked_quotient, odd=True),
    "masked-mean": LossPart(classes, masked_mean, odd=True),
    "sum-and-weight": LossPart(classes, sum_and_weight),
    "with-metrics": LossPart(classes, with_metrics),
    "contrastive": LossPart(classes, contrastive, odd=True),
    "summed": LossPart(classes, summed, odd=True),
    "two-means": LossPart(classes, two_means, odd=True),
    "penalized": LossPart(classes, penalized),
    "multi-task": LossPart(ignoring, multi_task, odd=True),
    "late-nanmean": LossPart(ignoring, late_nanmean),
    "late-selection": LossPart(ignoring, late_selection),
    "late-reciprocal": LossPart(ignoring, late_reciprocal),
    "late-weights": LossPart(ignoring, late_weights, odd=True),
    "dice": LossPart(classes, dice, odd=True),
    "tokens": LossPart(shifted_tokens, token_loss, reads="tokens"),
    "padded-tokens": LossPart(lambda inputs: shifted_tokens(inputs, padded=True), token_loss, reads="tokens"),
    "own-loss": LossPart(padded_labels, reads="names"),
    "own-loss-by-function": LossPart(padded_labels, inner_loss, reads="names"),
    "token-sum": LossPart(lambda inputs: shifted_tokens(inputs, padded=True), token_sum, reads="tokens"),
}


def tensors(loss: str, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    part, generator = LOSSES[loss], torch.Generator().manual_seed(seed)
    if part.reads != "vectors":
        inputs = torch.randint(0, VOCABULARY, (samples, TOKENS), generator=generator)
    else:
        inputs = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    return inputs, part.targets(inputs)


def rank_and_world() -> tuple[int, int]:
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Listed(Dataset[Any]):
    """Files in the order of os.listdir, which every machine has its own."""

    def __init__(self, data: TensorDataset) -> None:
        self.data, self.order = data, list(range(len(data)))
        random.Random(rank_and_world()[0]).shuffle(self.order)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[self.order[index]]


class Stream(IterableDataset[Any]):
    def __init__(self, data: TensorDataset, *, by_rank: bool = False) -> None:
        self.data, self.by_rank = data, by_rank

    def __iter__(self) -> Iterator[Any]:
        rank, world = rank_and_world() if self.by_rank else (0, 1)
        return (self.data[index] for index in range(rank, len(self.data), world))


class Named(Dataset[Any]):
    def __init__(self, data: TensorDataset, names: Sequence[str] = NAMES["vectors"]) -> None:
        self.data, self.names = data, names

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return dict(zip(self.names, self.data[index], strict=True))


class Unseeded(Sampler[int]):
    """With a generator of its own, seeded by the system."""

    def __init__(self) -> None:
        self.random = np.random.default_rng()

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.permutation(SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


class Growing(Sampler[int]):
    """A curriculum: every epoch has more samples."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return min(SAMPLES, 15 * (self.epoch + 1))


class Backwards(DataLoader[Any]):
    """A DataLoader with an iteration of its own."""

    def __iter__(self) -> Iterator[Any]:
        return reversed(list(super().__iter__()))


class Mirrored(Dataset[Any]):
    """Reads batches, in which a sample is another one than by `__getitem__`."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.data[len(self.data) - 1 - index] for index in indices]


class Rotating(Mirrored):
    """Depends on the epoch."""

    __getitems__ = None
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return self.data[(index + 7 * self.epoch) % len(self.data)]


class Batches:
    """Batches that are ready, of different sizes."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[start : start + BATCH] for start in range(0, SAMPLES, BATCH))


def trimmed(samples: list[Any]) -> Any:
    """Cut padding that all rows of a batch share, so that the length depends on the batch."""
    batch = default_collate(samples)
    if isinstance(batch, dict) or batch[0].is_floating_point() or batch[1].dim() == 1:
        return batch
    used = int((batch[1] != -100).any(0).nonzero().max()) + 1
    return [tensor[:, :used] for tensor in batch]


def uneven(data: TensorDataset) -> list[list[int]]:
    return [list(range(9)), list(range(9, 20)), list(range(20, 27)), list(range(27, 45))]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Data:
    build: Callable[[TensorDataset], Any]
    order: str  # in which a plain loop reads: own (it iterates over the data itself), ours, or natural
    odd: bool = False
    settings: tuple[tuple[str, Any], ...] = ()
    several: bool = False  # only of interest on several ranks


DATA = {
    "tensors": Data(lambda data: data, "ours"),
    "in-order": Data(lambda data: data, "natural", settings=(("shuffle", False),)),
    "subset": Data(lambda data: Subset(data, range(SAMPLES)), "ours"),
    "loader": Data(lambda data: DataLoader(data, batch_size=BATCH), "own"),
    "drop-last": Data(lambda data: DataLoader(data, batch_size=BATCH, drop_last=True), "own"),
    "generator": Data(lambda data: DataLoader(data, BATCH, shuffle=True, generator=seeded(5)), "own"),
    "weighted": Data(
        lambda data: DataLoader(
            data, BATCH, sampler=WeightedRandomSampler(torch.linspace(0.1, 1, SAMPLES), 30, generator=seeded(6))
        ),
        "own",
    ),
    "batch-sampler": Data(lambda data: DataLoader(data, batch_sampler=uneven(data)), "own"),
    "random-batch-sampler": Data(
        lambda data: DataLoader(
            data, batch_sampler=BatchSampler(RandomSampler(data, generator=seeded(7)), BATCH, drop_last=False)
        ),
        "own",
    ),
    "sequential-batch-sampler": Data(
        lambda data: DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), BATCH, drop_last=True)), "own"
    ),
    "collated": Data(lambda data: DataLoader(data, BATCH, collate_fn=trimmed), "own"),
    "concatenated": Data(
        lambda data: ConcatDataset([Subset(data, range(20)), Subset(data, range(20, SAMPLES))]),
        "natural",
        settings=(("shuffle", False),),
    ),
    "growing": Data(lambda data: DataLoader(data, BATCH, sampler=Growing()), "own"),
    "backwards": Data(lambda data: Backwards(data, BATCH), "own"),
    "mirrored": Data(lambda data: DataLoader(Mirrored(data), BATCH), "own"),
    "rotating": Data(lambda data: DataLoader(Rotating(data), BATCH), "own"),
    "rotating-in-workers": Data(lambda data: DataLoader(Rotating(data), BATCH, num_workers=1), "own"),
    "names": Data(Named, "natural", settings=(("shuffle", False),)),
    "list-of-batches": Data(lambda data: list(Batches(data)), "own"),
    "batches": Data(Batches, "own"),
    "stream": Data(Stream, "natural"),
    "stream-loader": Data(lambda data: DataLoader(Stream(data), batch_size=BATCH), "natural"),
    "stream-by-rank": Data(lambda data: Stream(data, by_rank=True), "natural", odd=True, several=True),
    "stream-said": Data(
        lambda data: Stream(data, by_rank=True), "natural", settings=(("data", {"sharded": True}),), odd=True
    ),
    "listed": Data(Listed, "natural", odd=True, several=True, settings=(("shuffle", False),)),
    "unseeded": Data(lambda data: DataLoader(data, BATCH, sampler=Unseeded()), "own", odd=True, several=True),
}


class Normalized(torch.optim.Optimizer):
    """Divides by the norm of all gradients, so it couples all parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.square().sum() for p in parameters).sqrt()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / (norm + 1e-3), alpha=-group["lr"])


class Elementwise(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    average.mul_(0.9).add_(p.grad)
                    p.sub_(group["lr"] * torch.tanh(average))


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    biases = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    return [{"params": matrices, "lr": 0.05}, {"params": biases, "lr": 0.2, "weight_decay": 0.0}]


@dataclass(frozen=True)
class Optimizer:
    build: Callable[[nn.Module], torch.optim.Optimizer]
    odd: bool = False


# Without a large eps, optimizers that divide by the gradient amplify rounding to any size.
OPTIMIZERS = {
    "sgd": Optimizer(lambda model: torch.optim.SGD(model.parameters(), lr=0.1)),
    "momentum": Optimizer(lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)),
    "adamw": Optimizer(lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)),
    "rmsprop": Optimizer(lambda model: torch.optim.RMSprop(model.parameters(), lr=0.005, eps=1e-4)),
    "groups": Optimizer(lambda model: torch.optim.SGD(in_groups(model), lr=0.1, momentum=0.5, weight_decay=1e-2)),
    "adagrad": Optimizer(lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05, eps=1e-4)),
    "adafactor": Optimizer(lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05), odd=True),
    "elementwise": Optimizer(lambda model: Elementwise(model.parameters(), lr=0.05), odd=True),
    "normalized": Optimizer(lambda model: Normalized(model.parameters(), lr=0.1), odd=True),
}

SCHEDULERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "per-epoch": ("epoch", lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)),
    "per-step": ("step", lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)),
}


def first_layer(model: nn.Module) -> nn.Module:
    """The layer that callbacks change."""
    return next(part for part in model.modules() if isinstance(part, (nn.Linear, nn.GRU)))


class Unfreeze:
    def __init__(self, model: nn.Module) -> None:
        self.layer = first_layer(model)

    def on_epoch(self, record: Any) -> None:
        self.layer.requires_grad_(True)


class Freeze(Unfreeze):
    def on_epoch(self, record: Any) -> None:
        self.layer.requires_grad_(False)


class Halve(Unfreeze):
    @torch.no_grad()
    def on_epoch(self, record: Any) -> None:
        for parameter in self.layer.parameters():
            parameter.mul_(0.5)


class LeaveGradients:
    """Looks at gradients after an epoch and leaves them behind; a plain loop calls zero_grad() before its backward."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def on_epoch(self, record: Any) -> None:
        weights = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if weights:  # a stage of a pipeline may have none
            sum((weight * weight).sum() for weight in weights).backward()


@dataclass(frozen=True)
class Callback:
    build: Callable[[nn.Module], Any]
    odd: bool = False


CALLBACKS = {
    "unfreeze": Callback(Unfreeze),
    "freeze": Callback(Freeze),
    "halve": Callback(Halve, odd=True),
    "leave-gradients": Callback(LeaveGradients, odd=True),
}


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(-1) == targets).double()


def f1(outputs: Tensor, targets: Tensor) -> Tensor:
    predicted, true = outputs.argmax(-1) == 1, targets == 1
    return 2 * (predicted & true).sum() / (predicted.sum() + true.sum()).clamp(min=1)


def as_loss(outputs: Tensor, targets: Tensor) -> Any:
    right = accuracy(outputs, targets)
    return paceline.Loss(right.sum(), len(right))


METRICS = {"accuracy": accuracy, "f1": f1, "as_loss": as_loss}
