"""Checkpoints of a training: when they are written, what is in them, and back."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import folder as checkpoints
from paceline.checkpoint.folder import Snapshot
from paceline.config.recipe import Config
from paceline.errors import CheckpointError
from paceline.runtime import collectives
from paceline.train import cut_state
from paceline.train.callbacks import Callbacks, Saved
from paceline.train.engine import Engine
from paceline.train.outcome import Outcome
from paceline.train.rates import Rates


class Saver:
    """Writes below the run folder, once there is one."""

    def __init__(self, config: Config, engine: Engine, rates: Rates, callbacks: Callbacks) -> None:
        self._engine, self._rates, self._callbacks = engine, rates, callbacks
        self.outcome = Outcome(config, rates, self.best)
        self.run: Path | None = None
        self._best: Path | None = None
        self._saved: int | None = None

    def step(self, step: int) -> None:
        if self.run is not None:
            self._save(self.run / "checkpoints" / f"step-{step:06d}")
            self._saved = step

    def last(self, step: int) -> None:
        """At the end, unless this step was just saved."""
        if self._saved != step:
            self.step(step)

    def best(self, step: int) -> None:
        """Under a name of its own; the best one before goes once this is whole."""
        if self.run is None:
            return
        before, self._best = self._best, self._save(self.run / "checkpoints" / f"best-step-{step:06d}")
        if before is not None and self._engine.world.is_main:
            shutil.rmtree(before)

    def _save(self, folder: Path) -> Path:
        """Rank 0 knows which name is free, and tells it: these saves are a matter of all ranks."""
        free = Path(collectives.broadcast_object(str(checkpoints.free_name(folder))))
        self.write(free)
        self._callbacks.call("on_save", Saved(self._engine.position.step, str(free)))
        return free

    def write(self, folder: Path, *, include_optimizer: bool = True, metadata: Mapping[str, Any] | None = None) -> None:
        """Rank 0 writes and waits for nobody; where the weights are cut over ranks, all of them bring their pieces."""
        engine = self._engine
        if engine.cut is None and not engine.world.is_main:
            return
        if engine.cut is not None:
            model, average, optimizer = cut_state.gather(engine, include_optimizer)
        else:
            model, average = engine.model.state_dict(), None if engine.average is None else engine.average.state_dict()
            optimizer = engine.optimizer.state_dict() if include_optimizer else None
        if not engine.world.is_main:
            return
        snapshot = Snapshot(
            step=engine.position.step,
            epoch=engine.position.epoch,
            model=model,
            ema=average,
            optimizer=optimizer,
            optimizer_kind=type(engine.optimizer).__name__,
            state=_plain_state(engine, self._rates, self.outcome),
            metadata=metadata or {},
        )
        checkpoints.write(folder, snapshot)

    def read(self, folder: Path) -> dict[str, Any]:
        """Take over what the checkpoint holds; its metadata comes back."""
        snapshot = checkpoints.read(folder)
        _restore(self._engine, self._rates, self.outcome, snapshot, folder)
        if self._engine.watch is not None:
            self._engine.watch.reset()
        self._saved = None
        return dict(snapshot.metadata)


def _plain_state(engine: Engine, rates: Rates, outcome: Outcome) -> dict[str, Any]:
    """What a checkpoint holds beside tensors."""
    return {
        "scaler": engine.scaler.state_dict(),
        "plateau": None if rates.plateau is None else rates.plateau.state_dict(),
        "scheduler": None if rates.scheduler is None else _plain_values(rates.scheduler.state_dict()),
        "outcome": outcome.state_dict(),
    }


def _plain_values(state: Mapping[str, Any]) -> dict[str, Any]:
    """A scheduler's own attributes; functions (LambdaLR) are the user's and are built again."""
    return {key: _plain(value) for key, value in state.items() if not callable(value)}


def _plain(value: Any) -> Any:
    """JSON's keys are strings: a dict with others (MultiStepLR counts milestones in one) goes as pairs."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _plain(inner) for key, inner in value.items() if not callable(inner)}
        return {_PAIRS: [[key, _plain(inner)] for key, inner in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value if not callable(inner)]
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


_PAIRS = "paceline: pairs"


def _unplain(value: Any) -> Any:
    if isinstance(value, Mapping):
        if _PAIRS in value:
            return Counter({key: _unplain(inner) for key, inner in value[_PAIRS]})
        return {key: _unplain(inner) for key, inner in value.items()}
    return [_unplain(inner) for inner in value] if isinstance(value, list) else value


def _restore(engine: Engine, rates: Rates, outcome: Outcome, snapshot: Snapshot, source: str | Path) -> None:
    """Weights, optimizer and all that goes with them from a checkpoint."""
    _restore_weights(engine, snapshot, source)
    if engine.average is not None and engine.cut is None:
        engine.average.load_state_dict(snapshot.ema or dict(engine.model.named_parameters()))
    state = snapshot.state
    if state:
        if state["scaler"]:
            engine.scaler.load_state_dict(state["scaler"])
        if rates.plateau is not None and state["plateau"]:
            rates.plateau.load_state_dict(state["plateau"])
        if rates.scheduler is not None and state["scheduler"]:
            rates.scheduler.load_state_dict(_unplain(state["scheduler"]))
            if snapshot.optimizer is None:  # the rates are the optimizer's, and that one is fresh
                for group, rate in zip(engine.optimizer.param_groups, rates.scheduler.get_last_lr(), strict=True):
                    group["lr"] = rate
        outcome.load_state_dict(state["outcome"])
    engine.position.step, engine.position.epoch = snapshot.step, snapshot.epoch


def _restore_weights(engine: Engine, snapshot: Snapshot, source: str | Path) -> None:
    kind = type(engine.optimizer).__name__
    if snapshot.optimizer is not None and snapshot.optimizer_kind != kind:
        raise CheckpointError(
            "other-optimizer",
            f"The checkpoint {source} holds the state of {snapshot.optimizer_kind}, but the optimizer is {kind}.",
            fix="build the same optimizer; or save with include_optimizer=False and begin with a fresh one",
        )
    try:
        if engine.cut is not None:
            cut_state.scatter(engine, snapshot)
            return
        engine.model.load_state_dict(dict(snapshot.model))
        if snapshot.optimizer is not None:
            engine.optimizer.load_state_dict(dict(snapshot.optimizer))
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            "other-model",
            f"The checkpoint {source} does not fit this model: {error}",
            fix="build the model with the options it was saved with (config.yaml in the run folder)",
        ) from None
