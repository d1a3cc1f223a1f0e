"""A save from start to commit, on every rank of a group or on one rank alone.

    saving = writer.begin(folder, tensors, description, background=True)
    ...                                  # the next forward and backward
    saving.wait_for_copy()               # before the weights change
    folder = saving.result()             # waits for the commit

A background save blocks training only for one message, the plan (reused from the previous save) and the start of a
copy. The rest runs on a thread: each rank writes its file and reports to the first rank, which commits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch.distributed as torch_dist
from torch import Tensor

from paceline.checkpoint import local_store, transfer
from paceline.checkpoint.filesystem import Filesystem
from paceline.checkpoint.host_copy import HostCopy, lower_priority
from paceline.checkpoint.manifest import BLOCK, FORMAT, Chunk, Entry, File, Manifest
from paceline.checkpoint.planner import Group, LocalShard, plan_save, signature
from paceline.checkpoint.shard_file import FileLayout, bytes_of, lay_out, write_file
from paceline.errors import CheckpointError
from paceline.runtime import objects
from paceline.runtime.consistency import Report, capture_error, raise_first_error, run_on_first_rank


@dataclass(frozen=True)
class Description:
    """What the manifest contains besides tensors. Taken from the first rank, except for aliases."""

    step: int
    epoch: int
    optimizer: bool
    parent: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    metadata: Any = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SaveResult:
    """The folder, size and duration of a save: seconds of writing and hashing on this rank, and in total."""

    folder: Path
    bytes: int
    seconds: Mapping[str, float]


class PendingSave:
    """A save that may still be in progress."""

    def __init__(self, task: Future[SaveResult], copy: HostCopy | None = None) -> None:
        self._task, self._copy = task, copy

    def wait_for_copy(self) -> None:
        """Return when the tensors may change."""
        if self._copy is not None:
            self._copy.wait_for_copy()

    @property
    def is_done(self) -> bool:
        return self._task.done()

    def result(self) -> SaveResult:
        self.wait_for_copy()
        return self._task.result()


class Writer:
    """Saves on every rank of a group, one at a time; without a group, on this rank alone.

    Ranks `without_access` to the folder write through the first rank of the group.
    """

    def __init__(
        self, group: Group = None, disk: Filesystem | None = None, without_access: Collection[int] = ()
    ) -> None:
        self._group, self._disk, self._without_access = group, disk or Filesystem(), without_access
        self._rank = 0 if group is None else torch_dist.get_rank(group)
        self._planned_for: tuple[Any, ...] | None = None
        self._layout: FileLayout | None = None
        self._copy: HostCopy | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._last: PendingSave | None = None

    def begin(
        self,
        target: Path,
        tensors: Mapping[str, LocalShard],
        description: Description,
        *,
        volatile: Collection[str] = (),
        background: bool = False,
        overwrite: bool = False,
        unique_name: bool = False,
        before: Callable[[], None] | None = None,
        after: Callable[[Path], None] | None = None,
    ) -> PendingSave:
        """`volatile` lists tensors that the next forward may change. `unique_name` appends a number if `target` exists.
        `before` and `after` are called on the first rank right before and after the checkpoint is committed, on the
        writing thread."""
        if self._last is not None:
            self._last._task.exception()  # one at a time; errors are raised by its own result()
        layout = self._plan(tensors)
        where = (self._group, self._rank, self._without_access, self._disk, target)
        job = _SaveJob(*where, description, layout, overwrite, unique_name, before, after)
        locals_ = [tensors[item.name].local for item in layout.items]
        if not background:
            task: Future[SaveResult] = Future()
            try:
                task.set_result(job.run(lambda number: bytes_of(locals_[number].detach().cpu().contiguous())))
            except BaseException as error:
                task.set_exception(error)
            self._last = PendingSave(task)
            return self._last
        copy = self._copy_into(layout, locals_)
        copy.begin(locals_, {n for n, item in enumerate(layout.items) if item.name in volatile})
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "paceline-save", initializer=lower_priority)
        self._last = PendingSave(self._thread.submit(job.run_copied, copy), copy)
        return self._last

    def prepare(self, tensors: Mapping[str, LocalShard]) -> None:
        """Plan the first background save and allocate its host memory, on a thread. Collective."""
        layout = self._plan(tensors)
        self._copy_into(layout, [tensors[item.name].local for item in layout.items]).prepare()

    @property
    def is_ready(self) -> bool:
        """Whether a background save would begin at once."""
        return (self._last is None or self._last.is_done) and (self._copy is None or self._copy.is_ready)

    @property
    def size(self) -> int:
        """Bytes that this rank writes."""
        return 0 if self._layout is None else self._layout.size

    def _copy_into(self, layout: FileLayout, tensors: Sequence[Tensor]) -> HostCopy:
        devices = {tensor.device for tensor in tensors}
        if self._copy is not None and not self._copy.adopt(layout, devices):
            self._copy.close()
            self._copy = None
        self._copy = self._copy or HostCopy(layout, devices)
        return self._copy

    def _plan(self, tensors: Mapping[str, LocalShard]) -> FileLayout:
        now = signature(tensors)
        changed = now != self._planned_for
        if self._group is not None:  # a parameter first used late changes the plan of one pipeline stage only
            changed = any(objects.all_gather(changed, self._group))
        if changed or self._layout is None:
            self._layout = lay_out(plan_save(tensors, self._group))
            self._planned_for = now
        return self._layout

    def close(self) -> None:
        """Wait for a pending save and free the host buffer."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        if self._copy is not None:
            self._copy.close()
        self._thread = self._copy = None


