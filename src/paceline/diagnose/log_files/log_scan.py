"""Reads logs of any size, in bounded memory: of a large one, only the surroundings of lines that look like a failure.

A log of a gigabyte is mostly progress. Searching blocks of bytes for a few words is a hundred times faster than
matching each line, and every failure has one of these words in or near its lines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from paceline.diagnose.log_files.log_lines import LogLine, parse, rank_of_file

WORDS = (b"rror", b"raceback", b"illed", b"ailed", b"NCEL", b"ignal", b"imed out")
SMALL = 32 * 2**20  # bytes of a log of which every line is matched
_BLOCK = 2**18
_AFTER = 80  # lines that are kept after one with a word
_MAX_ALIKE = 300  # lines that differ in digits only
_MAX_LINE = 2000  # bytes of a line that are matched
_MAX_KEPT = 100_000  # lines; after them, only the end of the log is read
_DIGITS = bytes.maketrans(b"0123456789abcdef", b"0" * 16)
_LOG_NAME = re.compile(r"\.(?:log|txt|out|err|stderr|stdout)(?:\.\d+)?$|(?:^|[_-])(?:stderr|stdout|log|err|out)$")
_MAX_FILES = 4096

Numbered = tuple[int, bytes]


def log_files(path: Path) -> list[Path]:
    """The file itself, or the logs in a folder, those of low ranks first."""
    if not path.is_dir():
        return [path]
    found = [each for each in sorted(path.rglob("*")) if each.is_file() and _LOG_NAME.search(each.name)]
    return sorted(found[:_MAX_FILES], key=lambda each: (rank_of_file(str(each)) or 0, str(each)))


def read(file: BinaryIO, name: str, size: int | None) -> Iterator[LogLine]:
    """The lines that may tell of a failure. `size`: in bytes, or None if the end can't be sought."""
    rank = rank_of_file(name)
    lines = enumerate(file, 1) if size is not None and size <= SMALL else _near_words(file, size)
    for number, line in _different(lines):
        yield parse(name, number, line.decode("utf-8", "replace"), rank)


def _different(lines: Iterable[Numbered]) -> Iterator[Numbered]:
    """Without the many repetitions of a line that differ in their numbers only, such as progress."""
    is_new = _novelty()
    return ((number, line[:_MAX_LINE]) for number, line in lines if is_new(line))


def _novelty() -> Callable[[bytes], bool]:
    """A function that tells whether few lines like this one were seen before."""
    seen: Counter[int] = Counter()

    def is_new(line: bytes) -> bool:
        shape = hash(line[:_MAX_LINE].translate(_DIGITS))
        seen[shape] += 1
        return seen[shape] <= _MAX_ALIKE

    return is_new


def _near_words(file: BinaryIO, size: int | None) -> Iterator[Numbered]:
    """Lines with a word, and those that follow them."""
    is_new = _novelty()
    number = kept = left = 0  # left: how many more lines belong to the last one with a word
    for block in _blocks(file):
        hits = {
            start for start in _lines_with_words(block) if is_new(block[start : start + _MAX_LINE].split(b"\n", 1)[0])
        }
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


def _lines_with_words(block: bytes) -> set[int]:
    """Where these lines start."""
    found = set()
    for word in WORDS:
        at = block.find(word)
        while at >= 0:
            found.add(block.rfind(b"\n", 0, at) + 1)
            end = block.find(b"\n", at)
            at = block.find(word, end) if end >= 0 else -1
    return found


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """Blocks of whole lines, unless a line is longer than a block."""
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
