"""Packs what a bug report needs from a run folder into one file: `paceline doctor --bundle runs/gpt`.

    write_bundle(Path("runs/gpt"))              # paceline-gpt-20260131-120000.tar.gz in the working directory

It contains text only: settings, records, logs, failure reports, stacks and the manifests of checkpoints, but no
tensors. Everything passes `redact`, names of files included, and the user's name is removed from paths. The run folder
may be somebody else's, so links are not followed and pipes are not opened. A failed write leaves nothing behind.
"""

from __future__ import annotations

import getpass
import gzip
import io
import json
import os
import re
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from itertools import count, islice
from pathlib import Path
from typing import Any, BinaryIO

from paceline.doctor.finding import Finding
from paceline.doctor.redact import REMOVED, redact, redact_values
from paceline.errors import CheckpointError
from paceline.run import regular_files
from paceline.run.folder import RunFolder
from paceline.text import format_bytes

MANIFEST = "manifest.json"  # as in checkpoint/manifest.py, which imports torch
MAX_BYTES = 64 << 20  # of a bundle, before compression
HEAD, TAIL = 256 << 10, 1 << 20  # bytes that are kept of a longer log
RECORDS = 2000  # that are kept of the metrics
_RECORDS_BYTES = 8 << 20
_WHOLE = 4 << 20  # bytes of a file that is of no use when cut
_README_BYTES = 1 << 20
_MAX_ENTRIES = 10_000  # of a folder
_MAX_LISTED = 500  # files that the README names as left out
_TRAINING = re.compile(
    r"(?:NCCL|GLOO|TORCH[A-Z]*|PYTORCH|CUDA|OMP|MASTER|SLURM|PACELINE)_\w+|(?:[A-Z]+_)*(?:RANK|WORLD_SIZE)"
)
_NAME = r"""[^/\s"'`:,;()\[\]{}<>\\~]+"""
_NAME_END = r"""(?![^/\s"'`:,;()\[\]{}<>\\])"""
_README = """\
A report about the paceline run {run}.

Look through it before you share it. Secrets were removed where they could be recognized, and so was the name of the
user in paths. What remains are settings, logs, and the names of files, packages and environment variables.

Contents (bytes, name):

{contents}

Left out:

{left_out}

Tensors, profiles and the files of other tools are never included.
"""


def write_bundle(
    run: Path,
    target: Path | None = None,
    findings: Sequence[Finding] = (),
    environment: Mapping[str, str] = os.environ,
) -> Path:
    """Returns the path of the bundle, by default a new file in the working directory. No file is overwritten."""
    folder = _require_run(run)
    clean = _Cleaner.of(environment)
    members = _Members(clean)
    members.add("doctor.json", _to_json([finding.to_json() for finding in findings]))
    members.add("environment.json", _to_json(_variables(environment, clean.users)))
    members.add("packages.txt", _packages())
    for path in _files(folder):
        members.add_file(path, folder)
    name = clean.name(folder.path.name)
    return _write(target, name, {"README.txt": members.readme(name), **members.texts})


def _require_run(path: Path) -> RunFolder:
    folder = RunFolder.at(str(path)) or RunFolder(path.absolute())
    if not any(part.exists() for part in (folder.config, folder.checkpoints, folder.ledger, folder.logs)):
        what = f"No run in {path}." if path.exists() else f"Folder {path} does not exist."
        raise CheckpointError("missing", what, fix="pass a run folder, e.g. runs/gpt")
    return folder


@dataclass(frozen=True)
class _Cleaner:
    """Removes secrets from texts, and home folders and names of users from paths."""

    homes: re.Pattern[str]
    names: re.Pattern[str]
    users: frozenset[str]

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> _Cleaner:
        users = {environment.get("USER", ""), environment.get("LOGNAME", "")}
        with suppress(OSError, KeyError):
            users.add(getpass.getuser())
        users -= {"", "root"}
        known = {environment.get("HOME", "").rstrip("/"), str(Path("~").expanduser())} - {"", "~"}
        homes = [*map(re.escape, sorted(known, key=len, reverse=True)), f"/(?:home|Users)/{_NAME}"]
        names = [rf"(?<=/home/){_NAME}", *(rf"(?<=/){re.escape(user)}" for user in sorted(users))]
        return cls(
            re.compile(rf"(?<![\w.~-])(?:{'|'.join(homes)}){_NAME_END}"),
            re.compile(rf"(?:{'|'.join(names)}){_NAME_END}"),
            frozenset(users),
        )

    def text(self, text: str) -> str:
        return self.names.sub("~", self.homes.sub("~", redact(text)))

    def name(self, name: str) -> str:
        """The name of a file or folder, with nothing in it that a file system or a terminal could misunderstand."""
        name = self.text(f"/{name}")[1:].replace(REMOVED, "removed")
        return re.sub(r"[^\w.~@+=,-]", "_", name.encode(errors="replace").decode())


