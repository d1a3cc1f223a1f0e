"""What comes up while training goes on: a signal, the time for a checkpoint, a checkpoint that is written.

Ranks learn of such things at different moments and have to act on them at the same step. So every second or so, at a
step boundary, they compare notes with one small reduction; how many steps that is, they agree on as well.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

import torch

from paceline.runtime import collectives
from paceline.train.checkpointing.run_handle import RunHandle
from paceline.train.checkpointing.saver import Saver
from paceline.train.engine import Engine
from paceline.train.signals import SignalRequest, Signals, decode, encode

_SECONDS = 1.0


class RankPoll:
    """For one call of `train()`. `next` is the step after which it wants to be called again, at the latest."""

    def __init__(self, engine: Engine, saver: Saver, run: RunHandle, signals: Signals, minutes: float | None) -> None:
        self._engine, self._saver, self._run, self._signals, self._minutes = engine, saver, run, signals, minutes
        step = run.began_at
        self._several = engine.world.size > 1
        self._asked, self._asked_at = step, monotonic()
        self._saved_at = monotonic()
        self.next = step + 1
        self.request: SignalRequest = ""  # the signal that ends training, agreed

    def __call__(self, step: int, look: Callable[[], str | None]) -> str | None:
        """After `step`, on all ranks; why training should end, if it should. What is saved was looked at before: losses
        are read at log points only, and what was not finite must not end up in a checkpoint."""
        if self.request:  # all ranks have agreed on it, and saved
            return self.request
        now = monotonic()
        # Of the first rank's clock: ranks that look at their own would disagree.
        due = self._minutes is not None and self._engine.world.is_main and now - self._saved_at > self._minutes * 60
        a_step = (now - self._asked_at) / max(step - self._asked, 1)
        own = (encode(self._signals.request), due, not self._saver.is_idle, a_step)
        request, timed, writing, seconds = self._agree(*own)
        self.next = step + max(1, int(_SECONDS / max(seconds, 1e-6)))
        self._asked, self._asked_at = step, now
        if self._saver.is_pending and not writing:
            self._saver.finish()
        wished = decode(int(request))
        if not wished and not timed:
            return None
        return look() or self._act(wished, step)

    def _agree(self, request: int, due: bool, writing: bool, seconds: float) -> list[float]:
        values = [float(request), float(due), float(writing), seconds]
        if not self._several:
            return values
        numbers = torch.tensor(values, dtype=torch.float64, device=self._engine.world.device)
        collectives.all_reduce(numbers, op="max")
        return numbers.tolist()

    def _act(self, request: SignalRequest, step: int) -> str | None:
        if request in ("SIGTERM", "SIGINT"):
            self.request = request
            self._save_what_fits(step)
            return request
        self._signals.take("save")
        if request == "save" and self._run.folder is not None:
            self._engine.log.info(f"SIGUSR1: step {step} is being saved")
        self._saver.save(step)
        self._saved_at = monotonic()
        return None

    def _save_what_fits(self, step: int) -> None:
        """The whole state, unless the time that is left is too short for that: then the checkpoint before stays."""
        grace, cost, since = self._engine.config.checkpoint.grace, self._saver.last_cost, self._signals.since
        left = None if grace is None else grace - (0.0 if since is None else monotonic() - since)
        fits = left is None or cost is None or cost.seconds["all"] < left
        if collectives.broadcast_object(fits):
            self._saver.save_last(step)
            if self._run.folder is not None:
                where = self._run.folder.short
                self._engine.log.info(f"{self.request}: step {step} is saved; resume={where} goes on with it")
            return
        self._saver.finish()
        self._engine.log.warning(
            f"step {step} is not saved: that took {cost.seconds['all'] if cost else 0:.1f} s last time, and "
            f"{left or 0:.1f} s are left (checkpoint.grace)"
        )
