"""Reads logs of any size, in bounded memory: of a large one, only the surroundings of lines that look like a failure.

A log of a gigabyte is mostly progress. Searching blocks of bytes for a few words is a hundred times faster than
matching each line, and nearly every failure has one of these words in or near its lines.

A `LogLine` has the rank and the node that wrote it, and the text without prefixes. Every launcher marks lines in its
own way:

    [rank3]: text                          torchrun since 2.1
    [default3]: text                       torchrun --tee
    3: text                                srun --label
    [1,3]<stderr>: text                    mpirun --tag-output
    (RayTrainWorker pid=71, ip=10.0.0.2) text
    node-1: text                           pdsh, DeepSpeed
    gpu-7:812:901 [3] NCCL WARN text       NCCL
    2024-08-12T10:00:00.123Z text          docker, kubectl
    trainer-1  | text                      docker compose
    [2024-03-19, 02:41:31 UTC] {subprocess.py:93} INFO - text              Airflow
"""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from paceline.errors import PacelineError

WORDS = (
    b"rror", b"raceback", b"illed", b"ailed", b"NCEL", b"ignal", b"imed out", b"core dumped", b"Xid", b" nan",
    b"victed",
)  # fmt: skip
SMALL = 32 * 2**20  # bytes of a log of which every line is matched
_BLOCK = 2**18
_AFTER = 80  # lines that are kept after one with a word
_MAX_ALIKE = 300  # lines that differ in digits only
_MAX_LINE = 2000  # bytes of a line that are matched
_MAX_KEPT = 100_000  # lines; after them, only the end of the log is read
_MAX_FILES = 4096
_MAX_STREAM = 2**31  # bytes that are read of what is not a file
_DIGITS = bytes.maketrans(b"0123456789abcdef", b"0" * 16)
_TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_LOG_NAME = re.compile(_TEXTS["log_name"])

Numbered = tuple[int, bytes]
_RANK_IN_NAME = re.compile(r"(?:^|[^A-Za-z])(?:local_rank|rank|worker|proc|process)[-_.]?(\d+)(?:\D|$)")
_RANK_FOLDER = re.compile(r"(?:local_rank|rank|worker)[-_.]?(\d+)")


def has_log_name(name: str) -> bool:
    return _LOG_NAME.search(name) is not None


def log_files(path: Path) -> list[Path]:
    """The file itself, or the logs in a folder, those of low ranks first."""
    if not path.is_dir():
        return [path]
    # os.walk skips folders that it can't read.
    found = [Path(folder, name) for folder, _, names in os.walk(path) for name in names if has_log_name(name)]
    ordered = sorted(found, key=lambda each: (rank_of_file(str(each)) or 0, str(each)))
    return ordered[:_MAX_FILES]


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, int | None]]:
    """The text of a log and its size, if it can be sought. Compressed logs, pipes and UTF-16 are read as well."""
    kind = path.stat().st_mode
    if stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
        raise PacelineError("no-logs", f"{path} is a device, not a log.")
    with path.open("rb") as file:
        if not stat.S_ISREG(kind):
            with spooled(file) as text:
                yield text
            return
        start = file.read(2)
        file.seek(0)
        if start == b"\x1f\x8b":
            with gzip.open(file) as plain:
                yield plain, None  # type: ignore[misc]
        elif start in (b"\xff\xfe", b"\xfe\xff"):  # of PowerShell
            data = file.read(4 * SMALL).decode("utf-16", "replace").encode()
            yield io.BytesIO(data), len(data)
        else:
            yield file, path.stat().st_size


@contextmanager
def spooled(stream: IO[bytes]) -> Iterator[tuple[BinaryIO, int]]:
    """A copy on disk of a stream, which can be sought."""
    with tempfile.TemporaryFile() as file:
        while file.tell() < _MAX_STREAM and (block := stream.read(_BLOCK)):
            file.write(block)
        size = file.tell()
        file.seek(0)
        yield file, size


def read(file: BinaryIO, name: str, size: int | None) -> Iterator[LogLine]:
    """The lines that may tell of a failure. `size`: in bytes, or None if the end can't be sought."""
    rank = rank_of_file(name)
    lines = enumerate(_lines(file), 1) if size is not None and size <= SMALL else _near_words(file, size)
    is_new = _novelty()  # not one of many repetitions that differ in their numbers only, such as progress
    for number, line in lines:
        if is_new(shown := _shown(line)):
            yield parse(name, number, shown.decode("utf-8", "replace"), rank)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    for block in _blocks(file):
        yield from block.split(b"\n")[: -1 if block.endswith(b"\n") else None]


def _shown(line: bytes) -> bytes:
    """What a terminal shows of a line: a progress bar rewrites it after each carriage return."""
    return line.rstrip(b"\r\n").rpartition(b"\r")[2][:_MAX_LINE]


