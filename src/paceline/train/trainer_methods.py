"""The methods of the Trainer beside training: weights and checkpoints (`checkpointing/` has the code behind them),
evaluation, predictions, and what callbacks and losses call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.checkpoint.local_store import locate
from paceline.data import adopt
from paceline.data.loader import MicroBatch
from paceline.run.history import require_free_names
from paceline.train import evaluate, oom
from paceline.train.checkpointing.restorer import require_exists
from paceline.train.checkpointing.run_handle import RunHandle
from paceline.train.checkpointing.saver import Saver
from paceline.train.custom_loop_methods import CustomLoopMethods
from paceline.train.evaluate import Evaluation
from paceline.train.recorder import Recorder
from paceline.train.weights_view import WeightsView

Reading = Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]]


class TrainerMethods(CustomLoopMethods):
    """What `Trainer` has for weights, checkpoints, evaluations, predictions, and values to log."""

    _run: RunHandle
    _saver: Saver
    _weights: WeightsView
    _recorder: Recorder | None
    _warn_once: Callable[[str], None]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the full weights.

        If parameters are sharded, call it on every rank; only rank 0 receives the result. If replicas train apart
        (`sync.every`), call it on every rank as well: these are their mean weights.

        Returns:
            The weights by their names in the model; an empty dict on other ranks, if parameters are sharded.

        Example:
            >>> sorted(trainer.state_dict())
            ['bias', 'weight']
        """
        self._wait_to_swap()
        return self._weights.state_dict()

    def _wait_to_swap(self) -> None:
        """A save may still be copying the weights."""
        if self._weights.swapped is not None:
            self._saver.wait_for_copy()

    def ema_weights(self) -> AbstractContextManager[None]:
        """Context manager in which the model has the averaged (EMA) weights.

        If replicas train apart (`sync.every`), call it on every rank: it has the mean of their EMAs.

        Returns:
            The context manager.

        Raises:
            TrainError: `train.no-ema`: the Trainer was created without `ema`

        Example:
            >>> averaged = paceline.Trainer(
            ...     nn.Linear(4, 1), criterion=nn.MSELoss(), batch=8, ema=0.9, run=False, quiet=True
            ... )
            >>> history = averaged.train(data, epochs=1)
            >>> with averaged.ema_weights():
            ...     loss = averaged.evaluate(data)
        """
        self._saver.wait_for_copy()
        return self._weights.averaged()

    def save_checkpoint(
        self,
        folder: str | Path,
        include_optimizer: bool = True,
        metadata: Mapping[str, Any] | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        """Write a checkpoint. It is complete when this returns.

        Collective if parameters are sharded, replicas train apart (`sync.every`) or gradients are compressed
        (`sync.compress`, a `comm_state` that is saved): must be called on every rank. Otherwise rank 0 writes, and
        calling it on rank 0 only is sufficient.

        Args:
            folder: the folder of the checkpoint, which is created
            include_optimizer: whether training can continue from it; without, it has the weights only
            metadata: plain values to keep with it: numbers, strings, lists, dicts
            overwrite: whether a checkpoint in this folder is replaced

        Raises:
            CheckpointError: `checkpoint.exists`, `checkpoint.no-space`, `checkpoint.not-saved`;
                `checkpoint.inside-ema` inside of `ema_weights()`

        Example:
            >>> trainer.save_checkpoint("saved", metadata={"note": "before fine-tuning"})
        """
        at = locate(Path(folder).absolute())
        self._saver.write(at, include_optimizer=include_optimizer, metadata=metadata, overwrite=overwrite)

    def load_checkpoint(self, path: str | Path, *, weights_only: bool = False) -> dict[str, Any]:
        """Restore weights, optimizer, position and random state. The number of ranks and the layout may differ.

        Collective: must be called on every rank.

        Args:
            path: a checkpoint folder, a run folder (its newest intact checkpoint), `checkpoints/best` in it, or a file
                of weights (.pt, .pth, .bin, .safetensors)
            weights_only: whether to load nothing but the weights

        Returns:
            The metadata of the checkpoint.

        Raises:
            CheckpointError: `checkpoint.missing`, `checkpoint.damaged`, `checkpoint.other-model`,
                `checkpoint.other-optimizer`

        Example:
            >>> trainer.save_checkpoint("saved", metadata={"note": "before fine-tuning"})
            >>> trainer.load_checkpoint("saved")
            {'note': 'before fine-tuning'}
        """
        return self._restorer.load(require_exists(path), weights_only=weights_only)

    def load_best(self, *, weights_only: bool = False) -> dict[str, Any]:
        """Restore the best checkpoint of this run, according to `save_best`. Collective.

        Args:
            weights_only: whether to load nothing but the weights

        Returns:
            The metadata of the checkpoint.

        Raises:
            CheckpointError: `checkpoint.no-pointer`: the run has no best checkpoint

        Example:
            >>> kept = paceline.Trainer(
            ...     nn.Linear(4, 1), criterion=nn.MSELoss(), batch=8, save_best="loss", run="kept", quiet=True
            ... )
            >>> history = kept.train(data, data, epochs=2)
            >>> metadata = kept.load_best(weights_only=True)
        """
        return self._restorer.load_best(weights_only=weights_only)

    def evaluate(self, data: Any) -> Evaluation:
        """Return mean loss and metrics, counting each sample once.

        Of a dict of datasets, the names begin with that of the dataset, as in `"a/accuracy"`, and `loss` is the mean of
        their losses.

        If replicas train apart (`sync.every`), these are the results of their mean weights. Collective: must be called
        on every rank.

        Args:
            data: a Dataset or a DataLoader, or a dict of them

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
        return self._evaluation(adopt.sets_in(data, self._engine.config.seed), iter)

    def _weights_to_evaluate(self) -> AbstractContextManager[None]:
        self._wait_to_swap()
        return self._weights.evaluated()

    def _measure(self, sets: Mapping[str, Any], reading: Reading = iter) -> dict[str, float]:
        """What an evaluation records: with the averaged weights as well, if there are any."""
        values = self._evaluation(sets, reading).values
        if self._weights.has_average:
            with self.ema_weights():
                averaged = self._evaluation(sets, reading).values
            values = values | {f"ema_{name}": value for name, value in averaged.items()}
        return values

    def _evaluation(self, sets: Mapping[str, Any], reading: Reading) -> Evaluation:
        engine, found = self._engine, dict[str, Evaluation]()
        for prefix, data in sets.items():
            loader = self._loaders.evaluation(data)
            micros = reading(engine.ready(loader.micros(0, 1)))
            metrics = (engine.user.metrics, loader.samples, self._warn_once)
            with oom.explain_out_of_memory(engine, self._loaders.plan), self._weights_to_evaluate():
                found[prefix] = evaluate.evaluate(
                    engine.parts.module, micros, engine.mesh, engine.config.seed, *metrics
                )
        return evaluate.joined(found)

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
        with oom.explain_out_of_memory(self._engine, self._loaders.plan), self._weights_to_evaluate():
            return evaluate.predict(self._engine.parts.module, micros, self._engine.mesh, self._engine.config.seed)

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

    def log_image(self, name: str, image: Any) -> None:
        """Record an image of rank 0, or a grid of a batch, for the page of the run and for loggers.

        Args:
            name: of the image
            image: a tensor, an array or a PIL image of shape C×H×W, H×W×C or H×W, or a batch of the former two; floats
                from 0 to 1, or integers to 255

        Raises:
            TrainError: `train.not-loggable`: the shape, the type or the name does not fit

        Example:
            >>> for batch in trainer.loader(data):
            ...     loss, stepped = trainer.training_step(batch)
            ...     trainer.log_image("inputs", batch[0][:, None, None])
        """
        self._log_media("image", name, image)

    def log_text(self, name: str, text: str) -> None:
        """Record a text of rank 0, like `log_image`.

        Args:
            name: of the text
            text: whose first 20,000 characters are kept

        Example:
            >>> trainer.log_text("sample", "To be, or not to be")
        """
        self._log_media("text", name, text)

    def log_histogram(self, name: str, values: Any) -> None:
        """Record the distribution of values of rank 0, like `log_image`. A DTensor is gathered: call it on every rank.

        Args:
            name: of the histogram
            values: a tensor, an array or a list of numbers

        Example:
            >>> trainer.log_histogram("weights", trainer.model.weight)
        """
        self._log_media("histogram", name, values.full_tensor() if isinstance(values, DTensor) else values)

    def _log_media(self, kind: str, name: str, value: Any) -> None:
        engine, sinks = self._engine, self._run.sinks
        if sinks.media is None and engine.world.is_main and engine.config.run is not False:
            where = "in train() or a custom loop that has a run folder: set run=NAME"
            self._warn_once(f"trainer.log_{kind} has no effect here; call it {where}")
        sinks.write_media(kind, name, value, engine.position.step)

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
