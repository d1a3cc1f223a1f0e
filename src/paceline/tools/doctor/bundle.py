"""Packs what a bug report needs from a run folder into one file: `paceline doctor --bundle runs/gpt`.

    write_bundle(Path("runs/gpt"))              # paceline-gpt-20260131-120000.tar.gz in the working directory

It contains text only: settings, records, logs, failure reports, stacks and the manifests of checkpoints, but no
tensors. `redact` lets through only what is known to be harmless, in names of files too, and README.txt says how much
was left out and where. The run folder may be somebody else's, so links are not followed and pipes are not opened. A
failed write leaves nothing behind.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from itertools import count, islice
from pathlib import Path
from typing import Any, BinaryIO

from paceline.errors import CheckpointError
from paceline.run import regular_files
from paceline.run.folder import RunFolder
from paceline.text import format_bytes, plural
from paceline.tools.doctor.finding import Finding
from paceline.tools.doctor.known_words import is_known
from paceline.tools.doctor.redact import Redactor

MANIFEST = "manifest.json"  # as in checkpoint/manifest.py, which imports torch
MAX_BYTES = 64 << 20  # of a bundle, before compression
HEAD, TAIL = 256 << 10, 1 << 20  # bytes that are kept of a longer log
RECORDS = 2000  # that are kept of the metrics
_RECORDS_BYTES = 8 << 20
_WHOLE = 4 << 20  # bytes of a file that is of no use when cut
_README_BYTES = 1 << 20
_MAX_ENTRIES = 10_000  # of a folder
_MAX_LISTED = 500  # files that the README names as left out


def write_bundle(
    run: Path,
    target: Path | None = None,
    findings: Sequence[Finding] = (),
    environment: Mapping[str, str] = os.environ,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Returns the path of the bundle, by default a new file in the working directory. No file is overwritten. `say`
    gets a line for each file from which something was left out."""
    folder = _require_run(run)
    clean = Redactor()
    members = _Members(clean)
    members.add("doctor.json", _to_json(clean.values([finding.to_json() for finding in findings])))
    members.add("environment.json", _to_json(clean.variables(environment)))
    members.add("packages.txt", _packages(clean))
    for path in _files(folder):
        members.add_file(path, folder)
    name = clean.file_name(folder.path.name)
    written = _write(target, name, {"README.txt": members.readme(name), **members.texts})
    for line in _at_most(members.left_out, 20):
        say(line)
    return written


def _require_run(path: Path) -> RunFolder:
    folder = RunFolder.at(str(path)) or RunFolder(path.absolute())
    if not any(part.exists() for part in (folder.config, folder.checkpoints, folder.ledger, folder.logs)):
        what = f"No run in {path}." if path.exists() else f"Folder {path} does not exist."
        raise CheckpointError("missing", what, fix="pass a run folder, e.g. runs/gpt")
    return folder


@dataclass
class _Members:
    """The texts of a bundle by name, as far as they fit, and what was left out."""

    clean: Redactor
    texts: dict[str, bytes] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    size: int = _README_BYTES

    def add_file(self, path: Path, folder: RunFolder) -> None:
        name = "/".join(map(self.clean.file_name, path.relative_to(folder.path).parts))
        try:
            text = _read(path, is_metrics=path == folder.metrics)
            self.add(name, _redacted(self.clean, path.suffix, text))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            reason = (error.strerror or str(error)) if isinstance(error, OSError) else "not valid JSON"
            self.clean.take_counts()
            self.left_out.append(f"{name}: {self.clean.message(reason)}")

    def add(self, name: str, text: str) -> None:
        """`text` has passed the redactor."""
        content, counts = text.encode(errors="replace"), self.clean.take_counts()
        if self.size + len(content) > MAX_BYTES:
            self.left_out.append(f"{name}: the bundle would be larger than {format_bytes(MAX_BYTES)}")
            return
        if counts.total():
            left_out = (plural(number, kind.rstrip("s")) for kind, number in sorted(counts.items()) if number)
            self.left_out.append(f"{name}: {', '.join(left_out)}")
        # Two names may differ in nothing but what was removed.
        names = (name if number == 1 else f"{name}-{number}" for number in count(1))
        self.texts[next(free for free in names if free not in self.texts)] = content
        self.size += len(content) + tarfile.BLOCKSIZE * 2

    def readme(self, run: str) -> bytes:
        contents = "\n".join(f"{len(content):>10}  {name}" for name, content in self.texts.items())
        left_out = "\n".join(_at_most(self.left_out, _MAX_LISTED))
        text = Path(__file__).with_name("bundle_readme.md").read_text(encoding="utf-8")
        return text.format(run=run, contents=contents, left_out=left_out or "nothing").encode()[:_README_BYTES]


def _at_most(lines: list[str], number: int) -> list[str]:
    more = len(lines) - number
    return [*lines[:number], *([f"and parts of {more} more files"] if more > 0 else [])]


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
    return text


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


def _redacted(clean: Redactor, suffix: str, text: str) -> str:
    """By the kind of the file. Raises ValueError or RecursionError if it is no JSON, although its name says so."""
    if suffix == ".json":
        return json.dumps(clean.values(json.loads(text)), ensure_ascii=False, indent=1)
    if suffix == ".jsonl":
        return "".join(_record(clean, line) for line in text.split("\n") if line.strip())
    return clean.settings(text) if suffix == ".yaml" else clean.log(text)


def _record(clean: Redactor, line: str) -> str:
    """A line of JSON, or nothing: a killed writer leaves half a line."""
    try:
        return json.dumps(clean.values(json.loads(line)), ensure_ascii=False) + "\n"
    except (ValueError, RecursionError):
        clean.leave_out("lines", 1)
        return ""


def _to_json(values: Any) -> str:
    return json.dumps(values, ensure_ascii=False, indent=1) + "\n"


def _packages(clean: Redactor) -> str:
    """With their versions, if paceline knows or needs them: others may be private."""
    installed = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    needed, found = ["paceline", "torch"], set[str]()
    while needed:
        if (name := needed.pop()) not in found:
            found.add(name)
            with suppress(metadata.PackageNotFoundError):
                needed += [re.split(r"[^\w.-]", each)[0] for each in metadata.requires(name) or ()]
    named = {name for name in installed if name in found or is_known(name)}
    clean.leave_out("values", len(installed) - len(named))
    return "".join(f"{name} {clean.message(installed[name])}\n" for name in sorted(named, key=str.lower))


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
        raise CheckpointError("not-exported", f"Could not write {path}: {error.strerror or error}.") from None
    return path
