"""The methods of the Trainer for weights and checkpoints. `checkpointing/` has the code behind them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.train.checkpointing.restorer import Restorer, require_exists
from paceline.train.checkpointing.saver import Saver
from paceline.train.trained_weights import TrainedWeights


class CheckpointMethods:
    """What `Trainer` has for weights and checkpoints."""

    _saver: Saver
    _restorer: Restorer
    _weights: TrainedWeights

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
        return self._weights.state_dict()

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
        self._saver.write(Path(folder), include_optimizer=include_optimizer, metadata=metadata, overwrite=overwrite)

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
