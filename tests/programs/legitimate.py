"""Programs that are unusual and right: each trains on ranks as in a plain loop, without a word.

Each is written as a user would write it. One batch is the whole dataset, so that the order of samples does not matter:
a few steps of a plain loop over it are what ranks have to give.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, rnn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from programs.parts import mlp
from samples import sample

SAMPLES, FEATURES, CLASSES, STEPS = 8, 8, 3, sample(3, 4)

Loss = Callable[[Any, Any], Any]


@dataclass
class Legitimate:
    """A program. Without a loss, the model returns it."""

    model: Callable[[], nn.Module]
    rows: Callable[[], Any]
    loss: Loss | None = None
    criterion: Callable[[], nn.Module] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] = field(default=lambda model: with_momentum(model.parameters()))
    collate: Callable[[list[Any]], Any] = default_collate
    settings: dict[str, Any] = field(default_factory=dict)

    def batch(self) -> Any:
        data = self.rows()
        return self.collate(list(data) if isinstance(data, IterableDataset) else [data[i] for i in range(len(data))])


def with_momentum(parameters: Any, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, **{"lr": 0.1, "momentum": 0.9, **options})


# Data.


def vectors(number: int = 0) -> Tensor:
    return torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def integers(shape: tuple[int, ...], most: int, number: int = 1) -> Tensor:
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(number))


def labels() -> Tensor:
    return integers((SAMPLES,), CLASSES)


def classified() -> TensorDataset:
    return TensorDataset(vectors(), labels())


def tokens() -> TensorDataset:
    words = integers((SAMPLES, 6), 20)
    return TensorDataset(words, words.roll(-1, 1))


def targets(like: Callable[[], Tensor]) -> Callable[[], TensorDataset]:
    return lambda: TensorDataset(vectors(), like())


def by_name() -> list[dict[str, Tensor]]:
    return [{"left": row, "right": -row, "label": label} for row, label in zip(vectors(), labels(), strict=True)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(classified())


class Rows(Dataset[Any]):
    """Numbers of Python and arrays of numpy."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return vectors()[index].numpy(), int(labels()[index])


Sample = namedtuple("Sample", ["inputs", "label"])


def sequences() -> list[tuple[Tensor, int]]:
    return [(vectors()[row, : 2 + row % 6, None], int(labels()[row])) for row in range(SAMPLES)]


def pad_in_batches(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    lengths = torch.tensor([len(values) for values, _ in samples])
    values = rnn.pad_sequence([values for values, _ in samples], batch_first=True)
    return values, lengths, torch.tensor([label for _, label in samples])


# Models.


class Net(nn.Module):
    """Layers by name, and a function of them."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def built_of(function: Callable[..., Any], **layers: Callable[[], nn.Module | nn.Parameter]) -> Callable[[], nn.Module]:
    return lambda: Net(function, **{name: make() for name, make in layers.items()})


def dense(inputs: int = FEATURES, outputs: int = CLASSES) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(inputs, outputs)


class Named(nn.Module):
    """Returns its loss, of the keys of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, left: Tensor, right: Tensor, label: Tensor) -> dict[str, Tensor]:
        loss = F.cross_entropy(self.net(left), label) + 0.5 * F.cross_entropy(self.net(right), label)
        return {"loss": loss, "logits": self.net(left)}


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class ReturnsObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, inputs: Tensor, label: Tensor) -> Output:
        logits = self.net(inputs)
        return Output(F.cross_entropy(logits, label), logits)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(1, 6, batch_first=True, bidirectional=True), nn.Linear(12, CLASSES)

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(values, lengths, batch_first=True, enforce_sorted=False)
        return self.last(self.lstm(packed)[1][0].transpose(0, 1).flatten(1))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 20)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], dtype=torch.float64)
        return self.last(self.layer(self.words(words), src_mask=mask, is_causal=True))


class Rounded(torch.autograd.Function):
    """Straight through: the gradient passes as it is."""

    @staticmethod
    def forward(context: Any, inputs: Tensor) -> Tensor:
        return inputs.round(decimals=1)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


def filtered(model: Any, inputs: Tensor) -> Tensor:
    """A filter of complex numbers in the frequency domain."""
    return model.last(torch.fft.irfft(torch.fft.rfft(inputs) * torch.view_as_complex(model.filter), n=FEATURES))


def frozen_below() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def orthogonal() -> nn.Module:
    model = mlp()
    parametrizations.orthogonal(model[2])
    return model


