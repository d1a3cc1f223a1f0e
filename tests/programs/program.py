"""A random training program: one choice of every part, and the same training in plain PyTorch in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.data.sample_order import Permutation
from programs import parts
from samples import sample

EPOCHS, STEPS = 3, sample(8, 11)  # more than two epochs of steps

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {"strategy": "single"}),
    "ddp:2": (2, {"strategy": "ddp"}),
    "ddp:3": (3, {"strategy": "ddp"}),
    "fsdp:2": (2, {"strategy": "fsdp"}),
    "fsdp:3": (3, {"strategy": "fsdp"}),
    "hsdp:4": (4, {"layout": {"replicate": 2, "shard": 2}}),
    "pp:2": (2, {"strategy": "pp"}),
}
_LAYOUT_ODDS = {"single": 3, "ddp:2": 6, "ddp:3": 4, "fsdp:2": 5, "fsdp:3": 2, "hsdp:4": 1, "pp:2": 2}

# Loops: train() by steps or epochs, the two levels of custom loops, a custom loop that calls the optimizer itself, and
# two Trainers that take turns.
_LOOP_ODDS = {"steps": 5, "epochs": 5, "training-step": 4, "forward-backward": 3, "own-optimizer": 1, "adversarial": 2}
CUSTOM_LOOPS = ("training-step", "forward-backward", "own-optimizer", "adversarial")


@dataclass(frozen=True)
class Program:
    number: int
    model: str
    loss: str
    data: str
    optimizer: str
    loop: str
    layout: str
    groups: int = 1
    scheduler: str | None = None
    callback: str | None = None
    clip: float | None = None
    stop: int | None = None  # step after which the run is interrupted
    killed: bool = False  # by SIGKILL, after a save every two steps
    layout_after: str = ""  # in which it is resumed

    def __str__(self) -> str:
        text = (
            f"{self.number}: {self.model} × {self.loss} × {self.data} × {self.optimizer} × {self.loop} × {self.layout}"
        )
        extras = {"groups": self.groups, "scheduler": self.scheduler, "callback": self.callback, "clip": self.clip}
        text += "".join(f", {name} {value}" for name, value in extras.items() if value not in (None, 1))
        if self.stop is None:
            return text
        return (
            f"{text}, {'killed' if self.killed else 'stopped'} after step {self.stop}, resumed on {self.layout_after}"
        )

    @property
    def world(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def bound(self) -> float:
        """On relative differences, in float64. Hugging Face computes losses in float32, as torch does 1 / count."""
        return 1e-5 if self.reads == "names" or self.loss == "late-reciprocal" else 1e-8

    @property
    def odd(self) -> bool:
        """Whether it may be refused, or be warned about by name. All other programs must train without a word."""
        chosen = (parts.MODELS[self.model], parts.LOSSES[self.loss], parts.DATA[self.data])
        chosen += (parts.OPTIMIZERS[self.optimizer],)
        called = self.callback is not None and parts.CALLBACKS[self.callback].odd
        if self.loss == "penalized" and not {"single", "ddp:2", "ddp:3"}.issuperset(
            (self.layout, self.layout_after or "single")
        ):
            return True  # it reads parameters outside the model's forward
        unusual = "pp:2" in (self.layout, self.layout_after) or self.loop in ("own-optimizer", "adversarial")
        return any(part.odd for part in chosen) or called or unusual

    def settings(self, layout: str) -> dict[str, Any]:
        """Keywords of the Trainer."""
        known: dict[str, Any] = dict((*parts.MODELS[self.model].settings, *parts.DATA[self.data].settings))
        batch = None if isinstance(self.dataset(), (DataLoader, list, parts.Batches)) else parts.BATCH
        groups = {"accumulate": self.groups} if self.groups > 1 else {}
        saves = {"save_every": 2} if self.killed else {}
        return {
            **known,
            **groups,
            **saves,
            **LAYOUTS[layout][1],
            "batch": batch,
            "clip_norm": self.clip,
            "precision": "fp64",
        }

    def build_model(self) -> nn.Module:
        torch.manual_seed(self.number)
        model = parts.MODELS[self.model].build()
        if parts.MODELS[self.model].frozen or self.callback == "unfreeze":
            parts.first_layer(model).requires_grad_(False)
        return model

    def dataset(self) -> Any:
        rows: Any = self.tensors(parts.SAMPLES, 0)
        return parts.DATA[self.data].build(self.named(rows) if self.reads == "names" else rows)

    @property
    def reads(self) -> str:
        return parts.LOSSES[self.loss].reads

    def named(self, rows: TensorDataset) -> parts.Named:
        return parts.Named(rows, parts.NAMES[self.reads])

    def validation(self) -> Any:
        rows = self.tensors(parts.VALIDATION, 1)
        return self.named(rows) if self.reads == "names" else rows

    def tensors(self, samples: int, seed: int) -> TensorDataset:
        return TensorDataset(*parts.tensors(self.loss, samples, 1000 * seed + self.number))


def draw(number: int) -> Program:
    """The program of this number."""
    chance = random.Random(number)

    def pick(weighted: dict[str, int]) -> str:
        return chance.choices(list(weighted), list(weighted.values()))[0]

    # Half of the programs have at most one odd part, so that other parts are not hidden behind its refusal.
    odd_parts = chance.choice((0, 1, 1, 4))
    odd_slots = set(chance.sample(("model", "loss", "data", "optimizer"), min(odd_parts, 4)))

    def part(slot: str, known: dict[str, Any], **needs: Any) -> str:
        names = [n for n, p in known.items() if all(getattr(p, key) == value for key, value in needs.items())]
        wanted = [name for name in names if known[name].odd == (slot in odd_slots)]
        return chance.choice(wanted or names)

    layout, loop = pick(_LAYOUT_ODDS), pick(_LOOP_ODDS)
    needs = {"stages": True} if layout == "pp:2" else {}
    model = part("model", parts.MODELS, **needs)
    loss = part("loss", parts.LOSSES, reads=parts.MODELS[model].reads)
    data = part("data", parts.DATA)
    program = Program(
        number,
        model,
        loss,
        data,
        part("optimizer", parts.OPTIMIZERS),
        loop,
        layout,
        groups=chance.choice((1, 1, 1, 2, 3, 10)),  # ten: micro-batches of one sample
    )
    return _made_sound(program, chance)


def _made_sound(program: Program, chance: random.Random) -> Program:
    """Replace combinations that mean nothing, then add the rest."""
    changes: dict[str, Any] = {}
    if program.layout == "pp:2" and parts.LOSSES[program.loss].criterion is None:
        changes["loss"] = "cross-entropy"
    if program.layout == "single" and parts.DATA[program.data].several:
        changes["data"] = "tensors"
    if program.data == "names" and (parts.LOSSES[program.loss].criterion is not None or program.reads == "names"):
        changes["data"] = "in-order"  # a criterion reads pairs
    if program.reads == "names":
        changes |= {"loop": "epochs"} if program.loop == "own-optimizer" else {}
        changes |= {"data": "loader"} if program.data in ("batches", "list-of-batches") else {}
        changes |= {} if program.optimizer in ("sgd", "momentum", "groups") else {"optimizer": "momentum"}
    if program.data == "stream-said" and program.layout in ("ddp:3", "fsdp:3", "hsdp:4", "pp:2"):
        changes["layout"] = "ddp:2"  # in which a step reads the samples that it reads in one process
    if program.loop == "adversarial":
        changes |= {"model": "mlp", "loss": "cross-entropy", "groups": 1, "optimizer": "sgd"}
        changes |= {"layout": "fsdp:2"} if program.layout == "pp:2" else {}
    elif program.loop in ("forward-backward", "own-optimizer"):
        changes["groups"] = 1
    if program.model == "changes-input" and program.data in ("batches", "list-of-batches"):
        changes["data"] = "loader"  # it would change the data itself, which a resumed run reads anew
    if program.loss in ("centered", "weighing") and program.loop == "own-optimizer":
        changes["loop"] = "epochs"  # that loop makes a criterion for every batch
    if program.model == "batchnorm":
        changes["groups"] = 1  # its statistics are those of a micro-batch
    program = replace(program, **changes)
    if program.loop not in ("adversarial", "own-optimizer"):
        extras: dict[str, Any] = {"scheduler": chance.choice((None, None, "per-epoch", "per-step"))}
        extras["clip"] = chance.choice((None, None, 0.05))
        if chance.random() < 0.3:
            extras["callback"] = chance.choice(list(parts.CALLBACKS))
        elif chance.random() < 0.4:
            extras |= {"stop": chance.choice((1, 3, 5, 7)), "layout_after": _layout_after(program, chance)}
            extras["killed"] = program.loop in ("steps", "epochs") and chance.random() < 0.5
        program = replace(program, **extras)
    return program


def _layout_after(program: Program, chance: random.Random) -> str:
    if chance.random() < 0.5 or program.layout == "pp:2" or parts.DATA[program.data].odd:
        return program.layout
    return chance.choice(("single", "ddp:2", "ddp:3", "fsdp:2"))


@dataclass
class Result:
    losses: list[float]
    weights: dict[str, Tensor]
    evaluation: dict[str, float]


def value_of(result: Any) -> Tensor:
    if isinstance(result, paceline.Loss):
        return result.sum / result.weight
    return result["loss"] if isinstance(result, dict) else result


def loss_of(program: Program, model: Any, batch: Any, criterion: nn.Module | None) -> Tensor:
    part = parts.LOSSES[program.loss]
    if part.function is not None:
        return value_of(part.function(model, batch))
    if criterion is None:
        return model(**batch).loss
    return criterion(model(batch[0]), batch[1])


def batches(program: Program, data: Any, epoch: int) -> Iterator[Any]:
    """The batches of an epoch as one process reads them."""
    order = parts.DATA[program.data].order
    if order == "own":
        sampler = getattr(getattr(data, "batch_sampler", None), "sampler", None)
        for part in (sampler, getattr(data, "dataset", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        yield from data
        return
    rows = program.tensors(parts.SAMPLES, 0)
    indices = np.arange(parts.SAMPLES)
    if order == "ours":
        indices = Permutation(parts.SAMPLES, seed=0, epoch=epoch)(indices)
    for start in range(0, parts.SAMPLES, parts.BATCH):
        batch = rows[torch.from_numpy(indices[start : start + parts.BATCH])]
        named = program.data == "names" or program.reads == "names"
        yield dict(zip(parts.NAMES[program.reads], batch, strict=True)) if named else batch


def train_plainly(program: Program) -> Result:
    """The loop that a user would write for one process."""
    model = program.build_model().double()
    if program.loop == "adversarial":
        return _train_adversarially(program, model)
    make_criterion = parts.LOSSES[program.loss].criterion
    criterion = make_criterion().double() if make_criterion else None
    optimizer = parts.OPTIMIZERS[program.optimizer].build(trained_together(model, criterion))
    interval, build = parts.SCHEDULERS.get(program.scheduler or "", ("", lambda optimizer: None))
    scheduler = build(optimizer)
    callback = parts.CALLBACKS[program.callback].build(model) if program.callback else None
    losses: list[float] = []
    data = program.dataset()
    for epoch in range(EPOCHS + 9):
        for batch in batches(program, data, epoch):
            optimizer.zero_grad()
            loss = loss_of(program, model, batch, criterion)
            loss.backward()
            if program.clip is not None:
                held = [each for group in optimizer.param_groups for each in group["params"]]
                nn.utils.clip_grad_norm_(held, program.clip)
            optimizer.step()
            losses.append(loss.item())
            if interval == "step":
                scheduler.step()
            if program.loop == "steps" and len(losses) == STEPS:
                return Result(losses, weights_of(model), _evaluate(program, model, criterion))
        if interval == "epoch":
            scheduler.step()
        if callback is not None:
            callback.on_epoch(None)
        if program.loop != "steps" and epoch + 1 == EPOCHS:
            break
    return Result(losses, weights_of(model), _evaluate(program, model, criterion))


def trained_together(model: nn.Module, criterion: nn.Module | None) -> nn.Module:
    """What the optimizer is built from."""
    has_parameters = criterion is not None and any(True for _ in criterion.parameters())
    return nn.ModuleList([model, criterion]) if has_parameters else model


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _evaluate(program: Program, model: nn.Module, criterion: nn.Module | None) -> dict[str, float]:
    inputs, targets = program.tensors(parts.VALIDATION, 1).tensors
    batch: Any = (inputs.clone(), targets)
    if program.reads == "names":
        batch = dict(zip(parts.NAMES["names"], batch, strict=True))
    model.eval()
    with torch.no_grad():
        values = {"loss": float(loss_of(program, model, batch, criterion))}
        if with_metrics(program):
            outputs = model(inputs.clone())
            right = parts.accuracy(outputs, targets).mean().item()
            values |= {"accuracy": right, "f1": float(parts.f1(outputs, targets)), "as_loss": right}
    return values


def with_metrics(program: Program) -> bool:
    return parts.LOSSES[program.loss].criterion is not None and parts.LOSSES[program.loss].targets is not parts.one_hot


def generator() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, parts.FEATURES))


def judge_loss(judge: Any, maker: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        made = maker(batch[0][:, :4])
    real, fake = judge(batch[0])[:, 0], judge(made)[:, 0]
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def maker_loss(judge: Any, maker: Any, batch: Any) -> Tensor:
    return F.softplus(-judge(maker(batch[0][:, :4]))[:, 0]).mean()


def _train_adversarially(program: Program, judge: nn.Module) -> Result:
    maker = generator().double()
    ours, theirs = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (judge, maker))
    data = program.dataset()
    for epoch in range(EPOCHS):
        for batch in batches(program, data, epoch):
            batch = parts.pair(batch)
            for optimizer, loss in ((ours, judge_loss), (theirs, maker_loss)):
                optimizer.zero_grad()
                loss(judge, maker, batch).backward()
                optimizer.step()
    made = {f"maker.{name}": weight for name, weight in weights_of(maker).items()}
    return Result([], {**weights_of(judge), **made}, {})
