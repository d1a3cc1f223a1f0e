"""Whether an optimizer updates parameters independently."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import paceline
import tiny
from paceline.config.components import OptimizerFacts
from paceline.errors import LayoutError, PacelineError, TrainError
from paceline.log import Log
from paceline.train.checks.unsupported import require_separable
from worlds import ranks


class Normalized(torch.optim.Optimizer):
    """Divides gradients by their norm over all parameters, or over each one."""

    def __init__(self, params: Any, lr: float, *, over_all: bool = True) -> None:
        super().__init__(params, {"lr": lr, "over_all": over_all})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norms = [parameter.grad.norm() for parameter in group["params"]]
            total = torch.stack(norms).norm()
            for parameter, norm in zip(group["params"], norms, strict=True):
                parameter.sub_(parameter.grad / (total if group["over_all"] else norm), alpha=group["lr"])


class Demanding(torch.optim.SGD):
    def __init__(self, params: Any, model: Any) -> None:
        super().__init__(params, lr=0.1)


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]


def test_an_update_that_depends_on_other_parameters_is_refused() -> None:
    with pytest.raises(LayoutError) as caught:
        require_separable(Normalized(parameters(), 0.1), None, Log(0))
    assert caught.value.code == "layout.optimizer-couples-parameters" and "Normalized" in str(caught.value)


def test_facts_of_a_registered_optimizer_are_believed() -> None:
    require_separable(Normalized(parameters(), 0.1), OptimizerFacts(elementwise=True), Log(0))


@pytest.mark.parametrize(
    "optimizer",
    [
        Normalized(parameters(), 0.1, over_all=False),
        torch.optim.AdamW(parameters()),
        type("OwnAdam", (torch.optim.Adam,), {})(parameters(), lr=0.1, weight_decay=0.1),
    ],
)
def test_independent_updates_are_allowed(optimizer: torch.optim.Optimizer, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(3)
    drawn = torch.random.get_rng_state()
    require_separable(optimizer, None, Log(0))
    assert torch.equal(torch.random.get_rng_state(), drawn) and "warning" not in capsys.readouterr().err


def test_an_optimizer_that_can_not_be_tried_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    require_separable(Demanding(parameters(), None), None, Log(0))
    assert "Demanding could not be tried" in capsys.readouterr().err


class Odd(nn.Module):
    """A classifier with one more weight, which a test makes odd."""

    def __init__(self, weight: Tensor | None = None, **buffers: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 2)
        self.weight = nn.Parameter(weight if weight is not None else torch.randn(8, 2))
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs)
        return out + (inputs.to(self.weight.dtype) @ self.weight).abs()


def matrix(rows: int = 8, columns: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, columns, dtype=dtype, generator=torch.Generator().manual_seed(1))


class Aliased(Odd):
    def __init__(self) -> None:
        super().__init__(matrix(8, 4)[:, :2])
        self.other = nn.Parameter(self.weight.data.as_strided((8, 2), (4, 1), 1))  # one column of both


class Neighbours(Odd):
    def __init__(self) -> None:
        super().__init__(matrix(8, 4)[:, :2])
        self.other = nn.Parameter(self.weight.data.as_strided((8, 2), (4, 1), 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + inputs @ self.other


class Table(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.table((inputs[:, 0] > 0).long())
        return super().forward(inputs) + out


def losses(model: nn.Module, **settings: Any) -> list[float]:
    return tiny.classifier_trainer(model, batch=12, **settings).train(tiny.blobs(), max_steps=4).losses


def code_of(model: nn.Module, **settings: Any) -> str:
    with pytest.raises(PacelineError) as caught:
        losses(model, **settings)
    return caught.value.code


def buffers() -> dict[str, Tensor]:
    kinds = (torch.int16, torch.uint16, torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64)
    return {f"buffer{number}": torch.arange(3).to(dtype) for number, dtype in enumerate(kinds)}


def channels_last() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 3, padding=1), nn.Flatten(), nn.Linear(16, 2))
    return layers.to(memory_format=torch.channels_last)


MODELS = {
    "transposed": lambda: Odd(matrix(2, 8).t()),
    "channels last": channels_last,
    "neighbours in one storage": Neighbours,
    "buffers of rare dtypes": lambda: Odd(**buffers()),
    "complex": lambda: Odd(matrix(dtype=torch.complex64)),
    "complex only": lambda: nn.Sequential(Complex()),
}
ALL = {"clip_norm": 1.0, "ema": {"decay": 0.9}, "accumulate": 2, "optimizer": {"name": "adamw", "lr": 0.01}}


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrix(dtype=torch.complex128))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs.to(self.weight.dtype) @ self.weight).abs().float()


def trained(cases: list[tuple[str, dict[str, Any]]]) -> list[list[float]]:
    return [losses(MODELS[name](), **settings) for name, settings in cases]


def test_odd_parameters_train_as_on_one_rank() -> None:
    names = [name for name in MODELS if name != "complex"]
    cases = [(name, {"strategy": strategy}) for name in names for strategy in ("ddp", "fsdp")]
    cases += [("complex", {"strategy": "ddp", **ALL})]
    expected = trained([(name, {**settings, "strategy": "auto"}) for name, settings in cases])
    for case, found, one in zip(cases, paceline.launch(trained, ranks=2, cases=cases), expected, strict=True):
        assert found == pytest.approx(one, rel=1e-5), case


@ranks(2)
def test_what_a_layout_does_not_support_is_refused_by_name() -> None:
    refused = {
        "layout.mixed-dtypes": lambda: Odd(matrix(dtype=torch.complex64)),
        "layout.scalar-parameter": lambda: Odd(matrix(8, 0)),
        "layout.shared-memory": Aliased,
        "layout.sparse-gradients": Table,
    }
    for code, make in refused.items():
        assert code_of(make(), strategy="fsdp") == code
    assert code_of(Table(), strategy="ddp") == "layout.sparse-gradients"
    assert code_of(nn.Flatten(), strategy="ddp") == "train.nothing-to-train"


def test_what_no_layout_supports_is_refused_by_name() -> None:
    assert code_of(Odd(matrix(1, 2).expand(8, 2))) == "train.expanded-parameter"
    assert code_of(nn.Sequential(nn.LazyLinear(2))) == "train.lazy-parameters"
    assert code_of(Table(), clip_norm=1.0) == "train.sparse-clipping"
    frozen = Odd().requires_grad_(False)
    optimizer = torch.optim.SGD(frozen.parameters(), lr=0.1)
    assert code_of(frozen, optimizer=optimizer) == "train.nothing-to-train"


class Halving:
    """Not of torch, as schedulers of other libraries are."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.groups, self.steps = optimizer.param_groups, 0

    def step(self) -> None:
        self.steps += 1
        self.groups[0]["lr"] *= 0.5

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Timed(Halving):
    def step(self, epoch: int) -> None:  # type: ignore[override]
        """As the schedulers of timm."""


