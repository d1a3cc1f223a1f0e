"""A save from start to commit, on every rank of a group or on one rank alone.

    saving = writer.begin(address, tensors, description, background=True)
    ...                                  # the next forward and backward
    saving.wait_for_copy()               # before the weights change
    saved = saving.result()              # waits for the commit

A background save blocks training only for one message, the plan (reused from the previous save) and the start of a
copy. The rest runs on a thread: each rank writes its file and reports to the first rank, which commits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from time import perf_counter
from typing import Any

import torch.distributed as torch_dist
from torch import Tensor

from paceline.checkpoint import manifest as manifests
from paceline.checkpoint import transfer
from paceline.checkpoint.checkpoint_store import Address, CheckpointStore, Draft
from paceline.checkpoint.host_copy import Allocate, HostCopy, lower_priority, map_memory
from paceline.checkpoint.manifest import BLOCK, FORMAT, Chunk, Entry, File, Manifest
from paceline.checkpoint.planner import Group, LocalShard, plan_save, signature
from paceline.checkpoint.reader import candidates, open_checkpoint
from paceline.checkpoint.shard_file import FileLayout, bytes_of, lay_out, write_file
from paceline.errors import CheckpointError
from paceline.run.folder import BEST, LATEST
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
    """The address, size and duration of a save: seconds of writing and hashing on this rank, and in total."""

    at: Address
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

    Ranks `without_access` to the store write through the first rank of the group. `allocate` returns the memory for
    copies of background saves.
    """

    def __init__(
        self, group: Group = None, without_access: Collection[int] = (), allocate: Allocate = map_memory
    ) -> None:
        self._group, self._without_access, self._allocate = group, without_access, allocate
        self._rank = 0 if group is None else torch_dist.get_rank(group)
        self._planned_for: tuple[Any, ...] | None = None
        self._layout: FileLayout | None = None
        self._copy: HostCopy | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._last: PendingSave | None = None

    def begin(
        self,
        at: Address,
        tensors: Mapping[str, LocalShard],
        description: Description,
        *,
        volatile: Collection[str] = (),
        background: bool = False,
        overwrite: bool = False,
        unique_name: bool = False,
        before: Callable[[], None] | None = None,
        after: Callable[[str], None] | None = None,
    ) -> PendingSave:
        """`volatile` lists tensors that the next forward may change. `unique_name` appends a number to a name that is
        taken. `before` and `after` (with the name) are called on the first rank right before and after the checkpoint
        is committed, on the writing thread."""
        if self._last is not None:
            self._last._task.exception()  # one at a time; errors are raised by its own result()
        layout = self._plan(tensors)
        job = _SaveJob(
            self._group,
            self._rank,
            self._without_access,
            at,
            description,
            layout,
            overwrite,
            unique_name,
            before,
            after,
        )
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
        self._copy = self._copy or HostCopy(layout, devices, self._allocate)
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
    at: Address
    description: Description
    layout: FileLayout
    overwrite: bool
    unique_name: bool
    before: Callable[[], None] | None
    after: Callable[[str], None] | None

    def run_copied(self, copy: HostCopy) -> SaveResult:
        copy.finish()
        return self.run(copy.item_bytes)

    def run(self, item_bytes: Callable[[int], memoryview]) -> SaveResult:
        began = perf_counter()
        sizes = self._gather(self.layout.size)
        draft = Draft(**self._on_first_rank(lambda: self._create(sum(sizes))))
        self.at = Address(self.at.store, draft.name)
        reports = self._gather(self._written(draft, item_bytes))
        if self.rank == 0 and any("error" in report for report in reports):
            self.at.store.discard(draft)
        raise_first_error(reports)
        self._on_first_rank(lambda: self._commit(draft, reports))
        seconds = {**reports[self.rank]["seconds"], "all": perf_counter() - began}
        return SaveResult(self.at, sum(report["file"]["bytes"] for report in reports), seconds)

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

    def _create(self, size: int) -> dict[str, Any]:
        store, name = self.at
        return store.create(name, size, overwrite=self.overwrite, unique_name=self.unique_name)._asdict()

    def _written(self, draft: Draft, item_bytes: Callable[[int], memoryview]) -> dict[str, Any]:
        """The report of this rank, or its error. The first rank also writes the files of ranks without access."""
        own = capture_error(lambda: self._write(draft, item_bytes), self._not_written)
        for source in self.without_access if self.rank == 0 else ():
            received = capture_error(functools.partial(self._receive, source, draft), self._not_written)
            own = received if "error" in received and "error" not in own else own
        return own

    def _write(self, draft: Draft, item_bytes: Callable[[int], memoryview]) -> dict[str, Any]:
        name, is_sent = _file_name(self.rank), self.rank in self.without_access
        file = transfer.sending(self.group) if is_sent else self.at.store.write(draft, name)
        return {**write_file(file, name, self.layout, item_bytes).to_json(), "aliases": dict(self.description.aliases)}

    def _receive(self, source: int, draft: Draft) -> dict[str, Any]:
        transfer.receive_file(self.group, source, self.at.store.write(draft, _file_name(source)))
        return {}

    def _commit(self, draft: Draft, reports: list[dict[str, Any]]) -> dict[str, Any]:
        store, name = self.at
        try:
            manifest = _manifest(self.description, reports, _creation_time(store))
            body, digest = manifests.encode(manifest)
            self._require_readable(len(body), manifest)
            if self.before is not None:
                self.before()
        except BaseException:
            store.discard(draft)
            raise
        store.commit(draft, {manifests.DIGEST: digest, manifests.NAME: body}, overwrite=self.overwrite)
        if self.after is not None:
            try:
                self.after(name)
            except OSError as error:
                raise CheckpointError(
                    "not-tidied",
                    f"Checkpoint {self.at} was saved, but updating its folder failed: {error.strerror or error}.",
                ) from error
        return {}

    def _require_readable(self, length: int, manifest: Manifest) -> None:
        limit = manifests.max_bytes(sum(file.bytes for file in manifest.files.values()))
        if length > limit:
            raise CheckpointError(
                "too-much-metadata", f"The manifest of {self.at} is too large: {length} bytes, the limit is {limit}."
            )

    def _not_written(self, reason: str) -> CheckpointError:
        return self._not_saved(reason, "" if self.group is None else f" on rank {self.rank}")

    def _not_saved(self, reason: str, where: str = "") -> CheckpointError:
        return CheckpointError("not-saved", f"Could not write checkpoint {self.at}{where}: {reason}.")


def _file_name(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _creation_time(store: CheckpointStore) -> str:
    """Now, or just after the latest checkpoint if the clock was set back, because checkpoints are sorted by it."""
    now = datetime.now(UTC)
    for name in store.pointer(LATEST)[:1]:
        try:
            last = datetime.fromisoformat(open_checkpoint(Address(store, name)).manifest.created)
            now = max(now, last + timedelta(microseconds=1))
        except (CheckpointError, ValueError, TypeError):
            continue
    return now.isoformat(timespec="microseconds")


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


def prune(store: CheckpointStore, keep: int, keep_every: int | None) -> list[str]:
    """Remove all but the newest `keep`, the best, and multiples of `keep_every` steps. Returns the removed names."""
    best = store.pointer(BEST)
    saved = [(found.at.name, found.manifest.step) for found in candidates(store) if found.manifest is not None]
    removed = [
        name
        for name, step in saved[keep:]
        if name.startswith("step-") and name not in best and (keep_every is None or step % keep_every)
    ]
    for name in removed:
        store.delete(name)
    return removed
