"""Does this model mean the same on every layout? Each layout on CPU ranks, against one process, side by side.

    report = paceline.testing.parity("recipe.yaml", layouts=["ddp:3", "fsdp:2", "shard=2 tensor=2"])
    print(report)
    assert report.holds

In place of a recipe, a function that makes a Trainer of yours, and its data:

    report = paceline.testing.parity(lambda **settings: Trainer(Net(), criterion=loss, **settings), data)

The default precision is float64: there, what differs is algebra, not rounding. A layout that the model or the recipe
can't have is listed with the code that it is refused with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan, prod
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Subset

from paceline.config.components import PRECISIONS
from paceline.config.recipe import Config
from paceline.errors import ConfigError, LayoutError
from paceline.launcher.function import launch
from paceline.plan.layout import AXIS_NAMES, STRATEGIES
from paceline.text import parse_pairs

DEFAULT_LAYOUTS = ("ddp:2", "ddp:3", "fsdp:2", "hsdp:4", "tp:2", "shard=2 tensor=2", "pp:2", "pipeline=2 shard=2")
SETS = ("precision", "clip_norm", "device", "run", "quiet")
EVALUATED = 37  # samples; a number that no layout divides

# Makes a Trainer from settings: the recipe's top-level keys.
Maker = Callable[..., Any]


@dataclass(frozen=True)
class ParityLayout:
    """One way to share a model: `fsdp:3`, a strategy on a number of ranks, or `shard=2 tensor=2`."""

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
                f"{text!r} is no layout.",
                fix="write a strategy and a number of ranks (fsdp:2), or degrees: "
                + " ".join(f"{name}=2" for name in AXIS_NAMES),
            ) from None


@dataclass(frozen=True)
class ParityRun:
    """What one training gave."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    evaluation: dict[str, float] = field(default_factory=dict)  # the last one's numbers, by name


@dataclass(frozen=True)
class ParityRow:
    """A layout beside one process: the largest relative differences over all steps, and of the weights at the end."""

    layout: str
    loss: float = 0.0
    norm: float = 0.0
    weights: float = 0.0
    evaluation: float | None = None  # None: nothing was evaluated
    parameter: str | None = None  # the first one, in the model's order, that differs by more than the bound
    refused: str | None = None  # a code, where this model can't have this layout
    bound: float = 0.0

    @property
    def holds(self) -> bool:
        if self.refused:
            return True
        worst = max(self.loss, self.norm, self.weights, self.evaluation or 0.0)
        return worst <= self.bound and self.parameter is None


@dataclass(frozen=True)
class ParityReport:
    rows: list[ParityRow]
    reference: ParityRun
    precision: str

    @property
    def holds(self) -> bool:
        """Whether every layout that was not refused agrees; and at least one was not."""
        return all(row.holds for row in self.rows) and any(row.refused is None for row in self.rows)

    def __str__(self) -> str:
        head = ("layout", "loss", "gradient norm", "weights", "evaluation", "")
        lines = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        first, last = self.reference.losses[0], self.reference.losses[-1]
        text = [f"one process: {len(self.reference.losses)} steps, loss {first:.4f} → {last:.4f}, {self.precision}"]
        text += ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join(line.rstrip() for line in text)


def parity(
    what: str | Path | Mapping[str, Any] | Config | Maker,
    data: Any = None,
    val: Any = None,
    *,
    layouts: Sequence[str] = DEFAULT_LAYOUTS,
    steps: int = 10,
    precision: str = "fp64",
    bound: float | None = None,
) -> ParityReport:
    """Train `steps` steps in one process and under each layout, and compare."""
    import paceline.train.trainer  # noqa: F401  # once, before ranks are forked
    from paceline.train import factory

    make, recipe_settings = _maker(what)
    if recipe_settings and data is None:
        data, val = factory.build_data(Config.from_dict(recipe_settings))
    val = _first_of(val)
    wanted = [ParityLayout.read(text) for text in layouts]
    fixed = {**recipe_settings, "precision": precision, "device": "cpu"}
    reference = train_on(1, [{**fixed, "strategy": "single"}], make, data, val, steps)[0]
    if isinstance(reference, str):
        raise ConfigError("bad-layout", f"One process can't train this:\n{reference}")
    bound = PRECISIONS.facts(precision).parity_bound if bound is None else bound
    rows: dict[str, ParityRow] = {}
    for ranks in sorted({layout.ranks for layout in wanted}):
        same = [layout for layout in wanted if layout.ranks == ranks]
        runs = train_on(ranks, [{**fixed, **layout.settings} for layout in same], make, data, val, steps)
        for layout, run in zip(same, runs, strict=True):
            rows[layout.text] = compare(layout.text, reference, run, bound)
    return ParityReport([rows[layout.text] for layout in wanted], reference, precision)


def _maker(what: Any) -> tuple[Maker, dict[str, Any]]:
    """What makes a Trainer, and the recipe's own settings, over which those of the comparison go."""
    if callable(what):
        return what, {}
    config = what if isinstance(what, Config) else None
    if config is None:
        config = Config.from_dict(what) if isinstance(what, Mapping) else Config.from_file(what)
    recipe = {key: value for key, value in config.to_dict().items() if key != "layout"}
    return _from_recipe, recipe