def trainer_with(make: Any, **settings: Any) -> Any:
    model = tiny.classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return tiny.classifier_trainer(model, optimizer=optimizer, scheduler=make(optimizer), clip_norm=1e-3, **settings)


def test_an_object_with_the_methods_of_a_scheduler_is_stepped_and_saved(tmp_path: Any) -> None:
    trainer = trainer_with(Halving, scheduler_interval="step")
    rates = [record["lr"] for record in trainer.train(tiny.blobs(), max_steps=3).steps]
    assert rates == [1.0, 0.5, 0.25]
    trainer.save_checkpoint(tmp_path / "saved")
    other = trainer_with(Halving, scheduler_interval="step")
    other.load_checkpoint(tmp_path / "saved")
    assert [record["lr"] for record in other.train(tiny.blobs(), max_steps=5).steps] == [0.125, 0.0625]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda optimizer: lambda step: 0.5**step, "a function without step, state_dict"),
        (lambda optimizer: lr_scheduler.StepLR, "the class StepLR"),
        (lambda optimizer: "cosine", 'schedule="cosine"'),
        (Timed, "requires the argument 'epoch'"),
    ],
    ids=["function", "class", "name", "argument"],
)
def test_what_is_no_scheduler_is_refused(make: Any, what: str) -> None:
    with pytest.raises(TrainError) as caught:
        trainer_with(make)
    assert caught.value.code == "train.not-a-scheduler" and what in str(caught.value)


def warm_up(step: int, *, num_warmup_steps: int, num_training_steps: int) -> float:
    return min(1.0, step / num_warmup_steps)


def hugging_face(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, partial(warm_up, num_warmup_steps=3, num_training_steps=6))


MISTAKES: list[tuple[Any, str, list[str]]] = [
    (hugging_face, "epoch", ["learning rate is 0", "length of 6", "scheduler_interval='step'"]),
    (hugging_face, "step", []),
    (lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=6), "epoch", ["length of 6", "scheduler_interval='step'"]),
    (lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=6), "step", []),
    (lambda o: lr_scheduler.CosineAnnealingLR(o, 6), "epoch", ["length of 6"]),
    (lambda o: lr_scheduler.CosineAnnealingLR(o, 2), "epoch", []),
    (lambda o: lr_scheduler.CosineAnnealingLR(o, 2), "step", ["number of epochs", "scheduler_interval='epoch'"]),
    (lambda o: lr_scheduler.CosineAnnealingLR(o, 200), "epoch", []),
    (lambda o: lr_scheduler.LinearLR(o), "epoch", []),
]


@pytest.mark.parametrize(("make", "interval", "said"), MISTAKES)
def test_a_scheduler_that_is_stepped_in_the_other_unit_is_warned_about(
    make: Any, interval: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer_with(make, scheduler_interval=interval).train(tiny.blobs(), epochs=2)
    shown = "".join(capsys.readouterr())
    assert shown.count("warning: the scheduler") == bool(said) and all(text in shown for text in said)
