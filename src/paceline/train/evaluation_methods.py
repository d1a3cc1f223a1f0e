"""The methods of the Trainer beside training: evaluation, predictions, and what callbacks and losses call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from paceline.run.history import require_free_names
from paceline.train import evaluate, oom
from paceline.train.custom_loop import CustomLoop
from paceline.train.engine import Engine
from paceline.train.evaluate import Evaluation
from paceline.train.loaders import Loaders
from paceline.train.recorder import Recorder
from paceline.train.trained_weights import TrainedWeights


class EvaluationMethods:
    """What `Trainer` has for evaluations, predictions, and values to log."""

    _engine: Engine
    _loaders: Loaders
    _weights: TrainedWeights
    _recorder: Recorder | None
    _warn_once: Callable[[str], None]

    def _get_custom_loop(self) -> CustomLoop:
        raise NotImplementedError

    def evaluate(self, data: Any) -> Evaluation:
        """Return mean loss and metrics, counting each sample once.

        If replicas train apart (`sync.every`), these are the results of their mean weights. Collective: must be called
        on every rank.

        Args:
            data: a Dataset or a DataLoader

        Returns:
            The mean loss, a float that also has all metrics by name: `trainer.evaluate(data)["accuracy"]`.

        Raises:
            DataError: `data.empty`, `data.not-data`
            TrainError: `train.metric-result`: a metric does not return one value, or one for each sample

        Example:
            >>> loss = trainer.evaluate(data)
            >>> loss["loss"] == loss
            True
        """
        engine, loader = self._engine, self._loaders.evaluation(data)
        micros = engine.ready(loader.micros(0, 1))
        metrics = (engine.task.metrics, loader.samples, self._warn_once)
        with oom.explain_out_of_memory(engine, self._loaders.plan), self._weights.shown():
            return evaluate.evaluate(engine.module, micros, engine.mesh, engine.config.seed, *metrics)

    def predict(self, data: Any) -> Any:
        """Return the outputs for all samples, in order, on the CPU. Collective: must be called on every rank.

        Args:
            data: a Dataset or a DataLoader

        Returns:
            Tensors, or lists of one item per sample where their shapes differ.

        Raises:
            DataError: `data.empty`, `data.no-order`: the data can't be read in order

        Example:
            >>> trainer.predict(data).shape
            torch.Size([32, 1])
        """
        micros = self._engine.on_device(self._loaders.evaluation(data, ordered=True).micros(0, 1))
        with oom.explain_out_of_memory(self._engine, self._loaders.plan), self._weights.shown():
            return evaluate.predict(self._engine.module, micros, self._engine.mesh, self._engine.config.seed)

    def log(self, name: str, value: Tensor | float) -> None:
        """Record a value; the next log point writes its mean over steps and ranks.

        Args:
            name: of the metric, in `metrics.jsonl` and in loggers
            value: of this step on this rank

        Raises:
            TrainError: `train.reserved-name`: the Trainer itself logs something of that name

        Example:
            >>> for batch in trainer.loader(data):
            ...     loss, stepped = trainer.training_step(batch)
            ...     trainer.log("largest input", batch[0].max())
        """
        require_free_names([name], "trainer.log")
        (self._recorder or self._get_custom_loop().recorder).log(name, value)

    def stop(self) -> None:
        """Stop training on every rank at the next log point. May be called on any rank.

        Example:
            >>> def criterion(outputs, targets):
            ...     stopped.stop()
            ...     return nn.functional.mse_loss(outputs, targets)
            >>> stopped = paceline.Trainer(
            ...     nn.Linear(4, 1), criterion=criterion, batch=8, log_every=1, run=False, quiet=True
            ... )
            >>> len(stopped.train(data, epochs=9).steps)
            1
        """
        if self._recorder is None:
            self._warn_once("trainer.stop() has no effect outside train(): end a custom loop yourself")
        else:
            self._recorder.stop_requested = True

    def enable_gradient_checkpointing(self, kind: str = "full") -> None:
        """Recompute the activations of blocks in the backward from now on, as `recompute: full` does.

        Args:
            kind: `full`, `selective`, `every-2`, …, as for `recompute` in a recipe

        Raises:
            LayoutError: `layout.no-blocks`: the model has no repeated layers to recompute

        Example:
            >>> deep = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
            >>> trainer = paceline.Trainer(deep, criterion=nn.MSELoss(), batch=8, run=False, quiet=True)
            >>> trainer.enable_gradient_checkpointing()
        """
        self._engine.recompute(kind)
