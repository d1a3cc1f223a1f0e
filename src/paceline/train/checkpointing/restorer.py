"""Load checkpoints into a training on any layout, and resume a run from its newest intact one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import directory, external
from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.filesystem import Filesystem
from paceline.checkpoint.reader import Checkpoint, open_checkpoint
from paceline.checkpoint.state import LoadedState, TrainingState
from paceline.checkpoint.transfer import fetch
from paceline.errors import CheckpointError, did_you_mean
from paceline.optim.optimizers import reset_state
from paceline.parallel.shards import copy_shard_, local_shard
from paceline.run.folder import CONFIG, RunFolder, short
from paceline.run.jsonl import truncate_after
from paceline.runtime import collectives
from paceline.runtime.rank_errors import run_on_all_ranks
from paceline.text import flatten
from paceline.train.checkpointing.model_state import other_model
from paceline.train.checkpointing.run_handle import RunHandle, checkpoint_to_resume
from paceline.train.checkpointing.saver import Saver, require_own_weights
from paceline.train.engine import Engine
from paceline.train.lr import LearningRate

# Where and how ranks run does not change the training.
_NOT_TRAINING = {"resume", "run", "quiet", "port", "device", "workers"}
_ALL_LOAD = "all ranks load together: one that kept its own state would train another model"


class Restorer:
    """Loads for one training. `_position` is the loaded checkpoint's position in the data, until it is checked."""

    def __init__(self, engine: Engine, state: TrainingState, run: RunHandle, saver: Saver, rates: LearningRate) -> None:
        self._engine, self._state, self._run, self._saver, self._rates = engine, state, run, saver, rates
        self._position: dict[str, Any] | None = None

    def load(self, path: Path, *, weights_only: bool = False) -> dict[str, Any]:
        """Load a checkpoint, a run folder's newest intact one, or a file of weights. Returns its metadata. Collective:
        nothing is changed unless every rank has read and verified its share."""
        with self._engine.telemetry.loading(self._engine.position):
            return self._load_any(path, weights_only)

    def _load_any(self, path: Path, weights_only: bool) -> dict[str, Any]:
        require_own_weights(self._engine)
        self._saver.wait_for_copy()
        self._saver.finish()
        # The full timeout: rank 0 may still be writing it.
        self._saver.barrier.require(self._engine.config.timeout, "load_checkpoint", _ALL_LOAD)
        kind = collectives.broadcast_object(_kind(path))
        if kind == "file":
            return self._load_file(path)
        if kind == "run":
            return self._newest(_checkpoints_in(path), weights_only)[1]
        try:
            return self._load(path, weights_only)
        except CheckpointError as error:
            if error.code != "checkpoint.damaged":
                raise
            good = self._newest_intact_beside(path)
            raise CheckpointError("damaged", error.what, why=error.why, fix=good) from None

    def _newest_intact_beside(self, path: Path) -> str:
        found = None
        if self._engine.world.is_main:
            found = next((str(each.folder) for each in directory.verified(path.parent, excluding=path)), None)
        found = collectives.broadcast_object(found)
        return f"the newest good one beside it is {found}" if found else "there is no good one beside it"

    def _load(self, path: Path, weights_only: bool) -> dict[str, Any]:
        with fetch(path, self._saver.group(), self._ranks_without(path)) as here:
            loaded = run_on_all_ranks(lambda: self._read(here, weights_only), f"Loading {path}")
        _require_same_checkpoint(path, loaded.checkpoint)
        self._apply(loaded, weights_only)
        manifest = loaded.checkpoint.manifest
        self._continue_from(None if weights_only else path.name, {} if weights_only else manifest.data)
        if not weights_only:
            self._log_recipe_changes(manifest.recipe)
        return loaded.metadata

    def _continue_from(self, parent: str | None, position: Mapping[str, Any]) -> None:
        """Forget what was saved before the load."""
        self._saver.reset()
        self._run.parent, self._position = parent, dict(position)
        if self._engine.watch is not None:
            self._engine.watch.reset()

    def _log_recipe_changes(self, recipe: Mapping[str, Any]) -> None:
        """A resumed run uses the current recipe, so differences from the saved one are logged."""
        before, now = flatten(recipe), flatten(self._engine.config.to_dict())
        kept = [key for key in now if key in before and key not in _NOT_TRAINING and not key.startswith("launch.")]
        changed = [key for key in kept if before[key] != now[key]]
        if changed:
            details = ", ".join(f"{key} {before[key]} → {now[key]}" for key in changed)
            self._engine.log.info(f"recipe: changed since this checkpoint: {details}")

    def _ranks_without(self, path: Path) -> list[int]:
        """Ranks that can't see a checkpoint of rank 0's, which is sent to them."""
        if self._engine.config.checkpoint.unshared == "refuse":
            return []
        seen = collectives.all_gather_object((path / manifests.NAME).exists())
        return [rank for rank, sees in enumerate(seen) if not sees] if seen[0] else []

    def _read(self, path: Path, weights_only: bool) -> LoadedState:
        checkpoint = open_checkpoint(path)
        without = () if checkpoint.manifest.optimizer else ("optimizer",)
        return self._state.read(checkpoint, weights_only=weights_only, without=without)

    def _apply(self, loaded: LoadedState, weights_only: bool) -> None:
        engine, manifest = self._engine, loaded.checkpoint.manifest
        if weights_only:
            self._state.apply(loaded)
            self._start_over()
            return
        engine.position.step, engine.position.epoch = manifest.step, manifest.epoch
        self._state.apply(loaded)
        engine.updater.keep_buffers()
        if not manifest.optimizer:
            reset_state(engine.optimizer)
            if loaded.values["scheduler"]:  # whose rates the new optimizer does not have yet
                self._rates.from_scheduler()

    def _start_over(self) -> None:
        """Train from step 0 with the loaded weights."""
        reset_state(self._engine.optimizer)
        self._engine.position.reset()

    def _load_file(self, path: Path) -> dict[str, Any]:
        """Weights saved by another program, to train from step 0."""
        loaded = run_on_all_ranks(lambda: self._load_external(path), f"Loading {path}")
        for name, tensor in self._engine.model.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor) and name in loaded.weights:  # else it is tied to one that is
                copy_shard_(tensor, loaded.weights[name])
        self._start_over()
        self._continue_from(None, {})
        average = self._engine.average
        if average is not None:
            parameters = dict(self._engine.model.named_parameters())
            average.load_state_dict({name: local_shard(parameters[name]) for name in average.state_dict()})
        return loaded.metadata

    def _load_external(self, path: Path) -> external.ExternalWeights:
        loaded = external.load_external_weights(path)
        try:
            self._require_names(path, loaded)
        except CheckpointError as error:
            raise CheckpointError("other-model", error.what, fix=self._advice(loaded.weights)) from None
        return loaded

    def _advice(self, weights: Mapping[str, torch.Tensor]) -> str:
        own = self._engine.model.state_dict()
        shapes = {name: tensor.shape for name, tensor in weights.items()}
        fitting = sum(1 for name, tensor in own.items() if shapes.get(name) == tensor.shape)
        first = next(iter(weights), "")
        prefixes = [first[: at + 1] for at, letter in enumerate(first) if letter == "."]
        common = [each for each in prefixes if all(name.startswith(each) for name in weights)]
        details = f"{fitting} of the model's {len(own)} tensors fit"
        if common and first.removeprefix(common[-1]) in own:
            details = f"every name in the file begins with {common[-1]!r}, which has to go"
        return (
            f"{details}; load the file with paceline.load_external_weights, change the "
            "names, and give them to model.load_state_dict(…, strict=False) before the Trainer is made"
        )

    def _require_names(self, path: Path, loaded: external.ExternalWeights) -> None:
        own = self._engine.model.state_dict(keep_vars=True)
        present = {id(tensor) for name, tensor in own.items() if name in loaded.weights}
        for name, tensor in own.items():
            if not isinstance(tensor, torch.Tensor) or (name not in loaded.weights and id(tensor) in present):
                continue  # one name of a tied weight is enough
            if name not in loaded.weights:
                raise other_model(str(path), f"it has no {name}, which the model has")
            shape = tuple(loaded.weights[name].shape)
            if shape != tuple(tensor.shape):
                raise other_model(str(path), f"{name} has the shape {shape}, the model's {tuple(tensor.shape)}")
        foreign = [name for name in loaded.weights if name not in own]
        if foreign and self._engine.mesh.degrees.pipeline == 1:
            raise other_model(str(path), f"it holds {foreign[0]}, which the model does not have")

    def resume(self) -> None:
        """Load what the run continues from, if anything. Collective."""
        folder, engine = self._run.folder, self._engine
        if folder is None or not self._resume_in(folder):  # a new run, or a restart before the first save
            path = checkpoint_to_resume(engine.config)
            if path is not None:
                self.load(path)
                engine.log.info(f"resume: begins from {short(path)}, after step {engine.position.step}")
        if folder is not None and engine.world.is_main:  # without a checkpoint, all records
            truncate_after(folder.metrics, engine.position.step)

    def _resume_in(self, run: RunFolder) -> bool:
        """Load the newest intact checkpoint of a run; False if it has none yet."""
        engine, reason = self._engine, self._run.reason
        if engine.world.is_main:
            directory.remove_leftovers(Filesystem(), run.checkpoints)
        collectives.barrier()
        if not collectives.broadcast_object(bool(directory.candidates(run.checkpoints))):
            engine.log.info(f"{reason}: {run.short} has no checkpoint yet: it begins at its beginning")
            return False
        with engine.telemetry.loading(engine.position):
            name, _ = self._newest(run.checkpoints)
        engine.log.info(f"{reason}: {run.short} goes on from {name}, after step {engine.position.step}")
        return True

    def _newest(self, folder: Path, weights_only: bool = False) -> tuple[str, dict[str, Any]]:
        """Load the newest intact checkpoint. Corrupted ones are skipped with a warning."""
        found = directory.candidates(folder) if self._engine.world.is_main else []
        # Those without optimizer state come last, even if newer: a resumed run would differ.
        found.sort(key=lambda each: each.manifest is not None and not each.manifest.optimizer)
        skipped = []
        for name in collectives.broadcast_object([each.folder.name for each in found]):
            try:
                metadata = self._load(folder / name, weights_only)
            except CheckpointError as error:
                if error.code != "checkpoint.damaged":
                    raise
                skipped.append(name)
                self._engine.log.warning(f"{error.what} It is passed over.")
                continue
            return name, metadata
        raise CheckpointError(
            "nothing-good",
            f"All {len(skipped)} checkpoints in {folder} are damaged: {', '.join(skipped)}.",
            why="going on from the beginning would look like a resumed run and be none",
            fix="paceline checkpoint verify shows what is wrong with each; a new run: name starts over",
        )

    def check_data(self, data: dict[str, Any]) -> None:
        """Called before training continues: a position in other data would repeat or skip samples."""
        self._run.data = data
        position, self._position = self._position, None
        if not position or not self._engine.position.step:
            return
        differing = [key for key, value in data.items() if key in position and position[key] != value]
        if differing:
            details = "; ".join(f"{key} was {position[key]}, and is {data[key]}" for key in differing)
            raise CheckpointError(
                "other-data",
                f"The checkpoint's position in the data means something else now: {details}.",
                why="its step stands for a number of samples in one order: others would be repeated or left out",
                fix=f"set it as it was (the run's {CONFIG} has it); or load_checkpoint(…, weights_only=True), which "
                "begins at the beginning of the data",
            )


