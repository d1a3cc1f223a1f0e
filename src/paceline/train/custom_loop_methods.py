"""The methods of the Trainer for a custom loop: `training_step`, or `forward`, `backward` and `step`.

    for batch in trainer.loader(data):
        result = trainer.training_step(batch)

`custom_loop.py` has the state behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from paceline.data import adopt
from paceline.models.losses import Loss
from paceline.train import oom
from paceline.train.checkpointing.restorer import Restorer
from paceline.train.custom_loop import CustomLoop, EpochLoader, StepResult
from paceline.train.engine import Engine
from paceline.train.loaders import Loaders


class CustomLoopMethods:
    """What `Trainer` has for a custom loop."""

    _engine: Engine
    _loaders: Loaders
    _restorer: Restorer

    def _get_custom_loop(self) -> CustomLoop:
        raise NotImplementedError

    def loader(self, data: Any) -> EpochLoader:
        """Return an iterable over this rank's micro-batches in the rest of the current epoch, for a custom loop.

        Collective: must be called on every rank.

        Args:
            data: a Dataset or a DataLoader, as for `train()`

        Returns:
            An iterable. Iterating it again continues with the step that the Trainer has reached.

        Raises:
            DataError: `data.not-data`, `data.empty`, `data.smaller-than-batch`: nothing to train on

        Example:
            >>> for batch in trainer.loader(data):
            ...     result = trainer.training_step(batch)
            >>> trainer.epoch
            2
        """
        data = adopt.look_at(data, self._engine.config.seed)
        loader, batch = self._loaders.training(data, announce=False)
        other = self._loaders.is_other_stream(data, loader)
        self._restorer.check_data(self._loaders.position(loader), self._loaders.facts(data, loader), other=other)
        return EpochLoader(self._get_custom_loop(), self._loaders.placed(loader), batch.groups)

    def training_step(self, batch: Any) -> StepResult:
        """Run a micro-batch and, after the last one of a step, step the optimizer.

        Args:
            batch: a micro-batch of this rank, from `loader()`; or another one of the same size

        Returns:
            (loss, stepped): the loss of this rank's micro-batch, detached, and whether the optimizer stepped.

        Raises:
            TrainError: `train.nonfinite`, `train.no-loss`, `train.no-gradient`; `train.out-of-memory`

        Example:
            >>> loss, stepped = trainer.training_step(next(iter(trainer.loader(data))))
            >>> stepped, trainer.step_count
            (True, 5)
        """
        with oom.explain_out_of_memory(self._engine, self._loaders.plan):
            return self._get_custom_loop().training_step(batch)

    def forward(self, batch: Any) -> Tensor:
        """Run this rank's micro-batch and return its mean loss, for `backward`.

        Args:
            batch: a micro-batch of this rank

        Returns:
            The mean loss, with its graph.

        Raises:
            TrainError: `train.no-loss`, `train.everywhere-and-forward`

        Example:
            >>> for batch in trainer.loader(data):
            ...     loss = trainer.forward(batch)
            ...     trainer.backward(loss * 0.5)
            ...     trainer.step()
        """
        with oom.explain_out_of_memory(self._engine, self._loaders.plan):
            return self._get_custom_loop().forward(batch)

    def compute(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Return `function(model, *inputs)`, run as in a training step, for a loss of one's own.

        Precision, dropout and sharded parameters are those of the step. Collective if parameters are sharded.

        Args:
            function: called with the model and the inputs
            inputs: passed on

        Returns:
            What the function returns.

        Raises:
            TrainError: `train.graph-and-loop`, `train.everywhere-and-loop`: these settings need `training_step`

        Example:
            >>> inputs, targets = next(iter(trainer.loader(data)))
            >>> outputs = trainer.compute(lambda model, inputs: model(inputs), inputs)
            >>> trainer.backward((outputs - targets).abs().mean(), weight=len(inputs))
            >>> trainer.step()
        """
        with oom.explain_out_of_memory(self._engine, self._loaders.plan):
            return self._get_custom_loop().compute(function, *inputs)

    def backward(self, loss: Tensor | Loss, weight: Tensor | float | None = None) -> None:
        """Accumulate the gradients of a loss.

        Args:
            loss: the loss of `forward`, or a value computed from it; with `weight`, any other loss
            weight: of how many samples or tokens of this rank the loss is a mean

        Raises:
            TrainError: `train.backward-without-forward`, `train.no-gradient`, `train.nonfinite`

        Example:
            >>> loss = trainer.forward(next(iter(trainer.loader(data))))
            >>> trainer.backward(loss)
            >>> trainer.step()
        """
        with oom.explain_out_of_memory(self._engine, self._loaders.plan):
            self._get_custom_loop().backward(loss, weight)

    def step(self) -> None:
        """Update the parameters with the gradients of all backwards since the last step.

        Clips gradients, steps the optimizer, the schedule and the EMA, and logs, as `train()` does.

        Raises:
            TrainError: `train.step-without-backward`, `train.nonfinite`

        Example:
            >>> trainer.backward(trainer.forward(next(iter(trainer.loader(data)))))
            >>> trainer.step()
            >>> trainer.step_count
            5
        """
        self._get_custom_loop().step()

    def no_sync(self) -> AbstractContextManager[None]:
        """Context manager in which gradients are not reduced, for all but the last backward of a step.

        Returns:
            The context manager.

        Example:
            >>> halves = paceline.Trainer(
            ...     nn.Linear(4, 1), criterion=nn.MSELoss(), batch=8, accumulate=2, run=False, quiet=True
            ... )
            >>> batches = iter(halves.loader(data))
            >>> with halves.no_sync():
            ...     halves.backward(halves.forward(next(batches)))
            >>> halves.backward(halves.forward(next(batches)))
            >>> halves.step()
        """
        return self._get_custom_loop().no_sync()