def _novelty() -> Callable[[bytes], bool]:
    """A function that tells whether few lines like this one were seen before; of lines about progress, since the last
    line with a word: whether training continued after it matters."""
    failures: Counter[int] = Counter()
    others: Counter[int] = Counter()

    def is_new(line: bytes) -> bool:
        shape = hash(line.translate(_DIGITS))
        seen = failures if any(word in line for word in WORDS) else others
        seen[shape] += 1
        if seen is failures and seen[shape] <= _MAX_ALIKE:
            others.clear()
        return seen[shape] <= _MAX_ALIKE

    return is_new


def _near_words(file: BinaryIO, size: int | None) -> Iterator[Numbered]:
    """Lines with a word, and those that follow them."""
    is_new = _novelty()
    number = kept = left = 0  # left: how many more lines belong to the last one with a word
    for block in _blocks(file):
        hits = {start for start, end in _lines_with_words(block) if is_new(_shown(block[start:end]))}
        at = 0
        for start in sorted({0, *hits} if left else hits):
            if start < at:
                continue  # shown already
            number += block.count(b"\n", at, start)
            at = start
            while at < len(block) and (left or at in hits):
                left = _AFTER if at in hits else left - 1
                end = block.find(b"\n", at) + 1 or len(block)
                number += 1
                kept += 1
                yield number, block[at:end]
                at = end
        number += block.count(b"\n", at)
        if kept > _MAX_KEPT and size is not None and file.tell() < size - SMALL:
            file.seek(size - SMALL)  # line numbers are approximate from here on
            kept = -_MAX_KEPT


def _lines_with_words(block: bytes) -> set[tuple[int, int]]:
    """Where these lines start and end."""
    found = set()
    for word in WORDS:
        at = block.find(word)
        while at >= 0:
            end = block.find(b"\n", at)
            end = len(block) if end < 0 else end
            found.add((block.rfind(b"\n", 0, at) + 1, end))
            at = block.find(word, end)
    return found


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """Blocks of whole lines, unless a line is longer than a few blocks."""
    rest = b""
    while block := file.read(_BLOCK):
        block = rest + block
        end = block.rfind(b"\n") + 1
        if not end and len(block) < _BLOCK * 4:
            rest = block
            continue
        end = end or len(block)
        block, rest = block[:end], block[end:]
        yield block
    if rest:
        yield rest


_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]")
_TIME = re.compile(r"\[?(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:?\s")
_PREFIXES = [re.compile(text) for text in _TEXTS["prefixes"]]
# Inside the text, where the writer names itself.
_NAMED = re.compile(_TEXTS["named"])
_NCCL = re.compile(r"(?:^|\s)(?P<node>[\w.-]+):(?P<pid>\d+):\d+ \[(?P<rank>\d+)\] ")
_LOGGER = re.compile(r"^[EWIFC]\d{4} \d\d:\d\d:\d\d")


@dataclass(frozen=True)
class LogLine:
    file: str
    number: int  # from 1
    text: str  # without prefixes
    rank: int | None = None
    node: str = ""
    pid: int | None = None


def parse(file: str, number: int, raw: str, rank: int | None = None) -> LogLine:
    """`rank`: that of the file, if each rank has its own."""
    text = _ANSI.sub("", raw).rstrip("\r\n").rpartition("\r")[2]  # a progress bar rewrites its line
    node, pid = "", None
    for _ in range(3):  # prefixes of several programs follow each other
        time = _TIME.match(text)
        found = next((match for prefix in _PREFIXES if (match := prefix.match(text))), None)
        if found is None and (time is None or _LOGGER.match(text)):
            break
        if found is None:
            text = text[time.end() :] if time else text
            continue
        values = found.groupdict()
        rank = int(values["rank"]) if values.get("rank") else rank
        node = values.get("node") or node
        pid = int(values["pid"]) if values.get("pid") else pid
        text = text[found.end() :]
    if nccl := _NCCL.search(text):
        rank = int(nccl["rank"]) if rank is None else rank
        node, pid = nccl["node"], int(nccl["pid"])
    elif named := _NAMED.search(text):
        rank = int(named["rank"] or named["first"] or named["equal"])
    return LogLine(file, number, text, rank, node, pid)


def rank_of_file(path: str) -> int | None:
    """The rank whose output a file holds, by its name: `rank_3.log`, `rank3/train.log`, `attempt_0/3/stderr.log`."""
    *_, folder, name = ["", *path.split("/")]
    found = _RANK_IN_NAME.search(name) or _RANK_FOLDER.fullmatch(folder)
    if found:
        return int(found[1])
    return int(folder) if folder.isdecimal() and name.startswith(("stderr", "stdout")) else None
