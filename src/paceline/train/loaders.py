"""The batch plan and this rank's data loaders."""

from __future__ import annotations

from typing import Any

import torch

from paceline.data import adopt
from paceline.data.epoch_reader import plain_attributes, preserve_generators
from paceline.data.iterable import UserBatches
from paceline.data.loader import DataShard, LaterLoader, Loader
from paceline.data.sharded_stream import ShardedStream, require_order
from paceline.errors import DataError
from paceline.plan.batch import DEFAULT_BATCH, BatchPlan, derive_batch
from paceline.runtime import collectives
from paceline.runtime.method_check import require_same_method
from paceline.train.checks import run_setup
from paceline.train.engine import Engine
from paceline.train.oom import BatchSizeFinder
from paceline.train.sliced_step import SlicedStep


class Loaders:
    """Loaders of one Trainer. `plan` is the batch plan of the training data, once known."""

    def __init__(self, engine: Engine, finder: BatchSizeFinder | None) -> None:
        self._engine, self._finder = engine, finder
        self.plan: BatchPlan | None = None
        self._stream: Any = None  # that was read last

    @property
    def batch(self) -> int:
        """Samples per optimizer step, as far as known."""
        return self.plan.size if self.plan else self._engine.config.batch or DEFAULT_BATCH

    def training(self, data: Any, *, announce: bool = True) -> tuple[Loader, BatchPlan]:
        """Return the loader of training data and its batch plan. `announce`: call `set_epoch` of a dataset, which the
        user does in a custom loop. Collective."""
        require_same_method()
        mesh = self._engine.mesh
        adopt.require_true_claims(collectives.all_gather_object(adopt.claim(data, mesh.data_rank)), mesh.data_ranks)
        batch = self._batch_plan(data)
        if self._finder is not None:
            batch = self._find_micro_batch(self._finder, data, batch)
        if batch.size < mesh.data_ranks:
            self._engine.log.warning(
                f"batch {batch.size} < {mesh.data_ranks} data ranks, so that {mesh.data_ranks - batch.size} of them "
                f"get no sample in any step; set batch to {mesh.data_ranks} or more"
            )
        self.plan = batch
        loader = self._loader(data, batch.size, batch.groups, announce=announce)
        if batch.slices is not None:
            _require_same_everywhere(loader)
            assert isinstance(self._engine.stepper, SlicedStep)
            self._engine.stepper.cut(batch.slices)
        return loader, batch

    def is_other_stream(self, data: Any, loader: Loader) -> bool:
        """Whether training read another stream, of which nothing else is known, before this one."""
        before, stream = self._stream, getattr(data, "dataset", data)
        self._stream = stream if loader.samples is None and loader.fingerprint() is None else None
        if before is None or before is stream:
            return False
        # A loop that was broken off within an epoch may have made its stream anew. At its end, any starts from scratch.
        between = self._engine.position.next_epoch > self._engine.position.epoch
        same = type(before) is type(stream) and plain_attributes(before) == plain_attributes(stream)
        return between or not same

    def placed(self, loader: Loader) -> Loader:
        """The loader in the steps and epochs of the run: it may have trained on other data before."""
        begins = self._engine.position.begins
        return LaterLoader(loader, begins) if any(begins) else loader

    def position(self, loader: Loader) -> dict[str, Any]:
        """Values that determine which samples a step reads; saved in checkpoints and compared on resume."""
        assert self.plan is not None
        config = self._engine.config
        return {
            "batch": self.plan.size,
            "samples": loader.samples,
            "steps_per_epoch": loader.lengths.per_epoch,
            "seed": config.seed,
            "shuffle": config.shuffle,
            "shards": self._engine.mesh.data_ranks if isinstance(loader, ShardedStream) else 1,
        }

    def facts(self, data: Any, loader: Loader) -> dict[str, Any]:
        """What identifies the data; saved in checkpoints, and reported on resume if it differs."""
        order = adopt.order_of(data, shuffle=self._engine.config.shuffle)
        described = order if isinstance(order, str) else run_setup.describe_object(order)
        return run_setup.data_facts(data, loader.fingerprint(), described)

    def evaluation(self, data: Any, *, ordered: bool = False) -> Loader:
        """Return a loader over `data`, once, in micro-batches no larger than in training. Collective."""
        require_same_method()
        data = adopt.recognize(data, self._engine.config.seed)
        ranks, config = self._engine.mesh.data_ranks, self._engine.config
        batch = self._batch_of(data) or derive_batch(config, self._engine.layout).size
        groups = -(-batch // (int(self.plan.micro_batch.value) * ranks)) if self.plan else 1
        slices = (self.plan or derive_batch(config, self._engine.layout)).slices if config.fixed_order else None
        if slices is not None:  # the same number on any number of ranks
            groups = -(-groups * ranks // slices) * slices // ranks
        loader = self._loader(data, batch, groups, evaluating=True)
        if ordered and ranks > 1:
            require_order(loader)
        return loader

    def _batch_of(self, data: Any) -> int | None:
        mesh = self._engine.mesh
        part = DataShard(mesh.data_rank, mesh.data_ranks)
        return adopt.global_batch(data, part, self._sharded, counts=mesh.reports_loss)

    @property
    def _sharded(self) -> bool | None:
        data = self._engine.config.data
        return None if data is None else data.sharded

    def _batch_plan(self, data: Any) -> BatchPlan:
        config, size = self._engine.config, self._batch_of(data)
        given = config.batch or config.batch_per_rank
        return derive_batch(config, self._engine.layout, None if given and adopt.has_default_batch(data) else size)

    def _find_micro_batch(self, finder: BatchSizeFinder, data: Any, batch: BatchPlan) -> BatchPlan:
        """Try sizes up to this rank's share of the batch, with the model moved to the CPU."""
        with preserve_generators(data):
            sample = next(self._loader(data, batch.size, batch.size).micros(0, 1)).batch
        engine = self._engine
        engine.parts.model.to("cpu")  # frees GPU memory for other processes; the model is not sharded
        torch.cuda.empty_cache()
        try:
            found = finder.find(sample, int(batch.micro_batch.value))
        finally:
            engine.parts.model.to(engine.world.device)
        self._finder = None
        self._engine.config = self._engine.config.model_copy(update={"micro_batch": found})
        self._engine.log.info(f'micro_batch="auto" selected {found} samples')
        return self._batch_plan(data)

    def _loader(
        self, data: Any, batch: int, groups: int, *, evaluating: bool = False, announce: bool = False
    ) -> Loader:
        engine = self._engine
        spec = adopt.LoaderSpec(
            batch=batch,
            part=DataShard(engine.mesh.data_rank, engine.mesh.data_ranks, groups, fixed=engine.config.fixed_order),
            seed=engine.config.seed,
            shuffle=engine.config.shuffle and not evaluating,
            workers=engine.config.workers,
            pin_memory=engine.world.device.type == "cuda",
            sharded=self._sharded,
            compare=engine.config.preflight,
            training=not evaluating,
            announce=announce,
            whole=engine.config.data is not None and engine.config.data.whole_batches,
            collate=engine.user.collate_fn,
        )
        return adopt.adopt(data, spec, (lambda text: None) if evaluating else engine.log.info)


def _require_same_everywhere(loader: Loader) -> None:
    if isinstance(loader, (ShardedStream, UserBatches)):
        raise DataError(
            "everywhere-and-shards",
            "With deterministic: everywhere, the samples of a step must not depend on the number of ranks.",
        )