@dataclass
class _Members:
    """The texts of a bundle by name, as far as they fit, and what was left out."""

    clean: _Cleaner
    texts: dict[str, bytes] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    size: int = _README_BYTES

    def add_file(self, path: Path, folder: RunFolder) -> None:
        name = "/".join(self.clean.name(part) for part in path.relative_to(folder.path).parts)
        try:
            self.add(name, _read(path, is_metrics=path == folder.metrics))
        except FileNotFoundError:
            pass
        except OSError as error:
            self.left_out.append(f"{name}: {self.clean.text(error.strerror or str(error))}")

    def add(self, name: str, text: str) -> None:
        content = self.clean.text(text).encode(errors="replace")
        if self.size + len(content) > MAX_BYTES:
            self.left_out.append(f"{name}: the bundle would be larger than {format_bytes(MAX_BYTES)}")
            return
        # Two names may differ in nothing but what was removed.
        names = (name if number == 1 else f"{name}-{number}" for number in count(1))
        self.texts[next(free for free in names if free not in self.texts)] = content
        self.size += len(content) + tarfile.BLOCKSIZE * 2

    def readme(self, run: str) -> bytes:
        contents = "\n".join(f"{len(content):>10}  {name}" for name, content in self.texts.items())
        more = len(self.left_out) - _MAX_LISTED
        left_out = "\n".join([*self.left_out[:_MAX_LISTED], *([f"and {more} more files"] if more > 0 else [])])
        return _README.format(run=run, contents=contents, left_out=left_out or "nothing").encode()[:_README_BYTES]


def _files(folder: RunFolder) -> Iterator[Path]:
    """What to include: what tells most first, since the size of a bundle is limited."""
    yield from (folder.config, folder.derived, folder.ledger, folder.metrics)
    # Reports of failures and hangs, stacks and the command come before the logs.
    yield from sorted(_below(folder.logs), key=lambda path: path.suffix not in (".json", ".txt"))
    yield from _below(folder.rank_stats(0).parent)
    yield from reversed(_below(folder.checkpoints, MANIFEST))


def _below(folder: Path, name: str = "") -> list[Path]:
    """The files in a folder and its folders, or those with a name. Links are listed, not followed."""
    if folder.is_symlink():
        return [folder]
    found = (
        Path(where, each)
        for where, folders, files in os.walk(folder)
        for each in (*files, *(each for each in folders if Path(where, each).is_symlink()))
        if not name or each == name
    )
    return sorted(islice(found, _MAX_ENTRIES))


def _read(path: Path, *, is_metrics: bool) -> str:
    """The text of a file, cut if it is long. Raises OSError if it is no regular file, no text, or too large to cut."""
    with os.fdopen(regular_files.open_descriptor(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if path.suffix in (".json", ".yaml"):
            if size > _WHOLE:
                raise OSError(f"larger than {format_bytes(_WHOLE)}")
            content = file.read(_WHOLE)
        else:
            content = _last_records(file, size) if is_metrics else _ends(file, size)
    text = content.decode(errors="replace")
    if "\0" in text or text.count("\ufffd") > len(text) // 10:
        raise OSError("not text")
    if path.suffix == ".jsonl":
        return "\n".join(map(_redacted_json, text.split("\n")))
    return _redacted_json(text) if path.suffix == ".json" else text


def _last_records(file: BinaryIO, size: int) -> bytes:
    start = max(0, size - _RECORDS_BYTES)
    file.seek(start)
    lines = file.read(_RECORDS_BYTES).splitlines(keepends=True)
    return b"".join(lines[1:][-RECORDS:] if start else lines[-RECORDS:])


def _ends(file: BinaryIO, size: int) -> bytes:
    """The beginning and the end, cut between lines: half a secret would not be recognized."""
    if size <= HEAD + TAIL:
        return file.read(HEAD + TAIL)
    head = file.read(HEAD)
    head = head[: max(head.rfind(b"\n"), head.rfind(b"\r")) + 1]
    file.seek(size - TAIL)
    tail = file.read(TAIL)
    line_end = re.search(rb"[\r\n]", tail)
    tail = tail[line_end.end() :] if line_end else b""
    return head + f"\n[… {size - len(head) - len(tail):,} bytes were left out here …]\n".encode() + tail


def _redacted_json(text: str) -> str:
    """Redacted as values, if it is JSON. Its text is redacted as well, like any other."""
    try:
        values = redact_values(json.loads(text))
    except (ValueError, RecursionError):
        return text
    return json.dumps(values, ensure_ascii=False, indent=1 if "\n" in text.strip() else None)


def _to_json(values: Any) -> str:
    return json.dumps(redact_values(values), ensure_ascii=False, indent=1) + "\n"


def _variables(environment: Mapping[str, str], users: frozenset[str]) -> dict[str, str | None]:
    """All variables; the values of those that matter for training, others as null."""
    shown = {name: "~" if value in users else value for name, value in environment.items() if _TRAINING.fullmatch(name)}
    return {name: shown.get(name) for name in sorted(environment)}


def _packages() -> str:
    installed = {f"{each.metadata['Name']} {each.version}\n" for each in metadata.distributions()}
    return "".join(sorted(installed, key=str.lower))


def _write(target: Path | None, run: str, members: Mapping[str, bytes]) -> Path:
    now = time.time()
    stem = f"paceline-{run}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"
    if target is not None and os.path.lexists(target):
        raise CheckpointError("exists", f"{target} already exists.", fix="use another name, or remove it first")
    names = (Path(f"{stem}{'' if number == 1 else f'-{number}'}.tar.gz").absolute() for number in count(1))
    path = target or next(name for name in names if not os.path.lexists(name))
    created = False
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        created = True
        with (
            os.fdopen(descriptor, "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=now) as compressed,  # without the name in its header
            tarfile.open(fileobj=compressed, mode="w") as archive,
        ):
            for name, content in members.items():
                member = tarfile.TarInfo(f"{stem}/{name}")  # owned by uid and gid 0, without names
                member.size, member.mtime, member.mode = len(content), int(now), 0o600
                archive.addfile(member, io.BytesIO(content))
    except BaseException as error:
        if created:
            path.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(
            "not-exported",
            f"Could not write {path}: {error.strerror or error}.",
            fix="check the free space and the permissions of its folder",
        ) from None
    return path
