"""Parameters and buffers that are unusual: trained as on one rank, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
import tiny
from paceline.errors import PacelineError
from worlds import ranks


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