@dataclass
class _SaveJob:
    group: Group
    rank: int
    without_access: Collection[int]
    disk: Filesystem
    target: Path
    description: Description
    layout: FileLayout
    overwrite: bool
    unique_name: bool
    before: Callable[[], None] | None
    after: Callable[[Path], None] | None

    def run_copied(self, copy: HostCopy) -> SaveResult:
        copy.finish()
        return self.run(copy.item_bytes)

    def run(self, item_bytes: Callable[[int], memoryview]) -> SaveResult:
        began = perf_counter()
        sizes = self._gather(self.layout.size)
        opened = self._on_first_rank(lambda: self._create_partial(sum(sizes)))
        partial = Path(opened["partial"])
        self.target = Path(opened["target"])
        reports = self._gather(self._written(partial, item_bytes))
        if self.rank == 0 and any("error" in report for report in reports):
            local_store.try_to_remove(self.disk, partial)
        raise_first_error(reports)
        self._on_first_rank(lambda: self._commit(partial, reports))
        seconds = {**reports[self.rank]["seconds"], "all": perf_counter() - began}
        return SaveResult(self.target, sum(report["file"]["bytes"] for report in reports), seconds)

    def _gather(self, value: Any) -> list[Any]:
        return [value] if self.group is None else self._collective(lambda: objects.all_gather(value, self.group))

    def _collective(self, exchange: Callable[[], Any]) -> Any:
        try:
            return exchange()
        except RuntimeError as error:  # raised by torch if another rank died or timed out
            reason = f"lost the connection to another rank ({str(error).splitlines()[0]})"
            raise self._not_saved(reason) from error

    def _on_first_rank(self, work: Callable[[], Report]) -> Report:
        if self.group is not None:
            return self._collective(lambda: run_on_first_rank(work, self._not_saved, self.group))  # type: ignore[no-any-return]
        report = capture_error(work, self._not_saved)
        raise_first_error([report])
        return report

    def _create_partial(self, size: int) -> dict[str, Any]:
        if self.unique_name:
            self.target = local_store.unused_name(self.target)
        partial = local_store.create_partial(self.disk, self.target, size, overwrite=self.overwrite)
        return {"partial": str(partial), "target": str(self.target)}

    def _written(self, partial: Path, item_bytes: Callable[[int], memoryview]) -> dict[str, Any]:
        """The report of this rank, or its error. The first rank also writes the files of ranks without access."""
        own = capture_error(lambda: self._write(partial, item_bytes), self._not_written)
        for source in self.without_access if self.rank == 0 else ():
            receive = functools.partial(self._receive, source, partial / _file_name(source))
            received = capture_error(receive, self._not_written)
            own = received if "error" in received and "error" not in own else own
        return own

    def _write(self, partial: Path, item_bytes: Callable[[int], memoryview]) -> dict[str, Any]:
        path = partial / _file_name(self.rank)
        if self.rank in self.without_access:
            written = transfer.send_file(self.group, lambda disk: write_file(disk, path, self.layout, item_bytes))
        else:
            written = write_file(self.disk, path, self.layout, item_bytes)
        return {**written.to_json(), "aliases": dict(self.description.aliases)}

    def _receive(self, source: int, path: Path) -> dict[str, Any]:
        transfer.receive_file(self.group, source, self.disk, path)
        return {}

    def _commit(self, partial: Path, reports: list[dict[str, Any]]) -> dict[str, Any]:
        manifest = _manifest(self.description, reports, local_store.creation_time(self.target.parent))
        if self.before is not None:
            self.before()
        local_store.commit(self.disk, partial, self.target, manifest, overwrite=self.overwrite)
        if self.after is not None:
            try:
                self.after(self.target)
            except OSError as error:
                raise CheckpointError(
                    "not-tidied",
                    f"Checkpoint {self.target} was saved, but updating its folder failed: {error.strerror or error}.",
                    why="the latest pointer could not be updated, or an older checkpoint could not be removed",
                    fix="check the free space and the permissions of the folder; the next save tries again",
                ) from error
        return {}

    def _not_written(self, reason: str) -> CheckpointError:
        return self._not_saved(reason, "" if self.group is None else f" on rank {self.rank}")

    def _not_saved(self, reason: str, where: str = "") -> CheckpointError:
        return CheckpointError(
            "not-saved",
            f"Could not write checkpoint {self.target}{where}: {reason}.",
            why="earlier checkpoints were not modified",
            fix="check the free space and the permissions of its folder",
        )


def _file_name(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _manifest(description: Description, reports: list[dict[str, Any]], created: str) -> Manifest:
    found: dict[str, tuple[str, list[int], list[Chunk]]] = {}
    aliases: dict[str, str] = {}
    for report in reports:
        aliases |= report["aliases"]
        for name, dtype, shape, chunk in report["chunks"]:
            found.setdefault(name, (dtype, shape, []))[2].append(Chunk(**chunk))
    return Manifest(
        format=FORMAT,
        created=created,
        block=BLOCK,
        files={report["name"]: File(**report["file"]) for report in reports},
        tensors={name: Entry(dtype=dtype, shape=shape, chunks=own) for name, (dtype, shape, own) in found.items()},
        **{**asdict(description), "aliases": aliases},
    )