def hooked_outputs() -> nn.Module:
    model = mlp()
    model[1].register_forward_hook(lambda module, args, output: output * 1.5)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] - 0.1,))
    return model


def lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(12), nn.Tanh(), nn.LazyLinear(CLASSES))
    model(torch.zeros(1, FEATURES))
    return model


def embedded(model: Any, words: Tensor) -> Tensor:
    return model.last(model.bag(words))


def several_heads(model: Any, inputs: Tensor) -> list[Tensor]:
    hidden = torch.tanh(model.body(inputs))
    return [head(hidden) for head in model.heads.values()]


def soft_experts(model: Any, inputs: Tensor) -> Tensor:
    gates = model.gate(inputs).softmax(1)
    outputs = torch.stack([expert(inputs) for expert in model.experts], 1)
    return (gates[..., None] * outputs).sum(1)


def attends_with_padding(model: Any, inputs: Tensor) -> Tensor:
    places = inputs.unflatten(1, (4, 2))
    padding = torch.zeros(len(inputs), 4, dtype=torch.bool)
    padding[:, -1] = True
    return model.last(model.attention(places, places, places, key_padding_mask=padding)[0].mean(1))


# Losses.


def entropy(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def by_token(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def of_heads(model: Any, batch: Any) -> Tensor:
    return sum(
        weight * F.cross_entropy(each, batch[1]) for weight, each in zip((1.0, 0.3), model(batch[0]), strict=True)
    )


def with_gradient_penalty(model: Any, batch: Any) -> Tensor:
    inputs = batch[0].clone().requires_grad_()
    outputs = model(inputs)
    [slopes] = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return F.cross_entropy(outputs, batch[1]) + 0.1 * (slopes.norm(dim=1) - 1).square().mean()


def triplet(model: Any, batch: Any) -> Tensor:
    return F.triplet_margin_loss(model(batch[0]), model(batch[0] + 0.1), model(-batch[0]), margin=3.0)


def distilled(model: Any, batch: Any) -> Tensor:
    outputs = model(batch[0])
    with torch.no_grad():
        teacher = torch.roll(batch[0][:, :CLASSES], 1, dims=1)
    return F.kl_div((outputs / 2).log_softmax(1), (teacher / 2).softmax(1), reduction="batchmean") * 4


def likelihood(model: Any, batch: Any) -> Tensor:
    mean, variance = model(batch[0]).split((2, 1), 1)
    return F.gaussian_nll_loss(mean, batch[1], F.softplus(variance) + 0.1)


def quantiles(model: Any, batch: Any) -> Tensor:
    error = batch[1] - model(batch[0])
    levels = torch.tensor([0.1, 0.5, 0.9], dtype=error.dtype)
    return torch.maximum(levels * error, (levels - 1) * error).sum(1).mean()


def focal(model: Any, batch: Any) -> Tensor:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def logistic(model: Any, batch: Any) -> Tensor:
    """Two views that predict each other; the target of each is a constant."""
    left, right = model(batch[0]), model(batch[0] * 0.9)
    apart = lambda ours, theirs: 2 - 2 * F.cosine_similarity(ours, theirs.detach(), dim=1).mean()  # noqa: E731
    return 0.5 * (apart(left, right) + apart(right, left))


def with_entropy_bonus(model: Any, batch: Any) -> Tensor:
    chances = model(batch[0]).softmax(1)
    return F.nll_loss(chances.log(), batch[1]) + 0.01 * (chances * chances.log()).sum(1).mean()


def connectionist(model: Any, batch: Any) -> Tensor:
    steps = model(batch[0].unflatten(1, (4, 2))).log_softmax(2).transpose(0, 1)
    length = torch.full((len(batch[1]),), 4)
    return F.ctc_loss(steps, 1 + batch[1][:, None] % 2, length, torch.ones_like(length), reduction="none").mean()


def chosen() -> Tensor:
    return F.one_hot(labels(), CLASSES).double()


def real(columns: int) -> Callable[[], TensorDataset]:
    return targets(lambda: vectors(3)[:, :columns].contiguous())


def positive() -> Tensor:
    return integers((SAMPLES, CLASSES), 5).double()


def by(
    loss: Loss, model: Callable[[], nn.Module] = mlp, rows: Callable[[], Any] = classified, **other: Any
) -> Legitimate:
    return Legitimate(model, rows, loss, **other)


def judged(criterion: Callable[[], nn.Module], rows: Callable[[], Any] = classified, **other: Any) -> Legitimate:
    return Legitimate(other.pop("model", mlp), rows, criterion=criterion, **other)


def stepped_by(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Legitimate:
    return by(entropy, optimizer=lambda model: make(model.parameters(), **options))


def groups(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.01, "weight_decay": 0}]
    )


LEGITIMATE: dict[str, Legitimate] = {
    # Models.
    "keys are arguments, and the model returns a dict": Legitimate(Named, by_name),
    "the model returns an object": Legitimate(ReturnsObject, classified),
    "packed sequences": by(
        lambda model, batch: F.cross_entropy(model(*batch[:2]), batch[2]), Packed, sequences, collate=pad_in_batches
    ),
    "causal attention": by(by_token, Attends, tokens),
    "attention with padding": by(entropy, built_of(
        attends_with_padding, attention=lambda: nn.MultiheadAttention(2, 1, batch_first=True), last=dense(2)
    )),
    "straight-through rounding": by(entropy, built_of(
        lambda model, inputs: model.last(Rounded.apply(model.first(inputs))), first=dense(8, 8), last=dense()
    )),
    "a filter of complex numbers": by(entropy, built_of(
        filtered, filter=lambda: nn.Parameter(torch.ones(5, 2)), last=dense()
    )),
    "a frozen first layer": by(entropy, frozen_below),
    "an orthogonal layer": by(entropy, orthogonal),
    "hooks that change outputs and inputs": by(entropy, hooked_outputs),
    "layers that were lazy": by(entropy, lazy),
    "a bag of words": by(
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[0][:, 0] % CLASSES),
        built_of(embedded, bag=lambda: nn.EmbeddingBag(20, 6), last=dense(6)), tokens,
    ),
    "several heads": by(of_heads, built_of(
        several_heads, body=dense(8, 8), heads=lambda: nn.ModuleDict({"near": nn.Linear(8, 3), "far": nn.Linear(8, 3)})
    )),
    "soft experts": by(entropy, built_of(
        soft_experts, gate=dense(8, 2), experts=lambda: nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])
    )),
    "one module that is called three times": by(entropy, built_of(
        lambda model, inputs: model.last(model.body(model.body(model.body(inputs)).tanh())),
        body=dense(8, 8), last=dense(),
    )),
    "a scale without dims": by(entropy, built_of(
        lambda model, inputs: model.scale * model.last(inputs),
        scale=lambda: nn.Parameter(torch.tensor(0.7)), last=dense(),
    )),
    "a list of parameters": by(entropy, built_of(
        lambda model, inputs: sum(each * model.last(inputs) for each in model.scales),
        scales=lambda: nn.ParameterList([torch.ones(3), torch.full((3,), 0.5)]), last=dense(),
    )),
    "in-place activations": by(entropy, lambda: nn.Sequential(
        nn.Linear(8, 12), nn.ReLU(inplace=True), nn.Linear(12, 3)
    )),
    "convolutions and group norm": by(entropy, lambda: nn.Sequential(
        nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.Flatten(),
        nn.Linear(16, 3),
    )),
    "an autoencoder with transposed convolutions": by(
        lambda model, batch: F.mse_loss(model(batch[0][:, None]), batch[0][:, None]),
        lambda: nn.Sequential(nn.Conv1d(1, 3, 2, 2), nn.Tanh(), nn.ConvTranspose1d(3, 1, 2, 2)),
    ),
    "a bilinear layer": by(entropy, built_of(
        lambda model, inputs: model.pair(inputs[:, :4], inputs[:, 4:]), pair=lambda: nn.Bilinear(4, 4, 3)
    )),
    "a recurrent cell in a Python loop": by(entropy, built_of(
        lambda model, inputs: model.last(_unrolled(model.cell, inputs)), cell=lambda: nn.GRUCell(2, 6), last=dense(6)
    )),
    "own checkpointing, not reentrant": by(entropy, built_of(
        lambda model, inputs: model.last(checkpoint(model.body, inputs, use_reentrant=False)),
        body=dense(8, 8), last=dense(),
    )),
    "own checkpointing, reentrant": by(entropy, built_of(
        lambda model, inputs: model.last(checkpoint(model.body, model.first(inputs), use_reentrant=True)),
        first=dense(8, 8), body=dense(8, 8), last=dense(),
    )),
    "tied weights": by(by_token, built_of(
        lambda model, words: model.words(words) @ model.words.weight.T, words=lambda: nn.Embedding(20, 8)
    ), tokens),
    "a buffer that is not saved": by(entropy, lambda: _with_buffer()),
    # Losses.
    "gradient penalty": by(with_gradient_penalty),
    "triplets": by(triplet),
    "distillation": by(distilled),
    "Gaussian likelihood": by(likelihood, rows=real(2)),
    "quantiles": by(quantiles, rows=real(3)),
    "focal loss": by(focal),
    "two views, each the other's target": by(logistic),
    "a bonus for entropy": by(with_entropy_bonus),
    "connectionist classification": by(connectionist, built_of(
        lambda model, steps: model.last(steps), last=dense(2)
    )),
    "binary, weighted by class": judged(
        lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0])), targets(chosen)
    ),
    "classes as chances": judged(nn.CrossEntropyLoss, targets(lambda: vectors(3)[:, :3].softmax(1))),
    "ignored classes": judged(lambda: nn.CrossEntropyLoss(ignore_index=2)),
    "label smoothing": judged(lambda: nn.CrossEntropyLoss(label_smoothing=0.2)),
    "Poisson": judged(nn.PoissonNLLLoss, targets(positive)),
    "Huber": judged(lambda: nn.HuberLoss(delta=0.3), real(3)),
    "margins": judged(nn.MultiMarginLoss),
    "several labels": judged(nn.MultiLabelSoftMarginLoss, targets(chosen)),
    "absolute error": judged(nn.L1Loss, real(3)),
    "soft margins": judged(nn.SoftMarginLoss, targets(lambda: 2 * chosen() - 1)),
    # Data.
    "numbers of Python and arrays": by(entropy, rows=Rows),
    "named tuples": by(
        entropy, rows=lambda: [Sample(row, label) for row, label in zip(vectors(), labels(), strict=True)]
    ),
    "a stream": by(entropy, rows=Stream),
    "parts of datasets, joined": by(entropy, rows=lambda: ConcatDataset(
        [Subset(classified(), range(4, 8)), Subset(classified(), [3, 2, 1, 0])]
    )),
    "datasets side by side": by(entropy, rows=lambda: StackDataset(
        list(vectors()), [int(label) for label in labels()]
    )),
    # Optimizers.
    "groups of parameters": by(entropy, optimizer=groups),
    "Adagrad": stepped_by(torch.optim.Adagrad),
    "centered RMSprop": stepped_by(torch.optim.RMSprop, centered=True, momentum=0.5),
    "NAdam": stepped_by(torch.optim.NAdam),
    "Rprop": stepped_by(torch.optim.Rprop),
    "averaged SGD": stepped_by(torch.optim.ASGD),
    "Adadelta": stepped_by(torch.optim.Adadelta),
    "Nesterov": stepped_by(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "without foreach": stepped_by(torch.optim.Adam, foreach=False, amsgrad=True),
    "a learning rate that is a tensor": stepped_by(torch.optim.Adam, lr=torch.tensor(0.01), foreach=False),
    # Settings.
    "one sample per micro-batch": by(entropy, settings={"accumulate": 4}),
    "clipped": by(entropy, settings={"clip_norm": 0.1}),
}  # fmt: skip


def _unrolled(cell: nn.Module, inputs: Tensor) -> Tensor:
    state = inputs.new_zeros(len(inputs), 6)
    for step in inputs.unflatten(1, (4, 2)).unbind(1):
        state = cell(step, state)
    return state


def _with_buffer() -> nn.Module:
    model = Net(lambda self, inputs: self.last(inputs * self.scale), last=nn.Linear(8, 3))
    model.register_buffer("scale", torch.linspace(0.5, 1.5, 8), persistent=False)
    return model


def plain_training(program: Legitimate) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = program.model().double()
    optimizer = program.optimizer(model)
    criterion = program.criterion().double() if program.criterion else None
    batch = program.batch()
    for _ in range(STEPS):
        optimizer.zero_grad()
        if criterion is not None:
            loss = criterion(model(batch[0]), batch[1])
        elif program.loss is not None:
            loss = program.loss(model, batch)
        else:
            returned = model(**batch) if isinstance(batch, dict) else model(*batch)
            loss = returned["loss"] if isinstance(returned, dict) else returned.loss
        loss.backward()
        if norm := program.settings.get("clip_norm"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
    return {name: weight.detach() for name, weight in model.state_dict().items()}
