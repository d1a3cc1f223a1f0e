"""Parity: trains a model under several layouts on CPU ranks and compares the results with a single process.

    report = paceline.testing.parity("recipe.yaml", layouts=["ddp:3", "fsdp:2", "shard=2 tensor=2"])
    print(report)
    assert report.holds

Instead of a recipe, pass a function that builds a Trainer, and the data:

    report = paceline.testing.parity(lambda **settings: Trainer(Net(), criterion=loss, **settings), data)

The default precision is float64, in which differences are not due to rounding. A layout that the model or the recipe
does not support is listed with the code of its error. With `bits=True`, `deterministic: everywhere` is set, and results
must be equal to the bit, in float32 by default.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from paceline.config.components import PRECISIONS
from paceline.config.recipe import Config
from paceline.errors import ConfigError, LayoutError
from paceline.launcher.function import launch
from paceline.plan.layout import AXIS_NAMES, STRATEGIES
from paceline.text import columns, format_value, parse_pairs

DEFAULT_LAYOUTS = ("ddp:2", "ddp:3", "fsdp:2", "hsdp:4", "tp:2", "shard=2 tensor=2", "pp:2", "pipeline=2 shard=2")
BITS_LAYOUTS = ("ddp:2", "ddp:3", "ddp:4")
SETS = ("precision", "clip_norm", "device", "run", "quiet")
_EVERYWHERE = {"deterministic": "everywhere"}
_ROUNDING = 1e-12  # of evaluations: each rank adds its own in float64
_UNUSED = {"layout", "resume", "save_every", "save_minutes", "save_best"}  # of a recipe: there is no run folder
EVALUATION_SAMPLES = 37  # not divisible by the degrees of a layout

# Builds a Trainer from settings: the top-level keys of a recipe.
TrainerFactory = Callable[..., Any]


@dataclass(frozen=True)
class ParityLayout:
    """A layout to compare: `fsdp:3`, a strategy and a number of ranks, or degrees such as `shard=2 tensor=2`."""

    text: str
    ranks: int
    settings: dict[str, Any] = field(hash=False)

    @classmethod
    def read(cls, text: str) -> ParityLayout:
        try:
            if "=" in text:
                pairs = parse_pairs(",".join(text.replace(",", " ").split()))
                degrees = {axis: int(degree or "") for axis, degree in pairs}
                if not set(degrees) <= set(AXIS_NAMES):
                    raise ValueError
                return cls(text, prod(degrees.values()), {"strategy": "auto", "layout": degrees})
            strategy, _, ranks = text.partition(":")
            if strategy not in STRATEGIES:
                raise ValueError
            return cls(text, int(ranks or 1), {"strategy": strategy, "layout": None})
        except ValueError:
            raise ConfigError(
                "bad-layout",
                f"Invalid layout: {text!r}.",
                fix="use a strategy and a number of ranks (fsdp:2), or degrees: "
                + " ".join(f"{name}=2" for name in AXIS_NAMES),
            ) from None


@dataclass(frozen=True)
class ParityRun:
    """The result of one training run."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    evaluation: dict[str, float] = field(default_factory=dict)  # metrics of the last evaluation


@dataclass(frozen=True)
class ParityRow:
    """The largest relative differences between a layout and a single process: over all steps, and of final weights."""

    layout: str
    loss: float = 0.0
    norm: float = 0.0
    weights: float = 0.0
    evaluation: float | None = None  # None: no evaluation
    parameter: str | None = None  # the first one that differs by more than the bound
    refused: str | None = None  # error code, if the model does not support this layout
    bound: float = 0.0

    @property
    def holds(self) -> bool:
        if self.refused:
            return True
        worst = max(self.loss, self.norm, self.weights)
        evaluated = (self.evaluation or 0.0) <= max(self.bound, _ROUNDING)
        return worst <= self.bound and evaluated and self.parameter is None


@dataclass(frozen=True)
class ParityReport:
    rows: list[ParityRow]
    reference: ParityRun
    precision: str

    @property
    def holds(self) -> bool:
        """Whether all supported layouts agree, and at least one is supported."""
        return all(row.holds for row in self.rows) and any(row.refused is None for row in self.rows)

    def __str__(self) -> str:
        head = ("layout", "loss", "gradient norm", "weights", "evaluation", "")
        loss = " → ".join(format_value(self.reference.losses[number]) for number in (0, -1))
        about = f"one process: {len(self.reference.losses)} steps, loss {loss}, {self.precision}"
        return f"{about}\n{columns([head, *map(_cells, self.rows)])}"


