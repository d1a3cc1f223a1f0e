"""The training loop.

for each micro-batch:
    forward and backward                              TrainStep.add
    after the last one of a step: update parameters   OptimizerUpdate.apply
        keep the loss on its device                   Recorder.pending    (no synchronization)
        log, evaluate, save or profile if due         StepActions.run_due

It is written for few Python calls: between two log points a step makes about a dozen more than a hand-written loop.

`StepActions` is the work between optimizer steps: logging, end of epoch, evaluation, checkpoints, profiling, and the
end of training. The loop compares its step with one number, the next step at which anything is due, so other steps cost
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from paceline.data.loader import Loader, MicroBatch
from paceline.run.history import Record
from paceline.train.callbacks import Callbacks, Epoch, Step
from paceline.train.checkpointing.run_handle import TrainProgress
from paceline.train.engine import Engine
from paceline.train.rank_poll import RankPoll
from paceline.train.recorder import Recorder

if TYPE_CHECKING:
    from paceline.monitor.profiler import Profiler

END_OF_DATA = "end of data"


def _nothing(*args: Any) -> None:
    return None


@dataclass
class StepActions:
    """What to do at which step. `evaluate` and a log point may return the reason why training should end."""

    recorder: Recorder
    callbacks: Callbacks
    position: TrainProgress
    log_every: int
    began_at: int = 0
    max_steps: int | None = None
    is_pause: bool = False  # at max_steps: the run continues later
    steps_per_epoch: int | None = None
    epochs_from: int = 0  # the step at which the first epoch of this length began
    eval_every: int | None = None  # None: at the end of every epoch
    save_every: int | None = None
    profiler: Profiler | None = None
    end_of_epoch: Callable[[], None] = _nothing
    evaluate: Callable[[int, int, bool], str | None] | None = None  # None: no validation data
    is_evaluated: Callable[[int], bool] = lambda step: True  # whether the records have an evaluation after `step`
    save: Callable[[int], None] = _nothing
    save_last: Callable[[int], None] = _nothing
    poll: RankPoll | None = None
    on_nonfinite: Callable[[Record, bool], str | None] = _nothing  # with whether this rank has seen it
    on_first_log: Callable[[], None] = _nothing
    checks: Callable[[], Any] = _nothing  # of the loss, after some steps: `first_step.LaterChecks`
    reason: str = END_OF_DATA

    def count_epochs(self, loader: Loader | None) -> int | None:
        """Take over the length of epochs of this data, which is returned."""
        self.steps_per_epoch = loader.lengths.per_epoch if loader else None
        self.epochs_from = self.position.begins.skip
        return self.steps_per_epoch

    def next_due(self, step: int) -> int:
        intervals = (self.log_every, self.eval_every, self.save_every)
        due = [(step // interval + 1) * interval for interval in intervals if interval]
        if self.steps_per_epoch:
            done = (step - self.epochs_from) // self.steps_per_epoch
            due.append((done + 1) * self.steps_per_epoch + self.epochs_from)
        if self.max_steps is not None:
            due.append(self.max_steps)
        if self.profiler is not None:
            due.append(step + 1)
        if self.poll is not None:
            due.append(max(self.poll.next, step + 1))
        if (checks := self.checks()) is not None:
            due.append(max(checks.next, step + 1))
        return min(due)

    def begin(self, step: int, epoch: int) -> bool:
        """Call before the first step, with the step that the run has reached. Returns whether to continue.

        A checkpoint may have been taken after a step but before the work that was due (an exception, or a callback
        that saves): that work is done now.
        """
        self._profile(step)
        if not step or (self.max_steps is not None and step >= self.max_steps):
            return True
        reason = self._after_epoch_and_evaluation(step, epoch)
        self.reason = reason or self.reason
        return reason is None

    def _profile(self, step: int) -> None:
        if self.profiler is not None:
            self.recorder.note(self.profiler.step(step))

    def run_due(self, step: int, epoch: int) -> bool:
        """Do what is due after `step`. Returns whether to continue."""
        self._profile(step)
        if (checks := self.checks()) is not None:
            checks.after(step)
        reason = None
        if step % self.log_every == 0:
            reason = self._log()
        if reason is None:
            reason = self._after_epoch_and_evaluation(step, epoch)
        if reason is None and self.save_every and step % self.save_every == 0:
            reason = self._log()  # or these steps would be missing from the metrics after a resume
            if reason is None:
                with self.recorder.paused():
                    self.save(step)
        if reason is None and self.poll is not None and (step >= self.poll.next or step % self.log_every == 0):
            reason = self._poll_ranks(step)
        if reason is None and step == self.max_steps:
            reason = f"pause_at={step}" if self.is_pause else f"max_steps={step}"
        self.reason = reason or self.reason
        return reason is None

    def _after_epoch_and_evaluation(self, step: int, epoch: int) -> str | None:
        """Do whichever of the two is due after `step` and not done yet."""
        in_epochs = step - self.epochs_from  # zero: the end of the last epoch of other data was handled
        ends = self.steps_per_epoch is not None and in_epochs > 0 and in_epochs % self.steps_per_epoch == 0
        if ends:
            self.end_epoch(step, epoch)
        due = ends if self.eval_every is None else step % self.eval_every == 0
        return self._evaluate(step, epoch) if due and self.position.evaluated != step else None

    def _poll_ranks(self, step: int) -> str | None:
        if self.poll is None:
            return None
        with self.recorder.paused():
            return self.poll(step, self._log)

    def epoch_ended(self, step: int, epoch: int) -> bool:
        """Call at the end of an epoch of unknown length. Returns whether to continue."""
        if self.steps_per_epoch is not None:
            return True
        self.end_epoch(step, epoch)
        due = self.eval_every is None and self.position.evaluated != step
        reason = self._evaluate(step, epoch) if due else None
        self.reason = reason or self.reason
        return reason is None

    def finish(self, step: int, epoch: int) -> None:
        """Call after the last step: finish pending work."""
        stepped = step != self.began_at
        if stepped:
            self.reason = self._poll_ranks(step) or self.reason
        self._log()
        epoch_ends = stepped and self.steps_per_epoch is None and self.reason == END_OF_DATA
        if epoch_ends:
            self.end_epoch(step, epoch)
        signalled = self.poll is not None and self.poll.request  # a checkpoint is saved; there is no time for more
        if stepped and not signalled:
            self.recorder.check_replicas(step)
            if (checks := self.checks()) is not None:
                checks.after(step, last=True)
            if epoch_ends and self.eval_every is None:
                self._evaluate(step, epoch)
            self.save_last(step)
            if step != self.position.evaluated and not (self.poll is not None and self.poll.request):
                # An uninterrupted run would not evaluate here, so neither the schedule nor early stop may use it.
                self._evaluate(step, epoch, due=False)
        elif not signalled and step and step != self.position.evaluated and not self.is_evaluated(step):
            self._evaluate(step, epoch, due=False)  # the run was killed after its last save
        if self.profiler is not None:
            self.recorder.note(self.profiler.close())
        self.recorder.finish()

    def _log(self) -> str | None:
        flushed = self.recorder.flush()
        if flushed.records:
            self.on_first_log()
        if flushed.nonfinite is not None:
            return self.on_nonfinite(flushed.nonfinite, flushed.seen_here)
        return "trainer.stop()" if flushed.stop else None

    def end_epoch(self, step: int, epoch: int) -> None:
        """Handle the end of an epoch, once."""
        if self.position.epochs_ended > epoch:
            return
        self.position.epochs_ended = epoch + 1
        self.end_of_epoch()
        self.callbacks.call("on_epoch", Epoch(epoch, step))

    def _evaluate(self, step: int, epoch: int, due: bool = True) -> str | None:
        if self.evaluate is None:
            self.position.evaluated = step  # nothing to evaluate on
            return None
        reason = self._log()
        if reason is None:
            with self.recorder.paused():
                reason = self.evaluate(step, epoch, due)
        return reason


@dataclass
class Job:
    """The parts of one `train()` call."""

    # Called inside the loop, so that its errors are reported as training errors.
    micros: Callable[[], Iterator[MicroBatch]]
    engine: Engine
    recorder: Recorder
    actions: StepActions
    on_step: Sequence[Callable[[Step], Any]]


def run(job: Job) -> None:
    """Train until the data or the actions end it."""
    with job.engine.position.reading(), job.engine.hooks.captured or nullcontext():
        _run(job)


def _run(job: Job) -> None:
    stepper = job.engine.hooks.captured or job.engine.stepper
    position, telemetry = job.engine.position, job.engine.telemetry
    recorder, actions = job.recorder, job.actions
    telemetry.begins(position.step)
    micros = job.micros()
    due = actions.next_due(position.step)
    running = actions.begin(position.step, position.epoch)
    job.engine.after_user_code()
    since = perf_counter()
    for micro in micros if running else ():
        recorder.waited += perf_counter() - since
        if micro.epoch != position.epoch:
            if not actions.epoch_ended(position.step, position.epoch):
                break
            job.engine.after_user_code()
            position.epoch = micro.epoch
        stepper.add(micro)
        if micro.last:
            take_step(job, micro)
            if position.step == due:
                running = actions.run_due(position.step, micro.epoch)
                job.engine.after_user_code()
                telemetry.stepped(position.step, recorder.waited_in_all)
                if not running:
                    break
                due = actions.next_due(position.step)
        since = perf_counter()
    actions.finish(position.step, position.epoch)
    telemetry.finished(position.step, recorder.waited_in_all)


def take_step(job: Job, micro: MicroBatch) -> None:
    """Update the parameters after `micro`, the last micro-batch of its step."""
    engine = job.engine
    weights, updater = engine.stepper.weights, engine.updater
    if engine.hooks.captured is not None:
        norm = engine.hooks.captured.take()
    else:
        for complete in engine.hooks.all_backwards:
            complete()
        for hook in engine.hooks.on_losses:
            hook(weights.losses)
        factor = weights.factor() if weights.data_weighted else weights.constant_factor
        norm = updater.apply(micro.step, factor)
    engine.position.step = job.recorder.display.completed = step = micro.step + 1
    engine.telemetry.heartbeat.at(step)
    if job.recorder.own_time is not None:
        job.recorder.own_time.stepped(job.recorder.waited)
    lr, parts, samples = updater.lr, weights.losses, micro.step_samples
    job.recorder.pending.append((step, micro.epoch, lr, samples, parts, weights.means, norm, updater.skipped))
    for values in engine.hooks.values:
        for name, value in values().items():
            job.recorder.log(name, value)
    for after in engine.hooks.after_step:
        after(step, updater.stepped)
    if weights.metrics:
        job.recorder.log_metrics(weights.metrics)
    if job.on_step:
        for callback in job.on_step:
            callback(Step(step, micro.epoch, lr, samples, norm, parts, weights.means))
        engine.after_user_code()
    weights.losses = []
    if weights.data_weighted or weights.metrics:
        engine.stepper.reset()