def _first_of(val: Any) -> Any:
    """Enough samples to see a difference, where it can be asked for some."""
    if not (hasattr(val, "__len__") and hasattr(val, "__getitem__")) or len(val) <= EVALUATED:
        return val
    return Subset(val, range(EVALUATED))


def _from_recipe(**settings: Any) -> Any:
    from paceline.train.trainer import Trainer

    return Trainer.from_config(Config.from_dict(settings))


def train_on(
    ranks: int, settings: Sequence[Mapping[str, Any]], make: Maker, data: Any, val: Any, steps: int
) -> list[ParityRun | str]:
    """One training after the other in one world: what each gave, or the text that it was refused with."""
    results = launch(_train_all, ranks=ranks, settings=settings, make=make, data=data, val=val, steps=steps)
    return [result if isinstance(result, str) else ParityRun(**result) for result in results]


def _train_all(
    settings: Sequence[Mapping[str, Any]], make: Maker, data: Any, val: Any, steps: int
) -> list[dict[str, Any] | str]:
    return [_train(own, make, data, val, steps) for own in settings]


def _train(settings: Mapping[str, Any], make: Maker, data: Any, val: Any, steps: int) -> dict[str, Any] | str:
    # A bound that nothing reaches: the gradient's norm is then worked out, and recorded.
    clip = settings.get("clip_norm") or 1e30
    try:
        trainer = _made(make, {**settings, "run": False, "quiet": True, "clip_norm": clip})
        history = trainer.train(data, val, max_steps=steps)
    except LayoutError as error:  # the same on every rank; others are nobody's intention
        return str(error)
    last = dict(history.evaluations[-1]) if history.evaluations else {}
    norms = [record["grad_norm"] for record in history.steps]
    return {"losses": history.losses, "norms": norms, "weights": trainer.state_dict(), "evaluation": last}


def _made(make: Maker, settings: dict[str, Any]) -> Any:
    try:
        trainer = make(**settings)
    except TypeError as error:
        if "multiple values for" not in str(error):
            raise
        raise _own_settings(str(error)) from None
    if trainer.config.clip_norm != settings["clip_norm"] or trainer.config.precision != settings["precision"]:
        raise _own_settings("the Trainer that was made has other settings than it was asked for")
    return trainer


def _own_settings(what: str) -> ConfigError:
    return ConfigError(
        "parity-settings",
        f"The comparison sets {', '.join(SETS)} and the layout: {what}.",
        fix="hand **settings on to the Trainer, and set none of these beside them",
    )


def compare(layout: str, reference: ParityRun, other: ParityRun | str, bound: float) -> ParityRow:
    """`bound` is relative, for losses and norms; for a weight, its difference's norm over the weight's own."""
    if isinstance(other, str):
        return ParityRow(layout, refused=other.partition("]")[0].lstrip("["))
    parameter = None
    difference = size = 0.0
    for name, whole in reference.weights.items():
        theirs = other.weights.get(name)
        if theirs is None or theirs.shape != whole.shape:
            return ParityRow(layout, weights=inf, parameter=name, bound=bound)
        apart, norm = float((theirs.double() - whole.double()).norm()), float(whole.double().norm())
        difference, size = difference + apart**2, size + norm**2
        # Biases that begin at zero are small still: they are measured against a weight of ordinary size.
        if parameter is None and not apart <= bound * max(norm, whole.numel() ** 0.5 * 1e-2):
            parameter = name
    names = sorted({*reference.evaluation, *other.evaluation})
    ours, theirs_too = ([run.evaluation.get(name, inf) for name in names] for run in (reference, other))
    return ParityRow(
        layout,
        loss=_largest(reference.losses, other.losses),
        norm=_largest(reference.norms, other.norms),
        weights=(difference / size) ** 0.5 if size else difference,
        evaluation=_largest(ours, theirs_too) if names else None,
        parameter=parameter,
        bound=bound,
    )


def _largest(reference: Sequence[float], other: Sequence[float]) -> float:
    if len(reference) != len(other):
        return inf
    pairs = list(zip(reference, other, strict=True))
    if any(isnan(b) for _, b in pairs):
        return inf
    return max((abs(a - b) / max(abs(a), 1e-12) for a, b in pairs), default=0.0)


def _cells(row: ParityRow) -> tuple[str, ...]:
    if row.refused:
        return row.layout, "", "", "", "", f"refused: {row.refused}"
    verdict = "agrees" if row.holds else "DIFFERS" + (f", first in {row.parameter}" if row.parameter else "")
    numbers = (row.loss, row.norm, row.weights)
    return (row.layout, *(f"{value:.0e}" for value in numbers), _evaluation(row), verdict)


def _evaluation(row: ParityRow) -> str:
    return "-" if row.evaluation is None else f"{row.evaluation:.0e}"