def parity(
    what: str | Path | Mapping[str, Any] | Config | TrainerFactory,
    data: Any = None,
    val: Any = None,
    *,
    layouts: Sequence[str] | None = None,
    steps: int = 10,
    precision: str | None = None,
    bound: float | None = None,
    bits: bool = False,
) -> ParityReport:
    """Train for a few steps in one process and under each layout, and compare.

    Args:
        what: a recipe (a Config, a dict or the path of a file), or a function that builds a Trainer from settings
        data: to train on; default: that of the recipe
        val: to evaluate on
        layouts: such as `["ddp:3", "fsdp:2", "shard=2 tensor=2"]`; default: eight of them; with `bits`, ddp on 2 to 4
            ranks
        steps: to compare
        precision: default: fp64, in which differences are not due to rounding; with `bits`, fp32
        bound: largest relative difference allowed; default: depends on the precision
        bits: whether to set `deterministic: everywhere` and require results that are equal to the bit

    Returns:
        A report: `print(report)` shows a table, `report.holds` tells whether all supported layouts agree.

    Raises:
        ConfigError: `config.bad-layout`, `config.contradiction`

    Example:
        >>> data = {"name": "shapes", "size": 8, "channels": 1, "length": 32}
        >>> recipe = {"model": {"name": "mlp", "inputs": 64}, "data": data, "batch": 8}
        >>> report = testing.parity(recipe, layouts=["ddp:2"], steps=1)
        >>> report.holds
        True
    """
    import paceline.train.trainer  # noqa: F401  # before ranks are forked, so that it is imported once
    from paceline.train import recipe_objects

    build, recipe_settings = _factory_for(what)
    if recipe_settings and data is None:
        data, val = recipe_objects.build_data(Config.from_dict(recipe_settings))
    val = _limit(val)
    wanted = [ParityLayout.read(text) for text in layouts or (BITS_LAYOUTS if bits else DEFAULT_LAYOUTS)]
    precision = precision or ("fp32" if bits else "fp64")
    if bits and bound:
        raise ConfigError(
            "contradiction", f"bits requires equal results, but the bound is {bound:g}.", fix="set only one of them"
        )
    fixed = {**recipe_settings, "precision": precision, "device": "cpu"} | (_EVERYWHERE if bits else {})
    said = dict[str, float]()
    given = {"build": build, "data": data, "val": val, "steps": steps}
    reference = train_on(1, [{**fixed, "strategy": "single"}], said, **given)[0]
    if isinstance(reference, str):
        raise ConfigError("bad-layout", f"Training in a single process failed:\n{reference}")
    bound = 0.0 if bits else PRECISIONS.facts(precision).parity_bound if bound is None else bound
    rows: dict[str, ParityRow] = {}
    for ranks in sorted({layout.ranks for layout in wanted}):
        same = [layout for layout in wanted if layout.ranks == ranks]
        runs = train_on(ranks, [{**fixed, **layout.settings} for layout in same], said, **given)
        for layout, run in zip(same, runs, strict=True):
            rows[layout.text] = compare(layout.text, reference, run, bound)
    return ParityReport([rows[layout.text] for layout in wanted], reference, precision)


def _factory_for(what: Any) -> tuple[TrainerFactory, dict[str, Any]]:
    """A function that builds a Trainer, and the settings of the recipe, which the comparison overrides."""
    from paceline.train.recipe_objects import drop_inherited_options

    if callable(what):
        return what, {}
    if not isinstance(what, Config):
        what = Config.from_dict(what) if isinstance(what, Mapping) else Config.from_file(what)
    what = drop_inherited_options(what)[0]
    return _from_recipe, {key: value for key, value in what.to_dict().items() if key not in _UNUSED}


def _limit(val: Any) -> Any:
    """The first samples of a map-style dataset: enough to detect a difference."""
    if not (hasattr(val, "__len__") and hasattr(val, "__getitem__")) or len(val) <= EVALUATION_SAMPLES:
        return val
    return Subset(val, range(EVALUATION_SAMPLES))


def _from_recipe(**settings: Any) -> Any:
    from paceline.train.trainer import Trainer

    return Trainer.from_config(Config.from_dict(settings))


