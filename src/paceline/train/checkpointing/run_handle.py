"""The current run: its folder, locked against other writers, and its progress.

After a restart by the launcher, ranks resume in the folder they had before, from its newest intact checkpoint,
regardless of `resume`. The ledger of the launch has the name of that folder.

A Trainer that asks for no other run than the one that another Trainer of its script has opened is a part of that run,
with a folder in that of the run.
"""

from __future__ import annotations

import gc
import os
import shlex
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from torch import nn

from paceline.checkpoint.checkpoint_store import CheckpointStore
from paceline.checkpoint.local_store import LocalStore, follow_pointer, locate
from paceline.checkpoint.reader import is_checkpoint
from paceline.config.recipe import Config
from paceline.data.epoch_reader import Place
from paceline.errors import CheckpointError
from paceline.log import Log
from paceline.plan.layout import Derived, table
from paceline.run import jsonl, ledger, regular_files, requested_report
from paceline.run.folder import RunFolder, not_usable, short
from paceline.run.lock import RunLock
from paceline.runtime import collectives, environment
from paceline.runtime.consistency import ranks_without_access, run_on_all_ranks
from paceline.runtime.process_group import World
from paceline.text import numbered
from paceline.train import recipe_objects
from paceline.train.checks import run_setup
from paceline.train.recorder import Sinks

SETUP = "setup"  # in the data of a manifest: what guard/run_setup.py compares
TOGETHER = "together"  # also there: Trainers that train at the same time
_Opened = Callable[[RunFolder, str], None]


_START = Place(0, 0)
_BEGUN = count()  # runs of this process, in the order in which they began to train
_CREATED = Counter[int]()  # how many were created, by process: a forked rank begins anew


