"""Custom training loops, at two levels, with bit-identical results to `train()`.

    for batch in trainer.loader(dataset):                 # this rank's micro-batches of one epoch
        loss, stepped = trainer.training_step(batch)

    for batch in trainer.loader(dataset):                 # lower level
        loss = trainer.forward(batch)
        trainer.backward(loss)
        trainer.step()

Other batches work as well: each data rank passes its own (ranks along a tensor or pipeline axis pass the same one), and
the weights of all ranks are summed at each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.data.batches import layout_of, samples_in, shapes_of
from paceline.data.loader import Loader, MicroBatch
from paceline.errors import TrainError
from paceline.models import loss_module
from paceline.models.divisor import Divisor
from paceline.models.losses import Loss
from paceline.parallel.dynamic_ddp import DynamicDDP
from paceline.parallel.fsdp import discard_gradients
from paceline.run.heartbeat import counters
from paceline.runtime import collectives, process_group
from paceline.train import first_step, loop
from paceline.train.checks.foreign_steps import GradientInspector


class StepResult(NamedTuple):
    loss: Tensor  # mean loss of this rank's micro-batch, detached
    stepped: bool


class ReadEpoch(NamedTuple):
    """A pass over the data that was read to its end: the epoch, and the steps completed before and after it."""

    epoch: int
    begin: int
    end: int


class EpochLoader:
    """Iterates over the rest of the current epoch, from the step that the trainer has reached."""

    def __init__(self, custom_loop: CustomLoop, loader: Loader, groups: int) -> None:
        self._loop, self._loader, self._groups = custom_loop, loader, groups
        self._warned = False

    def __iter__(self) -> Iterator[Any]:
        self._loop.start_over()
        engine = self._loop.engine
        step = engine.position.step
        place = self._loader.lengths.locate(step)
        epoch = engine.position.next_epoch if place is None else place.epoch
        final = step
        with engine.position.reading():
            for micro in engine.telemetry.record_suspects(engine.on_device(self._loader.micros(step, epoch + 1))):
                self._loop.expect(micro, self._loader, self._groups)
                final = micro.step + 1
                counters.read += 1
                yield micro.batch
        self._loop.exhausted(ReadEpoch(epoch, step, final))
        if final > step and engine.position.step == step and not self._warned:
            self._warned = True
            engine.log.warning(
                "no batch of trainer.loader was trained on with trainer.training_step(batch), or forward, backward and "
                "step: the Trainer counts no steps, and the loader yields the same epoch again"
            )

    def __len__(self) -> int:
        """Upper bound on the micro-batches of an epoch."""
        lengths = self._loader.lengths
        place = lengths.locate(self._loop.engine.position.step)
        if place is None:
            raise TypeError("the length of this data is unknown")
        return ((lengths.before(place.epoch + 1) or 0) - (lengths.before(place.epoch) or 0)) * self._groups


class CustomLoop:
    """State of a custom loop between its calls."""

    def __init__(
        self, job: loop.Job, begin: Callable[[int | None], None], finish_save: Callable[[], None] = lambda: None
    ) -> None:
        self.engine = job.engine
        self._read: ReadEpoch | None = None  # whose steps are not all done yet
        self._job, self._begin, self._finish_save = job, begin, finish_save
        self.recorder = job.recorder
        self._started = False
        self._groups = 1
        self._user_samples: int | None = None  # in one accumulation group of the user's batches, over all ranks
        self._user_start: int | None = None  # of this rank's samples among them, if ranks hold different numbers
        self._expected: MicroBatch | None = None
        self.loader: Loader | None = None
        self._in_group = 0
        self._syncing = self._synced = True
        self._current: tuple[MicroBatch, Tensor, Tensor | float | Divisor | None, Tensor] | None = None
        self._added: MicroBatch | None = None
        self._own = False  # whether the losses of this step did not come from `forward`, and are reduced by `step`
        self._own_losses = self.engine.world.size > 1  # until a first step, if no loss comes from `forward`
        self._own_weight: float | None = None  # of the first such loss, over all ranks
        engine, parameters = self.engine, list(self.engine.parts.module.parameters())
        self._gradients = GradientInspector(parameters, engine.updater.discard_gradients, engine.log)
        # Otherwise accumulated gradients may be elsewhere than in `.grad`.
        self._keeps_gradients = engine.bound.held is None and engine.parts.runner is None

    def expect(self, micro: MicroBatch, loader: Loader, groups: int) -> None:
        """Announce the next batch, which comes from `loader`."""
        self._expected, self.loader, self._groups = micro, loader, groups

    def start_over(self) -> None:
        """Begin a new pass over the data and discard an unfinished step, whose samples will be read again."""
        position = self.engine.position
        if self._read is not None and self._read.begin < position.step < self._read.end:
            position.step = self._read.end  # the loop left out the last batches, which it would get again otherwise
            self._end_epoch(self._read.epoch)
        self._read = None
        self.engine.stepper.reset()
        discard_gradients(self.engine.parts.module)
        self._in_group, self._added, self._current = 0, None, None

    def exhausted(self, done: ReadEpoch) -> None:
        """All micro-batches of an epoch were read. Its last steps may be yet to come."""
        self._read = done
        self._end_read_epoch()

    def _end_read_epoch(self) -> None:
        if self._read is not None and self.engine.position.step >= self._read.end:
            self._end_epoch(self._read.epoch)
            self._read = None

    def _end_epoch(self, epoch: int) -> None:
        """Of known length, it has ended with its last step already."""
        with self.engine.draw:
            self._job.actions.end_epoch(self.engine.position.step, epoch)
        self.engine.after_user_code()

    def training_step(self, batch: Any) -> StepResult:
        """Run one micro-batch and, after the last one of a step, the optimizer step."""
        self._require_training_weights()
        micro = self._micro(batch)
        self._choose_call(batch)
        with self.engine.draw:
            self._check(micro)
            self._begin_micro(first=micro.group == 0, may_change=False)
            with self.engine.telemetry.noting_exit():
                loss = self.engine.stepper.add(micro)
        self._gradients.after_backward(last=micro.last)
        weights = self.engine.stepper.weights
        if weights.losses and not weights.means:  # in a pipeline only the last stage has losses
            loss = loss / weights.losses[-1][1]
        if self.engine.parts.runner is not None:
            [value] = self.engine.parts.runner.broadcast_from_last([float(loss)])
            loss = torch.tensor(value, dtype=torch.float64, device=loss.device)
        if micro.last:
            self._finish(micro)
        return StepResult(loss, micro.last)

    def forward(self, batch: Any) -> Tensor:
        """Return the mean loss of this rank's micro-batch, for `backward`."""
        micro = replace(self._micro(batch), exact=False, last=False)
        self._choose_call(batch)
        with self.engine.draw:
            self._check(micro)
        with self.engine.draw, self._sync_context():
            value, weight = self.engine.stepper.forward(micro)
            self.engine.draw.end_forward(micro)
        mean = value if weight is None or isinstance(weight, Divisor) else value / weight
        self._current = (micro, value, weight, mean)
        return mean

    def _choose_call(self, batch: Any) -> None:
        self._own_losses = False
        if self.engine.parts.module.call is None:
            self.engine.choose_call(batch)

    def compute(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Return `function(model, *inputs)`, with the precision and the gathered parameters of a training step."""
        engine = self.engine
        if engine.parts.runner is not None:
            raise loss_module.pipeline_error()
        for hook in engine.hooks.before_forward:
            hook(self._added is None)
        micro = self._expected
        first_step.watch_own_draws(engine)
        draws = nullcontext() if micro is None else engine.draw.forward_of(micro)
        with engine.draw, self._sync_context(), draws:
            return engine.parts.module(inputs, lambda model, given: function(model, *given))

    def backward(self, loss: Tensor | Loss, weight: Tensor | float | None = None) -> None:
        """Backpropagate the result of `forward`, or a value computed from it, with the weight of that batch. With a
        weight, or a `Loss`, any other loss of this rank, which is a mean over so many samples or tokens."""
        value, counted = loss_module.read_own_loss(loss, weight)
        if self._current is None and counted is None:
            raise TrainError(
                "backward-without-forward",
                "trainer.backward(loss) was called without a weight, and without trainer.forward(batch) before it.",
            )
        loss_module.require_graph(value)
        self._begin_micro(first=self._added is None, may_change=True)
        if self._current is None:
            micro = self._own_micro(counted)
        else:
            micro, result, known, mean = self._current
            if counted is None:  # the user may have computed another value from the mean
                value = (
                    result if loss is mean else value if known is None or isinstance(known, Divisor) else value * known
                )
                counted = known
        own = self._current is None and isinstance(self.engine.parts.forward, DynamicDDP)
        if own and self.engine.features.reduction.hook is not None:
            raise loss_module.hook_error(self.engine.features.reduction.hook.name)
        if self._added is not None and own is not self._own:
            raise loss_module.mixed_error()
        self._own, self._current, self._added, self._synced = own, None, micro, own or self._syncing
        with self.engine.draw, self._sync_context():
            self.engine.draw.samples = micro
            self.engine.stepper.weights.backward(micro, value, counted)
            self.engine.draw.end()
        self._gradients.after_backward(last=False)

    def _own_micro(self, weight: Tensor | float | Divisor | None) -> MicroBatch:
        """The batch that the loss of a custom loop belongs to: the last one of `trainer.loader`, or one of its own."""
        if self._expected is not None:
            micro = replace(self._expected, exact=False, last=False)
        else:
            if self._own_weight is None:  # agreed once: every rank seeds its backwards with it
                own = float(weight.weight if isinstance(weight, Divisor) else weight or 0.0)
                self._own_weight = sum(collectives.all_gather_object(own * self.engine.mesh.reports_loss)) or 1.0
            position, total = self.engine.position, max(1, round(self._own_weight))
            micro = MicroBatch(None, 1, 0, total, 0, False, position.epoch, position.step, exact=False)
        with self.engine.draw:
            self._start()
        return micro

    def step(self) -> None:
        """Update the parameters with the gradients of all backwards since the last step."""
        if self._added is None:
            raise TrainError(
                "step-without-backward", "trainer.step() was called without trainer.backward(loss) since the last step."
            )
        if not self._synced and self.engine.world.size > 1:
            raise TrainError(
                "not-reduced",
                "trainer.step() was called, but the last backward ran under no_sync().",
                why="its gradients are not reduced, so parameters would diverge between ranks",
                fix="run the last backward of a step outside no_sync()",
            )
        self._require_training_weights()
        engine, micro = self.engine, self._added
        self._begin_micro(first=False, may_change=True)
        self._added = None
        for hook in engine.hooks.all_backwards:  # before ranks exchange anything else
            hook()
        if self._own:
            loss_module.average_gradients(engine.parts.module, engine.mesh.device, engine.mesh.data_group)
        engine.stepper.weights.reduce(micro)
        same = engine.mesh.degrees.is_replicated and engine.mesh.local_replicas == 1
        scaled = engine.bound.scaler.has_scaled(engine.bound.optimizer)
        self._gradients.inspect(engine.stepper.weights.factor, scaled=scaled, replicated=same)
        self._finish(replace(micro, step=engine.position.step))
        if self._own_losses:  # the pre-flight, which they skip, does so otherwise
            self._own_losses = False
            process_group.shorten_timeout(engine.config.timeout)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not reduce gradients of backwards in this context. Use it for all but the last backward of a step."""
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True

    def _sync_context(self) -> Any:
        no_sync = self.engine.parts.no_sync
        return nullcontext() if self._syncing or no_sync is None else no_sync()

    def _begin_micro(self, *, first: bool, may_change: bool) -> None:
        """A step begins without gradients, and its other micro-batches with those of the first."""
        if first:
            self.engine.follow_optimizer()
            self._gradients.begin_step()
        elif self._keeps_gradients:
            self._gradients.continue_step(may_change=may_change)

    def _micro(self, batch: Any) -> MicroBatch:
        expected = self._expected
        return expected if expected is not None and batch is expected.batch else self._user_micro(batch)

    def _user_micro(self, batch: Any) -> MicroBatch:
        """A batch that does not come from `trainer.loader`. Other ranks are assumed to hold as many samples as in their
        first batch."""
        samples, mesh, position = samples_in(batch), self.engine.mesh, self.engine.position
        if self._user_samples is None:
            # Agreed once: every rank seeds its backwards with it, and all ranks must step at the same time.
            config = self.engine.config
            counts = collectives.all_gather_object((mesh.data_rank, samples * mesh.reports_loss))
            self._user_samples = sum(count for _, count in counts)
            if len({count for _, count in counts if count}) > 1:
                self._user_start = sum(count for rank, count in counts if rank < mesh.data_rank)
            self._groups = config.accumulate or max(1, round((config.batch or 0) / self._user_samples))
            if mesh.data_ranks * self._groups > 1 and layout_of(batch) is None:
                self.engine.log.warning(
                    f"the parts of a batch disagree on its number of samples ({shapes_of(batch)}); a mean loss is "
                    f"weighted by the first dim of the first tensor, {samples}. Return paceline.Loss(sum, weight)"
                )
        group = self._in_group
        last = group + 1 >= self._groups
        micro = MicroBatch(
            batch=batch,
            samples=samples,
            start=(group * mesh.data_ranks + mesh.data_rank) * samples
            if self._user_start is None
            else group * self._user_samples + self._user_start,
            # Alone, a rank knows the samples of a step without accumulation, as a plain loop does.
            step_samples=samples if self.engine.world.size == self._groups == 1 else self._user_samples * self._groups,
            group=group,
            last=last,
            epoch=position.epoch,
            step=position.step,
            exact=False,
        )
        micro = next(self.engine.ready(iter([micro])))
        self._in_group = 0 if last else group + 1
        return micro

    def _require_training_weights(self) -> None:
        average = self.engine.features.average
        if average is not None and average.is_swapped:
            raise TrainError("step-on-average", "A training step was called inside trainer.ema_weights().")

    def _check(self, micro: MicroBatch) -> None:
        self._start()
        loader = self.loader
        if not self.engine.parts.checked:
            first_step.check(self.engine, micro, self._groups, (lambda: None) if loader is None else loader.fingerprint)
            self._due = self._job.actions.next_due(self._reached)

    def _start(self) -> None:
        """Called before the first step."""
        if not self._started:
            loader = self.loader
            self._started = True
            self._begin(self._job.actions.count_epochs(loader))
            self._reached = self.engine.position.step
            self.engine.telemetry.begins(self._reached)
            self._due = self._job.actions.next_due(self._reached)

    def _finish(self, micro: MicroBatch) -> None:
        job, position = self._job, self.engine.position
        if micro.step != self._reached:  # train() or load_checkpoint() was called in between
            self._due = job.actions.next_due(micro.step)
        position.epoch = micro.epoch
        loop.take_step(job, micro)
        self._reached = position.step
        if position.step == self._due:
            with self.engine.draw:
                job.actions.run_due(position.step, micro.epoch)
                self._finish_save()
            self.engine.telemetry.stepped(position.step)
            job.recorder.write_out()
            self._due = job.actions.next_due(position.step)
        if self.loader is not None and job.actions.steps_per_epoch is None:
            place = self.loader.lengths.locate(position.step)
            if place is not None and place.skip == 0:  # the last step of an epoch whose length is its own
                self._end_epoch(micro.epoch)
        self._end_read_epoch()
