"""Load checkpoints on any layout, and resume a run from its newest intact checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import external
from paceline.checkpoint.checkpoint_store import Address, CheckpointStore
from paceline.checkpoint.local_store import LocalStore, follow_pointer, locate, no_pointer
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.reader import Checkpoint, candidates, is_checkpoint, open_checkpoint, verified
from paceline.checkpoint.state import LoadedState, TrainingState
from paceline.checkpoint.transfer import fetch
from paceline.data.epoch_reader import Place
from paceline.errors import CheckpointError, did_you_mean
from paceline.optim.optimizers import reset_state
from paceline.parallel.shards import copy_shard_
from paceline.run.folder import BEST, CONFIG, RunFolder, short
from paceline.run.folder import require_exists as require_path
from paceline.run.jsonl import truncate_after
from paceline.runtime import collectives
from paceline.runtime.consistency import run_on_all_ranks
from paceline.runtime.method_check import require_same_method
from paceline.text import flatten, plural
from paceline.train.checkpointing.model_state import require_same_names
from paceline.train.checkpointing.run_handle import SETUP, TOGETHER, RunHandle, checkpoint_to_resume, open_runs
from paceline.train.checkpointing.saver import UNRECORDED, Saver, few_steps, require_own_weights
from paceline.train.checks.run_setup import COUNTERS
from paceline.train.engine import Engine
from paceline.train.features.local_steps import report_other_replicas
from paceline.train.features.schedule import LearningRate

# Keys that do not affect training.
_NOT_TRAINING = {
    "resume", "run", "quiet", "port", "device", "workers", "code", "init_from", "report", "tags", "train.pause_at",
}  # fmt: skip


@dataclass(frozen=True)
class LoadedFrom:
    """What was loaded last: a checkpoint, with its step, or a file of weights."""

    path: str
    step: int | None = None

    def __str__(self) -> str:
        return short(self.path) + ("" if self.step is None else f" (step {self.step})")


class Restorer:
    """`_position` is the data position of the loaded checkpoint, until it is checked."""

    def __init__(self, engine: Engine, state: TrainingState, run: RunHandle, saver: Saver, rates: LearningRate) -> None:
        self._engine, self._state, self._run, self._saver, self._rates = engine, state, run, saver, rates
        self._position: dict[str, Any] | None = None
        self.loaded: LoadedFrom | None = None

    def load(self, path: Path, *, weights_only: bool = False) -> dict[str, Any]:
        """Load a checkpoint, the newest intact one of a run folder, or a weights file. Returns its metadata.
        Collective: nothing is modified unless every rank has read and verified its part."""
        with self._loading():
            path = follow_pointer(path, collectives.broadcast_object)
            kind = collectives.broadcast_object(_kind(path))
            if kind == "file":
                return self._load_file(path)
            if kind == "run":
                return self._newest(_checkpoints_in(path), weights_only)[1]
            return self._load_one(locate(path), weights_only)

    def load_best(self, *, weights_only: bool) -> dict[str, Any]:
        store = self._run.store
        if store is None:
            raise no_pointer(BEST)
        with self._loading():
            name = collectives.broadcast_object(next(iter(store.pointer(BEST)), None))
            if name is None:
                raise no_pointer(store.where(BEST))
            return self._load_one(Address(store, name), weights_only)

    @contextmanager
    def _loading(self) -> Iterator[None]:
        with self._engine.telemetry.loading(self._engine.position):
            require_own_weights(self._engine)
            self._saver.wait_for_copy()
            self._saver.finish()
            require_same_method()  # rank 0 may still be writing it
            yield

    def _load_one(self, at: Address, weights_only: bool) -> dict[str, Any]:
        try:
            return self._load(at, weights_only)
        except CheckpointError as error:
            if error.code != "checkpoint.damaged":
                raise
            fix = self._suggest_intact(at)
            raise CheckpointError("damaged", error.what, why=error.why, fix=fix) from None

    def _suggest_intact(self, at: Address) -> str:
        found = None
        if self._engine.world.is_main:
            found = next((str(each.at) for each in verified(at.store, excluding=at.name)), None)
        found = collectives.broadcast_object(found)
        return f"load {found}, the newest intact checkpoint there" if found else "no other checkpoint there is intact"

    def _load(self, at: Address, weights_only: bool) -> dict[str, Any]:
        with fetch(at, self._saver.group(), self._ranks_without(at)) as here:
            loaded = run_on_all_ranks(lambda: self._read(here, weights_only), f"Loading {at}")
        _require_same_checkpoint(at, loaded.checkpoint)
        self._apply(loaded, weights_only)
        manifest = loaded.checkpoint.manifest
        self.loaded = LoadedFrom(str(at), manifest.step)
        self._continue_from(None if weights_only else at.name, {} if weights_only else manifest.data)
        if not weights_only:
            self._log_recipe_changes(manifest.recipe)
            report_other_replicas(self._engine, manifest)
            pipelined = max(manifest.layout.get("pipeline", 1), self._engine.mesh.degrees.pipeline) > 1
            self._engine.setup.report(manifest.data.get(SETUP, {}), self._engine.log, partial=pipelined)
        return loaded.metadata

    def _continue_from(self, parent: str | None, position: Mapping[str, Any]) -> None:
        """Discard the state of saves before the load."""
        self._saver.reset()
        self._run.parent, self._position = parent, dict(position)
        self._run.data = {key: value for key, value in position.items() if key not in (SETUP, TOGETHER)}
        self._engine.setup.keep_data(position.get(SETUP, {}))
        self._engine.reset_features()

    def _log_recipe_changes(self, recipe: Mapping[str, Any]) -> None:
        """A resumed run uses the current recipe, so differences from the saved one are logged."""
        before, now = flatten(recipe), flatten(self._engine.config.to_dict())
        before, now = _none_without_section(before, now), _none_without_section(now, before)
        kept = [key for key in now if key in before and key not in _NOT_TRAINING and not key.startswith("launch.")]
        changed = [key for key in kept if before[key] != now[key]]
        if changed:
            details = ", ".join(f"{key} {before[key]} → {now[key]}" for key in changed)
            self._engine.log.info(f"recipe changed since this checkpoint: {details}")
        if before.get("ema.decay") is not None and self._engine.features.average is None:
            self._engine.log.warning("changed since this checkpoint: no ema; the averaged weights are discarded")

    def _ranks_without(self, at: Address) -> list[int]:
        """The ranks without access to the checkpoint on rank 0, which is sent to them."""
        if self._engine.config.checkpoint.unshared == "refuse":
            return []
        seen = collectives.all_gather_object(is_checkpoint(at))
        return [rank for rank, sees in enumerate(seen) if not sees] if seen[0] else []

    def _read(self, at: Address, weights_only: bool) -> LoadedState:
        checkpoint = open_checkpoint(at)
        without = () if checkpoint.manifest.optimizer else ("optimizer",)
        return self._state.read(checkpoint, weights_only=weights_only, without=without)

    def _apply(self, loaded: LoadedState, weights_only: bool) -> None:
        engine, manifest = self._engine, loaded.checkpoint.manifest
        if weights_only:
            self._start_over()
            self._state.apply(loaded)
            return
        engine.position.step, engine.position.epoch = manifest.step, manifest.epoch
        saved = loaded.values.get("scheduler")
        if saved and engine.setup.has_other_scheduler(manifest.data.get(SETUP, {})):
            counters = {key: saved[key] for key in COUNTERS if key in saved}
            loaded = replace(loaded, values={**loaded.values, "scheduler": counters})
        self._state.apply(loaded)
        if not manifest.optimizer:
            reset_state(engine.bound.optimizer)
            if loaded.values["scheduler"]:  # the reset optimizer does not have its rates yet
                self._rates.from_scheduler()

    def _start_over(self) -> None:
        """Start at step 0 with the loaded weights."""
        reset_state(self._engine.bound.optimizer)
        self._engine.position.reset()
        for restart in self._engine.hooks.restart:
            restart()

    def _load_file(self, path: Path) -> dict[str, Any]:
        """Load weights saved by another program, and start at step 0."""
        loaded = run_on_all_ranks(lambda: self._load_external(path), f"Loading {path}")
        for name, tensor in self._engine.parts.model.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor) and name in loaded.weights:  # otherwise it is tied to one that is
                copy_shard_(tensor, loaded.weights[name])
        self._start_over()
        self._continue_from(None, {})
        self.loaded = LoadedFrom(str(path))
        return loaded.metadata

    def _load_external(self, path: Path) -> external.ExternalWeights:
        loaded = external.load_external_weights(path)
        try:
            self._require_names(path, loaded)
        except CheckpointError as error:
            raise CheckpointError("other-model", error.what, fix=self._advice(loaded.weights)) from None
        return loaded

    def _advice(self, weights: Mapping[str, torch.Tensor]) -> str:
        own = self._engine.parts.model.state_dict()
        shapes = {name: tensor.shape for name, tensor in weights.items()}
        fitting = sum(1 for name, tensor in own.items() if shapes.get(name) == tensor.shape)
        first = next(iter(weights), "")
        prefixes = [first[: at + 1] for at, letter in enumerate(first) if letter == "."]
        common = [each for each in prefixes if all(name.startswith(each) for name in weights)]
        details = f"{fitting} of {len(own)} tensors in the model match"
        if common and first.removeprefix(common[-1]) in own:
            details = f"remove the prefix {common[-1]!r}, which every name in the file has"
        return (
            f"{details}; load the file with paceline.load_external_weights, rename the weights, and pass them to "
            "model.load_state_dict(…, strict=False) before creating the Trainer"
        )

    def _require_names(self, path: Path, loaded: external.ExternalWeights) -> None:
        own = self._engine.parts.model.state_dict(keep_vars=True)
        present = {id(tensor) for name, tensor in own.items() if name in loaded.weights}
        needed = {
            name: tuple(tensor.shape)
            for name, tensor in own.items()  # one name of a tied weight is enough
            if isinstance(tensor, torch.Tensor) and (name in loaded.weights or id(tensor) not in present)
        }
        # Extra state is no tensor, but it has a name.
        saved = {name: tuple(each.shape) for name, each in loaded.weights.items() if name in needed or name not in own}
        require_same_names(str(path), needed, saved, is_stage=self._engine.mesh.degrees.pipeline > 1)

    def resume(self) -> None:
        """Load the checkpoint to resume from, if any. Collective."""
        folder, engine = self._run.folder, self._engine
        if folder is None or not self._resume_in(folder):  # a new run, or a restart before the first save
            path = checkpoint_to_resume(engine.config)
            if path is not None:
                self.load(path)
                engine.log.info(f"starting a new run from {short(path)} (step {engine.position.step})")
            elif engine.config.init_from is not None:
                self._initialize(engine.config.init_from)
        if folder is not None and engine.world.is_main:  # all records if there is no checkpoint
            for path in (folder.metrics, folder.media):
                truncate_after(path, engine.position.step)

    def _initialize(self, source: str) -> None:
        """Load initial weights, and nothing else."""
        require_path(source, "No initial weights")
        self.load(Path(source).absolute(), weights_only=True)
        self._engine.log.info(f"initial weights: {self.loaded}")

    def _resume_in(self, run: RunFolder) -> bool:
        """Load the newest intact checkpoint of a run; False if it has none yet."""
        engine, prefix, store = self._engine, self._run.log_prefix, self._run.store
        assert store is not None
        if engine.world.is_main:
            store.remove_leftovers()
        collectives.barrier()
        if not collectives.broadcast_object(bool(candidates(store))):
            engine.log.info(f"{prefix}{run.short} has no checkpoint yet; starting from step 0")
            return False
        common = collectives.broadcast_object(run_on_all_ranks(lambda: self._common(run), "Resuming"))
        if common == []:
            engine.log.warning(f"{prefix}not all Trainers of {run.whole.short} have saved yet; starting from step 0")
            return False
        with engine.telemetry.loading(engine.position):
            name, _ = self._newest(store, names=common)
        note = "" if common is None else ", the last step at which all Trainers of the script have saved"
        engine.log.info(f"{prefix}resuming {run.short} from {name} (step {engine.position.step}{note})")
        return True

    def _common(self, run: RunFolder) -> list[str] | None:
        from paceline.train.checkpointing.common_save import common_names  # seldom needed

        reached = {each.folder.path: each.progress.step for each in open_runs() if each.folder not in (None, run)}
        return common_names(run, reached) if self._engine.world.is_main else None

    def _newest(
        self, store: CheckpointStore, weights_only: bool = False, names: list[str] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Load the newest intact checkpoint, or the first one of `names`. Corrupted ones are skipped with a warning."""
        found = candidates(store) if self._engine.world.is_main else []
        # Those without optimizer state come last, because a resumed run would differ; and those of a rank that survived
        # others, whose records it does not have, if a scheduled one is near.
        known = [each.manifest for each in found if each.manifest is not None]
        scheduled = max((each.step for each in known if each.optimizer and not _is_unrecorded(each)), default=-inf)
        redone = scheduled + few_steps(self._engine.config)
        found.sort(key=lambda each: (own := each.manifest) is not None and _is_unrecorded(own) and own.step <= redone)
        found.sort(key=lambda each: each.manifest is not None and not each.manifest.optimizer)
        skipped = []
        for name in names or collectives.broadcast_object([each.at.name for each in found]):
            try:
                metadata = self._load(Address(store, name), weights_only)
            except CheckpointError as error:
                if error.code != "checkpoint.damaged":
                    raise
                skipped.append(name)
                self._engine.log.warning(f"{error.what} Skipping it.")
                continue
            return name, metadata
        raise CheckpointError(
            "nothing-good", f"All {len(skipped)} checkpoints in {store.where()} are corrupted: {', '.join(skipped)}."
        )

    def check_data(
        self, data: dict[str, Any], facts: dict[str, Any], ends: int | None = None, *, other: bool = False
    ) -> None:
        """Call before training continues: with different data, samples would be repeated or skipped. `ends`: the step
        at which it ends; `other`: whether the data is known to differ from that of the last call."""
        progress, engine = self._engine.position, self._engine
        if ends is not None and 0 < ends <= progress.begins.skip:  # a resumed run: this data was read before
            return
        known, content = self._run.data, engine.setup.data.get("content")
        self._run.data, engine.setup.data = data, facts
        position, self._position = self._position, None
        if not position and progress.step and (other or (known and (known, content) != (data, facts["content"]))):
            progress.begins = Place(progress.next_epoch, progress.step)
            engine.log.info(f"data: other data than before; epoch {progress.next_epoch} begins at step {progress.step}")
        if not position or not progress.step:
            return
        if (shards := position.pop("shards", data["shards"])) != data["shards"]:
            self._split_anew(shards, data["shards"])
        else:
            self._engine.setup.report_data(position.get(SETUP, {}), self._engine.log)
        differing = [key for key, value in data.items() if key in position and position[key] != value]
        if differing:
            details = "; ".join(f"{key} was {position[key]}, now {data[key]}" for key in differing)
            raise CheckpointError(
                "other-data",
                f"The data differs from that of the checkpoint: {details}.",
                fix=f"restore the setting (see {CONFIG} in the run folder), or start at step 0 with "
                "load_checkpoint(…, weights_only=True). Of a stream that is split across ranks, the batch size of a "
                "DataLoader is that of one rank: divide it by their number",
            )

    def _split_anew(self, before: int, now: int) -> None:
        """For a stream that is split for another number of ranks, only the end of an epoch is the same place."""
        progress = self._engine.position
        if progress.next_epoch > progress.epoch:
            progress.begins = Place(progress.next_epoch, progress.step)
            return
        self._engine.log.warning(
            f"the stream was split across {plural(before, 'rank')}, now {now}: each skips the steps of the run in its "
            f"new shard, so in epoch {progress.epoch} some samples are read twice, others not at all; to avoid this, "
            "change the number of ranks between epochs, or do not split the stream"
        )