def _kind(path: Path) -> str:
    if path.is_file():
        return "file"
    is_run = not (path / manifests.NAME).exists() and directory.candidates(_checkpoints_in(path))
    return "run" if is_run else "checkpoint"


def _require_same_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """A path may be a different file on every node."""
    manifest = checkpoint.manifest
    by_rank = collectives.all_gather_object([manifest.created, manifest.step, str(path)])
    for rank, (*identity, where) in enumerate(by_rank):
        if identity != by_rank[0][:2]:
            raise CheckpointError(
                "ranks-differ",
                f"Rank {rank} loads another checkpoint ({where}, step {identity[1]}) than rank 0 "
                f"({by_rank[0][2]}, step {by_rank[0][1]}).",
                why="ranks of one training hold parts or copies of one model",
                fix="give the same path on all ranks; where that lies on each node's own disk, copy one over the other",
            )


def _checkpoints_in(path: Path) -> Path:
    inner = RunFolder(path).checkpoints
    return inner if inner.is_dir() else path


def require_exists(path: str | Path) -> Path:
    """`path`, if there is something at it. An empty name would be the working directory."""
    if str(path) and (Path(path).exists() or not Path(path).suffix):
        return Path(path)
    known = [str(each) for each in Path(path).parent.glob("*")]
    raise CheckpointError("missing", f"There is nothing at {str(path)!r}.", fix=did_you_mean(str(path), known))