@dataclass
class TrainProgress:
    """The progress of training."""

    step: int = 0  # optimizer steps done
    epoch: int = 0
    evaluated: int = 0  # step of the last scheduled evaluation
    epochs_ended: int = 0  # epochs whose end was handled
    begins: Place = _START  # the epoch and step of the run at which it began to read the present data
    _readers: int = 0  # loops that are iterating over an epoch

    @property
    def next_epoch(self) -> int:
        """The epoch that the next step belongs to: after the last step of an epoch, the one after it."""
        return max(self.epoch, self.epochs_ended)

    @property
    def current_epoch(self) -> int:
        return self.epoch if self._readers else self.next_epoch

    @contextmanager
    def reading(self) -> Iterator[None]:
        """The current epoch lasts until the loop over it ends."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1

    def state_dict(self) -> dict[str, int]:
        """Without step and epoch, which are in the manifest."""
        begins = {"begins_epoch": self.begins.epoch, "begins_step": self.begins.skip} if any(self.begins) else {}
        return {"evaluated": self.evaluated, "epochs_ended": self.epochs_ended, **begins}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.evaluated, self.epochs_ended = state["evaluated"], state["epochs_ended"]
        self.begins = Place(state.get("begins_epoch", 0), state.get("begins_step", 0))

    def reset(self) -> None:
        self.step = self.epoch = self.evaluated = self.epochs_ended = 0
        self.begins = _START


class RunHandle:
    """The run, as seen by saver, restorer and poll. `opened` is called with the folder and the requested name."""

    def __init__(self, world: World, log: Log, name: str, progress: TrainProgress, opened: _Opened) -> None:
        self._world, self._log, self._name, self._opened = world, log, name, opened
        self._lock: RunLock | None = None
        self.progress = progress
        self._process = os.getpid()
        _CREATED[self._process] += 1
        self._number = _CREATED[self._process]
        self._begun: int | None = None
        self.folder: RunFolder | None = None
        self.log_prefix = ""  # "start 2: " after a restart
        self.without_access: list[int] = []  # ranks without access to the folder
        self.parent: str | None = None  # the last checkpoint saved or loaded
        self.data: dict[str, Any] = {}  # settings that determine the samples of a step
        self.began_at = 0  # the first step of this call of train()
        self._contents: tuple[Config, Mapping[str, Derived]] | None = None  # of the folder, besides records and saves
        self.sinks = Sinks()

    @property
    def store(self) -> CheckpointStore | None:
        """Where its checkpoints are kept, if it has a folder."""
        return None if self.folder is None else LocalStore(self.folder.checkpoints)

    def create(self, config: Config, rows: Mapping[str, Derived] | None = None) -> str | None:
        """Create the folder if there is none, lock it, and write the recipe and `rows`. Returns its path."""
        if rows is not None:
            self._log.info(table(rows))
        if any(run is not self for run in open_runs()):
            gc.collect()  # Trainers of custom loops that nobody holds any more
        if self._begun is None and rows is not None:
            self._begun = next(_BEGUN)
        if self.folder is None:
            if config.run is not False:
                folder = self._new_folder(requested_name(config))
                self.take(folder, config)
                if environment.run_folder() is None:  # else the launcher says it
                    self._log.info(f"run folder: {short(folder.path)}")
            if rows is not None and self._world.size == 1 and not environment.was_launched():
                if ignored := environment.incomplete_rank():
                    self._log.warning(
                        f"{ignored} is ignored: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set together"
                    )
                self._log.info(f"running on one rank; to use more: paceline launch -n 2 {shlex.join(sys.argv)}")
        elif self._lock is None:
            self._take_lock(self.folder)
        if rows is not None and self.folder is None:
            warn_of_saves(config, self._log)
        if self.folder is not None and rows is not None and self._world.is_main:
            self._contents = (config, rows)
            recipe_objects.write_run(self.folder, config, rows)
        return str(self.folder) if self.folder else None

    def _new_folder(self, name: str | None) -> RunFolder:
        """Equal on every rank: that of the launch, a part of a run that this script has opened, or a new one."""
        created = self._choose_folder(name) if self._world.is_main else None
        if created is not None:
            created.logs.mkdir(parents=True, exist_ok=True)
            regular_files.sync(created.path.parent)
        return RunFolder(Path(collectives.broadcast_object(str(created))))

    def _choose_folder(self, name: str | None) -> RunFolder:
        runs = [run.folder.whole for run in open_runs() if run.folder is not None]
        if (launch := environment.run_folder()) is not None:
            here = launch.current
            if here not in runs and not here.has_run and (name is None or here.is_run_of(name)):
                return here
            runs.append(here)
        if whole := next((run for run in runs if name is None or run.is_run_of(name)), None):
            return whole.part(self._number)
        return RunFolder.create(name or self._name)

    def place_in(self, run: RunFolder) -> RunFolder | None:
        """The folder of this Trainer in a run that is resumed; None if it does not have one yet."""
        if (own := run.part(self._number)).path.is_dir():
            return own
        taken = [each.folder for each in open_runs()]  # a notebook numbers its Trainers anew
        parts = [RunFolder(path) for path in sorted(run.path.glob(run.part(0).path.name.replace("0", "*")))]
        places = [run, *(parts if run_setup.main_script() is None else [])]
        return next((place for place in places if place not in taken), None)

    def together(self) -> dict[str, Any]:
        """For a checkpoint: the steps of Trainers of this process that train at the same time, by the relative paths of
        their folders; and whether this one takes its steps after all of theirs."""
        others = [run for run in open_runs() if run is not self and run._begun is not None]
        if not others or self.folder is None or self._begun is None:
            return {}
        steps = {os.path.relpath(str(run.folder), self.folder.path): run.progress.step for run in others}
        return {TOGETHER: {"last": all((run._begun or 0) < self._begun for run in others), "steps": steps}}

    def open_sinks(self, config: Config) -> Sinks:
        """Open the destinations of this rank's records. A save flushes them first."""
        self.sinks = recipe_objects.open_sinks(config, self.folder, self._world, self._recreate)
        return self.sinks

    def before_save(self) -> None:
        """Whatever a resumed run continues from must be in the metrics file."""
        if self.folder is not None and self._contents is not None and not self.folder.config.exists():
            self._recreate()
        self.sinks.flush()

    def is_evaluated(self, step: int) -> bool:
        """Whether the metrics file has an evaluation after `step`. Collective."""
        folder, found = self.folder, True
        if folder is not None and self._world.is_main:
            self.sinks.flush()
            found = any(record.get("evaluation") and record["step"] == step for record in jsonl.read(folder.metrics))
        return bool(collectives.broadcast_object(found))

    def sync_records(self) -> None:
        """Called right before a checkpoint is committed, which must not survive a power failure without them."""
        if self.folder is not None and self.folder.metrics.exists():
            with os.fdopen(regular_files.open_descriptor(self.folder.metrics), "rb") as file:
                os.fsync(file.fileno())

    def _recreate(self) -> None:
        """The folder was deleted or moved while training: create it again, on rank 0."""
        assert self.folder is not None
        if self._contents is not None and self.folder.config.exists():  # another file noticed it first
            return
        self._log.warning(
            f"the run folder {self.folder} was deleted or moved; it is created again with its metrics, but without "
            "its earlier checkpoints and logs"
        )
        try:
            self.folder.path.mkdir(parents=True, exist_ok=True)
            if self._contents is not None:
                recipe_objects.write_run(self.folder, *self._contents)
        except OSError as error:
            raise not_usable(self.folder.path, error.strerror or str(error)) from error
        if self._lock is not None:
            self._lock.release()
            self._lock.take()

    def take(self, folder: RunFolder, config: Config) -> None:
        """Lock a folder, which becomes that of the launch, and find the ranks without access to it. Collective."""
        self._take_lock(folder)
        self.folder = folder
        _OPEN.add(self)
        launched = environment.run_folder()
        if self._world.is_main and launched is not None and launched != folder and launched.is_unclaimed:
            with suppress(OSError):
                launched.move_to(folder)
        self._opened(folder, _default_of(config, self._name))
        if launched is not None and launched.current.path != folder.path:
            self._log.info(f"training in {folder.short}; the logs of its ranks are in {launched.short}")
        self.without_access = ranks_without_access(folder.path)
        named = numbered("rank", self.without_access)
        if self.without_access and config.checkpoint.unshared == "refuse":
            raise CheckpointError("unshared-folder", f"{named.capitalize()} can't access the run folder {folder}.")
        if self.without_access:
            self._log.warning(f"{named} can't access {folder}: rank 0 writes their shards")

    def _take_lock(self, folder: RunFolder) -> None:
        """Held until this call of train() ends or the trainer is garbage-collected."""
        lock = RunLock(folder)
        run_on_all_ranks(lambda: lock.take() if self._world.is_main else None, "Locking the run folder")
        self._lock = lock
        weakref.finalize(self, lock.release)

    def release(self) -> None:
        """Let others use the folder."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def close(self, config: Config) -> None:
        """At the end of a call to train(): release the lock, and write the report that the recipe asks for, unless a
        launcher does so, which knows how the job ended."""
        self.release()
        if config.report and self.folder is not None and self._world.is_main and environment.run_folder() is None:
            requested_report.write(self.folder)


_OPEN: weakref.WeakSet[RunHandle] = weakref.WeakSet()


def open_runs() -> list[RunHandle]:
    """The runs that Trainers of this process train, in the order in which they were created."""
    mine = (run for run in _OPEN if run._lock is not None and run._process == os.getpid())
    return sorted(mine, key=lambda run: run._number)


def open(
    config: Config, world: World, log: Log, model: nn.Module, progress: TrainProgress, opened: _Opened
) -> RunHandle:
    """The run to resume, after a restart or because of `resume`; or a new run, without a folder yet. Collective."""
    default_name = run_setup.default_name(type(model).__name__.lower())
    run = RunHandle(world, log, default_name, progress, opened)
    if isinstance(config.run, str) and environment.is_run_named():
        log.info(f"--run names the run, not run={config.run!r} of the script")
    folder = _restarted(config, world, default_name)
    if folder is not None:
        run.log_prefix = f"start {environment.restart_count() + 1}: "
    elif config.resume == "auto":
        folder = _newest(config, world, log, default_name)
    elif config.resume is not None and checkpoint_to_resume(config) is None:
        folder = RunFolder.at(config.resume)
        if folder is None:
            raise CheckpointError(
                "missing",
                f"Can't resume: {Path(config.resume).absolute()} is neither a run nor a checkpoint.",
                fix="run paceline checkpoint ls to list them",
            )
    if folder is not None:
        folder = _same_on_every_rank(run.place_in(folder) if world.is_main else None)
    if folder is not None:
        run.take(folder, config)
    return run


def warn_of_saves(config: Config, log: Log) -> None:
    """For a run without a folder."""
    wanted = [name for name in ("save_every", "save_minutes", "save_best") if getattr(config, name) is not None]
    if wanted:
        log.warning(f"no effect without a run folder (run=False): {', '.join(wanted)}")


def checkpoint_to_resume(config: Config) -> Path | None:
    """The path in `resume`, if it is a checkpoint or a weights file, from which a new run starts."""
    if config.resume is None or config.resume == "auto":
        return None
    path = follow_pointer(Path(config.resume).absolute())
    return path if is_checkpoint(locate(path)) or path.is_file() else None


def requested_name(config: Config) -> str | None:
    """The name that the script asks for, unless the command line names the run."""
    return config.run if isinstance(config.run, str) and not environment.is_run_named() else None


def _default_of(config: Config, default_name: str) -> str:
    """The name that identifies the folder of a trainer among those of the same launch."""
    return requested_name(config) or default_name


def _restarted(config: Config, world: World, default_name: str) -> RunFolder | None:
    """The folder of this run before the launcher restarted its ranks."""
    launch, generation = environment.run_folder(), environment.restart_count()
    if launch is None or not generation or not environment.was_launched() or config.run is False:
        return None
    name = requested_name(config)
    return _same_on_every_rank(_used_before(launch.current, name, generation) if world.is_main else None)


def _used_before(launch: RunFolder, name: str | None, generation: int) -> RunFolder | None:
    if name is None or (launch.has_run and launch.is_run_of(name)):
        return launch if launch.has_run else None
    if (found := ledger.opened_before(launch, name, generation)) is not None:
        return found
    starts = [event for event in ledger.events(launch) if event["event"] == "launched"]
    is_resumed = bool(starts and starts[-1].get("resumed"))  # a new launch, with --resume
    return run_setup.find(name, run_setup.main_script())[0] if is_resumed else None


def _newest(config: Config, world: World, log: Log, default_name: str) -> RunFolder | None:
    if config.run is False:
        raise CheckpointError("nothing-to-resume", 'resume="auto" requires a run folder, but run=False disables it.')
    launched = environment.run_folder()  # named by the launcher after the recipe or script
    name = _default_of(config, default_name if launched is None else launched.current.requested_name)
    found = None
    if world.is_main:
        script = run_setup.main_script()
        found, other = run_setup.find(name, script)
        if other is not None and isinstance(config.run, str):  # it has the name that was asked for
            found = other
            log.warning(f"{other.short} was trained by {run_setup.script_of(other)}, and is now continued by {script}")
        elif other is not None and found is None:
            before = f"{other.short} belongs to {run_setup.script_of(other)}, not to {script}"
            log.warning(f"{before}: it is not resumed; to continue it, set resume to its path")
    folder = _same_on_every_rank(found)
    if folder is None:
        log.info(f"no run named {Path(name).name}; starting a new one")
    return folder


def _same_on_every_rank(found: RunFolder | None) -> RunFolder | None:
    path = collectives.broadcast_object(None if found is None else str(found))
    return None if path is None else RunFolder(Path(path))
