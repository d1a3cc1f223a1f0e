"""Which words and names are known to be harmless, and which of them announce a secret: see redact.py.

Known are the words of paceline's own source and pages, a vocabulary of some five thousand that nobody has to maintain.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

_TEXT = (".py", ".md", ".toml", ".yaml")
_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_QUANTITIES = frozenset(_TABLES["quantities"].split())
_SECRET, _DOUBTFUL = (re.compile("|".join(_TABLES[kind].split())) for kind in ("secret", "doubtful"))
_FLAG = {"pin_memory", "pass", "passed", "passes"}  # the words in other senses: `pre-flight passed`, `forward pass`
_PARTS = re.compile(r"[^\W_]+")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@cache
def _source() -> str:
    files = (path for path in Path(__file__).parents[2].rglob("*") if path.suffix in _TEXT)
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)


@cache
def _known() -> frozenset[str]:
    """The words of paceline's source and pages, and short names with digits such as fp16. Read only when needed."""
    text = _source()
    words = {word.lower() for word in _WORDS.findall(text)}
    mixed = {part.lower() for part in re.findall(r"[^\W_]{2,10}", text) if not part.isalpha() and not part.isdigit()}
    return frozenset(words | mixed | {name.lower() for name in sys.stdlib_module_names})


@lru_cache(maxsize=1 << 16)
def is_known(chunk: str) -> bool:
    """Whether all words of a name are known, and its numbers are short."""
    known, before = _known(), ""
    parts = _PARTS.findall(chunk)
    if parts and all(map(str.isdigit, parts)):  # neither a number nor a version: an address, for example
        return False
    for part in parts:
        lower = part.lower()
        if part.isdigit():
            if len(part) > 3 and before not in _QUANTITIES:
                return False
        elif lower not in known or (len(part) == 1 and len(parts) > 2):
            letters = part.rstrip("0123456789")
            words = _WORDS.findall(letters)
            if "".join(words) != letters or any(word.lower() not in known or len(word) < 2 for word in words):
                return False
            if letters != part and letters.lower() not in _QUANTITIES:
                return False
        before = lower
    return bool(parts) or len(chunk) < 4 or len(set(chunk)) == 1


@lru_cache(maxsize=1 << 14)
def kind_of(name: str) -> str:
    """What a name says about its value: `secret`, `doubtful`, or nothing."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if name.lower() in _FLAG:
        return ""
    if any(map(_SECRET.fullmatch, words)):
        return "secret"
    return "doubtful" if any(map(_DOUBTFUL.fullmatch, words)) else ""


@lru_cache(maxsize=1 << 14)
def has_quantity(name: str) -> bool:
    return any(word.lower() in _QUANTITIES for word in _WORDS.findall(name))


@cache
def variables() -> frozenset[str]:
    """The environment variables that paceline's source mentions."""
    return frozenset(re.findall(r"\b(?:[A-Z][A-Z0-9]*_[A-Z0-9_]+|RANK|PATH|HOME|USER)\b", _source()))


def _roots() -> Iterator[Path]:
    yield from {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")}
    yield Path(__file__).parents[3]


@lru_cache(maxsize=4096)
def installed(path: str) -> str:
    """The path of an installed file below its folder of packages, wherever that was on the machine of the run."""
    parts = re.split(r"/(?:site-packages|dist-packages|src|python3\.\d+)(?=/)", path)
    inner = parts[-1].lstrip("/")
    if (len(parts) == 1 and path.startswith("/")) or ".." in inner or not inner.endswith(".py"):
        return ""
    return inner if any((root / inner).is_file() for root in _roots()) else ""


@lru_cache(maxsize=4096)
def defines(path: str, name: str) -> bool:
    inner = installed(path)
    files = (root / inner for root in _roots() if inner and name.isidentifier() and (root / inner).is_file())
    return any(f"def {name}(" in file.read_text(encoding="utf-8", errors="replace") for file in files)
