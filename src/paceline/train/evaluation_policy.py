"""What follows from an evaluation: keep the best checkpoint, reduce the learning rate, stop early.

All ranks act on rank 0's values: a user's metric may differ between ranks, and ranks that disagree on whether to
continue would deadlock.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from paceline.config.recipe import Config
from paceline.errors import TrainError
from paceline.optim.best import Best
from paceline.run.history import Record
from paceline.runtime import collectives
from paceline.train.checkpointing.run_handle import TrainProgress
from paceline.train.lr import LearningRate


class EvaluationVerdict(NamedTuple):
    record: Record  # rank 0's
    reason: str | None  # why training should end, if it should
    is_best: bool  # so far


class EvaluationPolicy:
    def __init__(self, config: Config, rates: LearningRate, position: TrainProgress) -> None:
        self._config, self._rates, self._position = config, rates, position
        best, stop = config.save_best, config.early_stop
        self.best = None if best is None else Best(best.metric, best.mode)
        self.stop = None if stop is None else Best(stop.metric, stop.mode, stop.min_delta)
        self._waited = 0

    def require_evaluations(self, has_val_data: bool) -> None:
        wanted = [name for name in ("save_best", "early_stop") if getattr(self._config, name) is not None]
        wanted += ["schedule: plateau"] if self._config.schedule.name == "plateau" else []
        if wanted and not has_val_data:
            raise TrainError(
                "no-evaluation",
                f"{wanted[0]} requires validation data.",
                fix="pass it: trainer.train(data, val_data, …)",
            )

    def apply(self, record: Record, due: bool = True) -> EvaluationVerdict:
        """An evaluation that was not due (at the end of a train() call) may be the best so far, but affects neither the
        learning rate nor early stop."""
        record = collectives.broadcast_object(record)
        self._require_metrics(record)
        reason = None
        if due:
            self._rates.evaluated(record)
            reason = self._early_stop(record)
            self._position.evaluated = record["step"]
        settings = self._config.save_best
        best = self.best is not None and settings is not None and self.best.improved(record[settings.metric])
        return EvaluationVerdict(record, reason, best)

    def _early_stop(self, record: Record) -> str | None:
        settings = self._config.early_stop
        if settings is None or self.stop is None:
            return None
        self._waited = 0 if self.stop.improved(record[settings.metric]) else self._waited + 1
        if self._waited < settings.patience:
            return None
        return f"{settings.metric} has not improved in {self._waited} evaluations (early_stop)"

    def _require_metrics(self, record: Record) -> None:
        config = self._config
        wanted = [section.metric for section in (config.save_best, config.early_stop) if section is not None]
        wanted += [config.schedule.metric] if config.schedule.name == "plateau" else []
        missing = [name for name in wanted if name not in record]
        if missing:
            known = [name for name in record if name not in ("step", "epoch")]
            raise TrainError(
                "no-such-metric",
                f"Unknown metric {missing[0]!r}; the evaluation has {', '.join(known)}.",
                fix='name one of these, or add it: Trainer(metrics={…}), or return "metrics" with the loss',
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": None if self.best is None else self.best.state_dict(),
            "stop": None if self.stop is None else self.stop.state_dict(),
            "waited": self._waited,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for tracker, name in ((self.best, "best"), (self.stop, "stop")):
            if tracker is not None and state[name] is not None:
                tracker.load_state_dict(state[name])
        self._waited = state["waited"]
