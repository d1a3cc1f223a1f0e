"""What is due between steps: log points, ends of epochs, evaluations, checkpoints, profiles, and the end.

The loop compares its step with one number, the next step at which anything is due, so a step at which nothing is costs
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.monitor.profiler import Profiler
from paceline.train.callbacks import Callbacks, Epoch
from paceline.train.checkpointing.run_handle import TrainProgress
from paceline.train.history import Record
from paceline.train.recorder import Recorder

ENDED = "the data ended"


def _nothing(*args: Any) -> None:
    return None


class Poll(Protocol):
    """Asks the ranks what has come up, and does it, once `look` has found nothing wrong with the steps so far.

    `next` is the step after which it wants to be called, at the latest; `request` the signal that ends training.
    """

    next: int
    request: Any

    def __call__(self, step: int, look: Callable[[], str | None]) -> str | None: ...


@dataclass
class Agenda:
    """Steps and what to do at them. `evaluate` may say why training should end, as may a log point."""

    recorder: Recorder
    callbacks: Callbacks
    position: TrainProgress
    log_every: int
    began_at: int = 0
    max_steps: int | None = None
    steps_per_epoch: int | None = None
    eval_every: int | None = None  # None: whenever an epoch ends
    save_every: int | None = None
    profiler: Profiler | None = None
    end_of_epoch: Callable[[], None] = _nothing
    evaluate: Callable[[int, int, bool], str | None] | None = None  # None: there is nothing to evaluate on
    save: Callable[[int], None] = _nothing
    save_last: Callable[[int], None] = _nothing
    poll: Poll | None = None
    on_nonfinite: Callable[[Record], str | None] = _nothing
    on_first_log: Callable[[], None] = _nothing
    reason: str = ENDED

    def next_due(self, step: int) -> int:
        intervals = (self.log_every, self.eval_every, self.save_every, self.steps_per_epoch)
        due = [(step // interval + 1) * interval for interval in intervals if interval]
        if self.max_steps is not None:
            due.append(self.max_steps)
        if self.profiler is not None:
            due.append(step + 1)
        if self.poll is not None:
            due.append(max(self.poll.next, step + 1))
        return min(due)

    def begin(self, step: int, epoch: int) -> bool:
        """Before the first step of this call, the run having done `step`; whether it goes on.

        A checkpoint may be of the moment between a step and what was due after it (an exception came, or a callback
        saved): that is made up for.
        """
        self._profile(step)
        if not step or (self.max_steps is not None and step >= self.max_steps):
            return True
        reason = self._after_epoch_and_evaluation(step, epoch)
        self.reason = reason or self.reason
        return reason is None

    def _profile(self, step: int) -> None:
        if self.profiler is not None:
            text = self.profiler.step(step)
            if text:
                self.recorder.note(text)

    def attend(self, step: int, epoch: int) -> bool:
        """Do what is due after `step`; whether training goes on."""
        self._profile(step)
        reason = None
        if step % self.log_every == 0:
            reason = self._log()
        if reason is None:
            reason = self._after_epoch_and_evaluation(step, epoch)
        if reason is None and self.save_every and step % self.save_every == 0:
            reason = self._log()  # what was trained before it must not be missing from the metrics after a resume
            if reason is None:
                with self.recorder.paused():
                    self.save(step)
        if reason is None and self.poll is not None and (step >= self.poll.next or step % self.log_every == 0):
            reason = self._ask(step)
        if reason is None and step == self.max_steps:
            reason = f"max_steps={step}"
        self.reason = reason or self.reason
        return reason is None

    def _after_epoch_and_evaluation(self, step: int, epoch: int) -> str | None:
        """Whichever of them is due after `step`, and was not done yet."""
        ends = self.steps_per_epoch is not None and step % self.steps_per_epoch == 0
        if ends:
            self._end_epoch(step, epoch)
        due = ends if self.eval_every is None else step % self.eval_every == 0
        return self._evaluate(step, epoch) if due and self.position.evaluated != step else None

    def _ask(self, step: int) -> str | None:
        if self.poll is None:
            return None
        with self.recorder.paused():
            return self.poll(step, self._log)

    def epoch_ended(self, step: int, epoch: int) -> bool:
        """For data whose length nobody knew; whether training goes on."""
        if self.steps_per_epoch is not None or self.position.epochs_ended > epoch:
            return True
        self._end_epoch(step, epoch)
        due = self.eval_every is None and self.position.evaluated != step
        reason = self._evaluate(step, epoch) if due else None
        self.reason = reason or self.reason
        return reason is None

    def finish(self, step: int, epoch: int) -> None:
        """After the last step: what is still pending."""
        if step != self.began_at:
            self.reason = self._ask(step) or self.reason
        self._log()
        if self.steps_per_epoch is None and step != self.began_at and self.reason == ENDED:
            self._end_epoch(step, epoch)
        asked_to_end = self.poll is not None and self.poll.request  # there is no time for more than what was saved
        if step != self.began_at and not asked_to_end:
            if self.steps_per_epoch is None and self.eval_every is None and self.reason == ENDED:
                self._evaluate(step, epoch)
            self.save_last(step)
            if step != self.position.evaluated:
                # One that an unbroken run would not have made here: no schedule and no early stop may follow from it.
                self._evaluate(step, epoch, due=False)
        if self.profiler is not None:
            text = self.profiler.close()
            if text:
                self.recorder.note(text)

    def _log(self) -> str | None:
        flushed = self.recorder.flush()
        if flushed.records:
            self.on_first_log()
        if flushed.nonfinite is not None:
            return self.on_nonfinite(flushed.nonfinite)
        return "trainer.stop()" if flushed.stop else None

    def _end_epoch(self, step: int, epoch: int) -> None:
        if self.position.epochs_ended > epoch:
            return
        self.position.epochs_ended = epoch + 1
        self.end_of_epoch()
        self.callbacks.call("on_epoch", Epoch(epoch, step))

    def _evaluate(self, step: int, epoch: int, due: bool = True) -> str | None:
        if self.evaluate is None:
            self.position.evaluated = step  # as far as it could be
            return None
        reason = self._log()
        if reason is None:
            with self.recorder.paused():
                reason = self.evaluate(step, epoch, due)
        return reason
