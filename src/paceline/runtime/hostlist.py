"""Host lists and counts in the compact notation of SLURM.

    node[01-03,7],gpu-a   ->  node01 node02 node03 node7 gpu-a
    4(x2),1               ->  4 4 1

The text comes from the environment, so it is parsed strictly: a name consists of letters, digits, dots, dashes and
underscores, and a short text can't expand to millions of hosts.
"""

from __future__ import annotations

import math
import re
from itertools import product

from paceline.errors import WorldError

MAX_HOSTS = 65_536  # as in SLURM

_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")  # text and brackets up to the next comma outside of brackets
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")


def expand(text: str) -> list[str]:
    """The host names in a list, in order."""
    names: list[str] = []
    for item in _items(text):
        names += _expand_item(item, text)
        _check_size(len(names), text)
    return names


def expand_counts(text: str) -> list[int]:
    """One number per host, as in SLURM_TASKS_PER_NODE: `4(x2),1` is 4, 4, 1."""
    counts: list[int] = []
    for item in text.strip().split(","):
        found = _COUNT.fullmatch(item)
        if found is None:
            raise _invalid(text, f"invalid count {item!r}")
        times = int(found[2] or 1)
        _check_size(len(counts) + times, text)
        counts += [int(found[1])] * times
    return counts


def _items(text: str) -> list[str]:
    """Split the text at commas outside of brackets."""
    text = text.strip()
    items = _ITEM.findall(text)
    if not items or ",".join(items) != text:
        raise _invalid(text, "unexpected comma or bracket")
    return items


def _expand_item(item: str, text: str) -> list[str]:
    """`rack[1-2]n[1-3]`: the product of its parts."""
    parts = [_expand_ranges(found[1], text) if found[2] is None else [found[2]] for found in _PART.finditer(item)]
    _check_size(math.prod(map(len, parts)), text)
    names = ["".join(chosen) for chosen in product(*parts)]
    if not _NAME.fullmatch(names[0]) or len(names[-1]) > 253:
        raise _invalid(text, f"invalid host name {names[0]!r}")
    return names


def _expand_ranges(ranges: str, text: str) -> list[str]:
    """`01-03,7` is 01, 02, 03, 7: all numbers have the width of the first."""
    numbers: list[str] = []
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise _invalid(text, f"invalid range {part!r}")
        first, last = int(found[1]), int(found[2] or found[1])
        if not first <= last < first + MAX_HOSTS:
            raise _invalid(text, f"range {part} is descending or too long")
        numbers += [f"{number:0{len(found[1])}}" for number in range(first, last + 1)]
        _check_size(len(numbers), text)
    return numbers


def _check_size(hosts: int, text: str) -> None:
    if hosts > MAX_HOSTS:
        raise _invalid(text, f"more than {MAX_HOSTS:,} hosts")


def _invalid(text: str, why: str) -> WorldError:
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return WorldError(
        "bad-environment",
        f"Invalid SLURM host list: {shown!r}.",
        why=why,
        fix="expected the form node[01-03,7],gpu-a; unset variables of SLURM that were exported by hand",
    )
