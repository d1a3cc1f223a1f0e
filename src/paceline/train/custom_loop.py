"""One's own loop, at two heights, with the same bits as `train()`.

    for batch in trainer.loader(dataset):                 # this rank's micro-batches, an epoch at a time
        loss, stepped = trainer.training_step(batch)

    for batch in trainer.loader(dataset):                 # below it
        loss = trainer.forward(batch)
        trainer.backward(loss)
        trainer.step()

Batches of your own work as well: each data rank gives its own (ranks of a tensor or pipeline axis the same one), and
the weights of all ranks are added up at each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.data.batches import samples_in
from paceline.data.loader import Loader, MicroBatch
from paceline.errors import TrainError
from paceline.parallel.fsdp import discard_gradients
from paceline.runtime import collectives
from paceline.train import loop
from paceline.train.engine import Engine
from paceline.train.pipeline_step import PipelineLossModule
from paceline.train.recorder import Recorder, Sinks


class StepResult(NamedTuple):
    loss: Tensor  # of this rank's micro-batch, detached
    stepped: bool


class EpochLoader:
    """Iterating gives the rest of the current epoch, from the step that the trainer has reached."""

    def __init__(self, own: CustomLoop, loader: Loader, groups: int) -> None:
        self._own, self._loader, self._groups = own, loader, groups

    def __iter__(self) -> Iterator[Any]:
        self._own.start_over()
        engine = self._own.engine
        per_epoch, step = self._loader.steps_per_epoch, engine.position.step
        epochs = self._own.epochs_begun + 1 if per_epoch is None else step // per_epoch + 1
        self._own.epochs_begun += 1
        for micro in engine.telemetry.record_suspects(engine.ready(self._loader.micros(step, epochs))):
            self._own.expect(micro, self._loader, self._groups)
            yield micro.batch

    def __len__(self) -> int:
        """The most micro-batches that an epoch has."""
        if self._loader.steps_per_epoch is None:
            raise TypeError("this data has no length")
        return self._loader.steps_per_epoch * self._groups


class CustomLoop:
    """What a loop outside the Trainer needs remembered between its calls."""

    def __init__(self, engine: Engine, job: loop.Job, begin: Callable[[int | None], None]) -> None:
        self.engine, self.epochs_begun = engine, engine.position.epoch
        self._job, self._begin = job, begin
        self.recorder = job.recorder
        self._begun = False
        self._groups = 1
        self._foreign_samples: int | None = None  # in one group of the user's own batches, over all ranks
        self._expected: MicroBatch | None = None
        self._loader: Loader | None = None
        self._in_group = 0
        self._reducing = self._reduced = True
        self._current: tuple[MicroBatch, Tensor, Tensor | float | None, Tensor] | None = None
        self._added: MicroBatch | None = None

    def expect(self, micro: MicroBatch, loader: Loader, groups: int) -> None:
        """The next batch will be this one, of which everything is known."""
        self._expected, self._loader, self._groups = micro, loader, groups

    def start_over(self) -> None:
        """A new pass over the data: what was added of an unfinished step is forgotten, as its samples come again."""
        self.engine.stepper.reset()
        discard_gradients(self.engine.module)
        self._in_group, self._added, self._current = 0, None, None
        self.epochs_begun = max(self.epochs_begun, self.engine.position.epoch)

    def training_step(self, batch: Any) -> StepResult:
        """One micro-batch and, when its group is full, the optimizer step."""
        self._require_own_weights()
        micro = self._micro(batch)
        with self.engine.draw:
            self._check(micro)
            loss = self.engine.stepper.add(micro)
        if self.engine.stepper.noted and not self.engine.stepper.means:  # of a pipeline only the last stage notes any
            loss = loss / self.engine.stepper.noted[-1][1]
        if isinstance(self.engine.module, PipelineLossModule):
            told = self.engine.module.pipeline.from_last([float(loss)])
            loss = torch.tensor(told[0], dtype=torch.float64, device=loss.device)
        if micro.last:
            self._finish(micro)
        return StepResult(loss, micro.last)

    def forward(self, batch: Any) -> Tensor:
        """The mean loss of this rank's micro-batch, for `backward`."""
        micro = replace(self._micro(batch), exact=False, last=False)
        with self.engine.draw:
            self._check(micro)
        with self.engine.draw, self._unless_reducing():
            value, weight = self.engine.stepper.forward(micro)
            self.engine.draw.samples = None
        mean = value if weight is None else value / weight
        self._current = (micro, value, weight, mean)
        return mean

    def backward(self, loss: Tensor) -> None:
        """The backward of what `forward` returned, or of something made from it; weighed as that batch is."""
        if self._current is None:
            raise TrainError(
                "backward-without-forward",
                "trainer.backward(loss) was called without a trainer.forward(batch) before it.",
                why="the batch's weight in the step is known from its forward",
                fix="loss = trainer.forward(batch); trainer.backward(loss); trainer.step()",
            )
        micro, value, weight, mean = self._current
        self._current, self._added, self._reduced = None, micro, self._reducing
        if loss is not mean:  # the user added something to it
            value = loss if weight is None else loss * weight
        with self.engine.draw, self._unless_reducing():
            self.engine.draw.samples = micro
            self.engine.stepper.backward(micro, value, weight)
            self.engine.draw.samples = None

    def step(self) -> None:
        """The optimizer step for all backwards since the last one."""
        if self._added is None:
            raise TrainError(
                "step-without-backward",
                "trainer.step() was called, but nothing was added since the last step.",
                fix="call trainer.forward(batch) and trainer.backward(loss) first",
            )
        if not self._reduced and self.engine.world.size > 1:
            raise TrainError(
                "not-reduced",
                "trainer.step() was called, but the last backward ran under no_sync().",
                why="its gradients are this rank's alone, and the ranks' weights would part",
                fix="run the last backward of a step outside of no_sync()",
            )
        self._require_own_weights()
        micro, self._added = self._added, None
        self.engine.stepper.settle(micro)
        self._finish(replace(micro, step=self.engine.position.step))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here are not reduced over the ranks: for all but the last of a step."""
        self._reducing = False
        try:
            yield
        finally:
            self._reducing = True

    def _unless_reducing(self) -> Any:
        no_sync = self.engine.wrapped.no_sync
        return nullcontext() if self._reducing or no_sync is None else no_sync()

    def _micro(self, batch: Any) -> MicroBatch:
        expected = self._expected
        if expected is not None and batch is expected.batch:
            return expected
        return self._foreign(batch)

    def _foreign(self, batch: Any) -> MicroBatch:
        """A batch of the user's own: how much the other ranks hold is taken to be as much, and added up."""
        micro = self._on_device(batch)
        if self._foreign_samples is None:
            # Once, and agreed: backwards are seeded with it on every rank, and all have to step at the same time.
            config = self.engine.config
            self._foreign_samples = sum(collectives.all_gather_object(micro.samples * self.engine.mesh.reports_loss))
            self._groups = config.accumulate or max(1, round((config.batch or 0) / self._foreign_samples))
        self._in_group += 1
        last = self._in_group >= self._groups
        if last:
            self._in_group = 0
        return replace(micro, step_samples=self._foreign_samples * self._groups, last=last)

    def _on_device(self, batch: Any) -> MicroBatch:
        samples, mesh = samples_in(batch), self.engine.mesh
        position = self.engine.position
        micro = MicroBatch(
            batch=batch,
            samples=samples,
            start=(self._in_group * mesh.data_ranks + mesh.data_rank) * samples,
            step_samples=mesh.data_ranks * samples,
            group=self._in_group,
            last=True,
            epoch=position.epoch,
            step=position.step,
            exact=False,
        )
        return next(self.engine.ready(iter([micro])))

    def _require_own_weights(self) -> None:
        average = self.engine.average
        if average is not None and average.is_swapped:
            raise TrainError(
                "step-on-average",
                "A training step was asked for inside trainer.ema_weights().",
                why="it would train the averaged weights, and be lost when the context ends",
                fix="train outside of it",
            )

    def _check(self, micro: MicroBatch) -> None:
        loader = self._loader
        if not self._begun:
            self._begun = True
            self._job.agenda.steps_per_epoch = loader.steps_per_epoch if loader else None
            self._begin(self._job.agenda.steps_per_epoch)
            self._reached = self.engine.position.step
            self.engine.telemetry.begins(self._reached)
            self._due = self._job.agenda.next_due(self._reached)
        self.engine.check(micro, self._groups, (lambda: None) if loader is None else loader.fingerprint)

    def _finish(self, micro: MicroBatch) -> None:
        job = self._job
        if micro.step != self._reached:  # train() or load_checkpoint came between
            self._due = job.agenda.next_due(micro.step)
        job.position.epoch = micro.epoch
        loop.take_step(job, micro)
        self._reached = job.position.step
        if job.position.step == self._due:
            with self.engine.draw:
                job.agenda.attend(job.position.step, micro.epoch)
            job.telemetry.stepped(job.position.step)
            job.recorder.release()
            self._due = job.agenda.next_due(job.position.step)

    def read_again(self, step: int) -> Iterator[MicroBatch] | None:
        """A step's micro-batches once more, where they came from a loader that can."""
        if self._loader is None or not self._loader.repeatable:
            return None
        return self.engine.ready(self._loader.micros(step, None))


def end_own_loop(recorder: Recorder, sinks: Sinks) -> None:
    """Nobody says when such a loop is over: when the trainer is forgotten, or the process ends."""
    recorder.flush_alone()
    sinks.close()