def _none_without_section(values: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A flat recipe in which keys of a section that only the other recipe has are None: `ema: null` has no decay."""
    absent = [key for key in other if key not in values and key.rpartition(".")[0] in values]
    return {**values, **dict.fromkeys(absent)}


def _is_unrecorded(manifest: Manifest) -> bool:
    return UNRECORDED.items() <= manifest.data.items()


def _kind(path: Path) -> str:
    if path.is_file():
        return "file"
    return "run" if not is_checkpoint(locate(path)) and candidates(_checkpoints_in(path)) else "checkpoint"


def _require_same_checkpoint(at: Address, checkpoint: Checkpoint) -> None:
    """A path may be a different file on every node."""
    manifest = checkpoint.manifest
    by_rank = collectives.all_gather_object([manifest.created, manifest.step, str(at)])
    for rank, (*identity, where) in enumerate(by_rank):
        if identity != by_rank[0][:2]:
            raise CheckpointError(
                "ranks-differ",
                f"Ranks load different checkpoints: {by_rank[0][2]} (step {by_rank[0][1]}) on rank 0, {where} "
                f"(step {identity[1]}) on rank {rank}.",
            )


def _checkpoints_in(path: Path) -> LocalStore:
    inner = RunFolder(path).checkpoints
    return LocalStore(inner if inner.is_dir() else path)


def require_exists(path: str | Path) -> Path:
    """`path`, if it exists. An empty name would be the working directory."""
    if str(path) and (Path(path).exists() or not Path(path).suffix):
        return Path(path)
    known = [str(each) for each in Path(path).parent.glob("*")]
    raise CheckpointError("missing", f"{str(path)!r} does not exist.", fix=did_you_mean(str(path), known))