def train_on(
    ranks: int, settings: Sequence[Mapping[str, Any]], said: dict[str, float], **given: Any
) -> list[ParityRun | str]:
    """Train once per settings, with the same ranks; each result is a run or the text of a LayoutError. What
    was `said` is not logged again."""
    results, new = launch(_train_all, ranks=ranks, settings=settings, said=said, **given)
    said |= new
    return [result if isinstance(result, str) else ParityRun(**result) for result in results]


def _train_all(settings: Sequence[Mapping[str, Any]], said: dict[str, float], **given: Any) -> list[Any]:
    log = logging.getLogger("paceline")  # of this child process
    log.addFilter(lambda record: said.setdefault(record.getMessage(), record.created) == record.created)
    return [[_train(each, **given) for each in settings], said]


def _train(settings: Mapping[str, Any], build: TrainerFactory, data: Any, val: Any, steps: int) -> dict[str, Any] | str:
    # Gradient norms are recorded only if they are clipped, so clip at a bound that is never reached.
    clip = settings.get("clip_norm") or 1e30
    try:
        trainer = _build(build, {**settings, "run": False, "quiet": True, "clip_norm": clip})
        history = trainer.train(data, val, max_steps=steps)
    except LayoutError as error:  # raised on every rank
        return str(error)
    last = dict(history.evaluations[-1]) if history.evaluations else {}
    norms = [record["grad_norm"] for record in history.steps]
    return {"losses": history.losses, "norms": norms, "weights": trainer.state_dict(), "evaluation": last}


def _build(build: TrainerFactory, settings: dict[str, Any]) -> Any:
    try:
        trainer = build(**settings)
    except TypeError as error:
        if "multiple values for" not in str(error):
            raise
        raise _bad_settings(str(error)) from None
    checked = ("precision", "clip_norm", "deterministic")
    if any(getattr(trainer.config, name) != settings[name] for name in checked if name in settings):
        raise _bad_settings("the Trainer has different settings than requested")
    return trainer


def _bad_settings(what: str) -> ConfigError:
    return ConfigError(
        "parity-settings", f"parity() sets {', '.join(SETS)}, the layout and, with bits, deterministic: {what}."
    )


def compare(layout: str, reference: ParityRun, other: ParityRun | str, bound: float) -> ParityRow:
    """`bound` is the largest relative difference of losses and gradient norms, and of a weight in norm."""
    if isinstance(other, str):
        return ParityRow(layout, refused=other.partition("]")[0].lstrip("["))
    parameter = None
    difference = size = 0.0
    for name, expected in reference.weights.items():
        actual = other.weights.get(name)
        if actual is None or actual.shape != expected.shape:
            return ParityRow(layout, weights=inf, parameter=name, bound=bound)
        error, norm = float((actual.double() - expected.double()).norm()), float(expected.double().norm())
        difference, size = difference + error**2, size + norm**2
        # Biases are initialized to zero and still small: compare them with a weight of typical size.
        agrees = error <= bound * max(norm, expected.numel() ** 0.5 * 1e-2) if bound else _same_bits(actual, expected)
        if parameter is None and not agrees:
            parameter = name
    names = sorted({*reference.evaluation, *other.evaluation})
    expected_metrics, metrics = ([run.evaluation.get(name, inf) for name in names] for run in (reference, other))
    return ParityRow(
        layout,
        loss=_largest(reference.losses, other.losses),
        norm=_largest(reference.norms, other.norms),
        weights=(difference / size) ** 0.5 if size else difference,
        evaluation=_largest(expected_metrics, metrics) if names else None,
        parameter=parameter,
        bound=bound,
    )


def _same_bits(first: Tensor, second: Tensor) -> bool:
    """NaN equals itself, and zeros have signs."""
    one, other = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second))
    return first.dtype == second.dtype and torch.equal(one, other)


def _largest(reference: Sequence[float], other: Sequence[float]) -> float:
    if len(reference) != len(other):
        return inf
    pairs = list(zip(reference, other, strict=True))
    if any(isnan(b) for _, b in pairs):
        return inf
    return max((abs(a - b) / max(abs(a), 1e-12) for a, b in pairs), default=0.0)


def _cells(row: ParityRow) -> tuple[str, ...]:
    if row.refused:
        return row.layout, "", "", "", "", f"not supported: {row.refused}"
    agrees = "agrees" if row.bound else "equal to the bit"
    verdict = agrees if row.holds else "DIFFERS" + (f", first in {row.parameter}" if row.parameter else "")
    numbers = (row.loss, row.norm, row.weights, row.evaluation)
    return (row.layout, *("-" if value is None else f"{value:.0e}" for value in numbers), verdict)
