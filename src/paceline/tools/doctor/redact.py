"""Lets into a bug report only what is known to be harmless, since no list of patterns knows every secret.

    redactor = Redactor()
    redactor.log("my password is …\\nstep 120 | loss 2.3\\nKeyError: '…'\\n")
    # [… 1 line left out …]\\nstep 120 | loss 2.3\\nKeyError: '<#1>'\\n

What is known is in known_words.py: the words of paceline's own source, which describe training and quote messages of
torch, NCCL and Python, files of installed packages, and numbers of at most three digits, or beside a quantity (`step
12000`). Anything else becomes `<#1>`, `<#2>`, …: the same number for the same text, so that a reader still sees what
belongs together.

Lines of a log remain if all of it is known. Unknown parts are replaced only in lines of a known format: stack frames,
exceptions, warnings, and lines of NCCL and torch. What follows the name of a secret goes, whatever it is. The time is
linear in the text.
"""

from __future__ import annotations

import re
import socket
import sys
from bisect import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.diagnose.log_files import log_events
from paceline.tools.doctor.known_words import defines, has_quantity, installed, is_known, kind_of, variables

_UNITS = {"s", "ms", "us", "µs", "ns", "h", "m", "k", "M", "G", "T", "x", "B", "KB", "MB", "GB", "g", "%", "°C", "W"}

_COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_BREAK = re.compile(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_CHUNK = re.compile(r"""[^\s"'`,;:()\[\]{}<>=|│╭╮╰╯─]+""")
_SEPARATOR = re.compile(r"""["'`)\]}]*\s*(?:=>|->|[:=])""")
_SOURCE = re.compile(r"\.(?:py|cpp|cu|h|hpp)$")  # train.py:1200
_N = r"\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+"
_NUMBER = re.compile(rf"[+~-]?(?:{_N})(?:[/x×*](?:{_N}))*([%°µA-Za-z/]*)")
_LONG = re.compile(r"\d{4}")
_GROUPS = re.compile(r"(?<![^\W_])\d++(?:[ -]\d++)++")  # of a phone number or a code: 123 456
_DATE = re.compile(r"20\d\d-[01]\d-[0-3]\d(?:T[0-2]\d)?|[0-5]\d(?:\.\d+)?(?:Z|[+-]\d\d)|[WEIF][01]\d[0-3]\d")
_VERSION = re.compile(
    r"v?\d{1,4}(?:\.\d{1,4}){1,2}(?:\.?(?:rc|a|b|dev|post)\d{1,8})?(?:\+(?:cpu|cu\d{3}|rocm[\d.]{1,6}))?"
)
_SYSTEM = re.compile(r"(?:Linux|Darwin|macOS)-\d{1,2}\.\d{1,3}(?:\.\d{1,3})?")
_URL = re.compile(
    r"([A-Za-z][A-Za-z0-9+.-]{0,20}):/{2,3}((?:localhost|127\.0\.0\.1)(?![\w.@-])[^\s\"'`,<>)\]}@]*+(?!@))?"
    r"[^\s\"'`<>)\]}]*"
)
_IN_URL = "\ue000"  # for private use, so it is in no other text
_URL_NUMBER = re.compile(f"{_IN_URL}(\\d+){_IN_URL}")
_SYSTEM_PATH = re.compile(r"/(?:dev|proc|sys|etc|usr|tmp)/")
_PATH = re.compile(r"(?:~|\.{1,2})?(?:/[\w.@+~-]+)+")
_FRAME = re.compile(r"""(.{0,40}?)(File ")([^"\n]{1,500})(", line \d{1,7})(?:(,? in )(\S{1,200}))?\s*""")
_PLACE = re.compile(r"""(\s*(?:at: )?)([\w./~-]{1,300})(:\d{1,7}, in )([^\s:]{1,200})""")
_OWN = re.compile(r"[<\w.-]*[\w>]")
_FORMAT = re.compile(
    r"\s*(?:\[?(?:default\d*|rank ?\d+)\]?:? *)?\[?(?:"
    r"(?:warning|error|fix|why|hint|note|cause|failed|check|WARNING|ERROR)\b ?[:\[]|\[[a-z]+\.[a-z-]+\] |"
    r"[\w.]{0,80}?(?:Error|Exception|Warning|Interrupt|Exit|StopIteration)\b ?:|[WEIF][01]\d[0-3]\d |"
    r"[\w.-]{1,80}:\d+:\d+ \[\d*\] ?NCCL |srun: |slurmstepd: |[\w./<>-]{1,300}:\d+: \w+Warning: |rank \d+ )"
)
_YAML = re.compile(r"(\s*(?:- )?)([\w.-]{1,80}|\"[^\"]{1,80}\")( ?:)(?: +([^#\n]*?))?( +#.*)?$")
_ITEM = re.compile(r"(\s*- )([^#\n]*?)( +#.*)?$")
_BUILT_IN = {"<module>", "<lambda>", "<listcomp>", "<genexpr>", "<dictcomp>", "<string>", "<stdin>"}
_NAME = re.compile(r"-{0,2}[A-Za-z][\w.-]*")
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")


class Redactor:
    """Replaces what is not known to be harmless, and counts what it replaced since `take_counts`."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._values = 0
        self._interfaces = {name for _, name in socket.if_nameindex()}

    def take_counts(self) -> Counter[str]:
        """The number of `lines` and `values` that were left out."""
        counts, self._counts = self._counts, Counter()
        values, self._values = self._values, 0
        return counts + Counter(values=values)

    def leave_out(self, kind: str, number: int) -> None:
        self._counts[kind] += number

    def remove(self, text: str) -> str:
        """The placeholder of a text."""
        self._values += 1
        return f"<#{self._numbers.setdefault(text, len(self._numbers) + 1)}>"

    def log(self, text: str) -> str:
        """The lines of a log that are known or of a known format."""
        kept, left_out = list[str](), 0
        for line in (*_BREAK.split(_COLOR.sub("", text)), None):
            found = None if line is None else self._line(line)
            if found is None and line is not None:
                left_out += 1
                continue
            if left_out:
                self._counts["lines"] += left_out
                kept.append(f"[… {left_out} line{'s' * (left_out > 1)} left out …]")
                left_out = 0
            kept += [] if found is None else [found]
        return "\n".join(kept)

    def _line(self, line: str) -> str | None:
        if frame := _FRAME.fullmatch(line):
            before, file, path, number, where, function = frame.groups()
            if is_known(before) or not before.strip():
                function = f"{where}{self._function(path, function)}" if where else ""
                return f"{before}{file}{self._file(path)}{number}{function}"
        if place := _PLACE.match(line):
            return place[1] + self._file(place[2]) + place[3] + self._function(place[2], place[4])
        if _FORMAT.match(line):
            return self.message(line)
        values, text = self._values, self.message(line, strict=True)
        if self._values == values:
            return text
        self._values = values
        return self.message(line) if len(line) < 1000 and log_events.match(line) else None

    def message(self, text: str, *, strict: bool = False, about: str = "") -> str:
        """One line with placeholders. `strict`: a long number remains only beside a quantity, not wherever all words
        are known and one of them is a quantity. `about`: what the text is about, if something before it says so."""
        text = _URL.sub(self._url, text.replace(_IN_URL, "")) if "://" in text else text.replace(_IN_URL, "")
        spans = [(found.start(), found.end()) for found in _CHUNK.finditer(text)]
        codes = (each for each in _GROUPS.finditer(text) if sum(map(str.isdigit, each[0])) > 3)
        groups = [code.span() for code in codes if not _DATE.match(code[0])]
        chunks = [text[slice(*span)] for span in spans]
        plain = (
            not strict
            and all(map(self._is_word, chunks))
            and any(has_quantity(chunk) for chunk in chunks if chunk.isalpha())
        )
        near = [about, *chunks, ""]
        kept = [
            "" if groups and _overlaps(groups, span) else self._chunk(chunk, near[at], near[at + 2], plain=plain)
            for at, (chunk, span) in enumerate(zip(chunks, spans, strict=True))
        ]
        _hide_between(kept, text, spans)
        parts, done, hidden = list[str](), 0, False
        for chunk, shown, (start, end) in zip(chunks, kept, spans, strict=True):
            shown = "" if hidden and text[start - 1 : start].isspace() else shown
            parts += [text[done:start], shown or self.remove(chunk)]
            done = end
            separator = _SEPARATOR.match(text, end)
            kind = kind_of(chunk) or ("" if shown else "unknown")
            if kind == "secret" or (kind and separator and not (shown and _FORMAT.fullmatch(chunk + ":"))):
                parts += [text[end : separator.end() if separator else end], self._rest(text, separator, end)]
                done = len(text)
                break
            hidden = kind != "" and chunk[0] == "-" and _OPTION.fullmatch(chunk) is not None
        return _URL_NUMBER.sub(r"://<#\1>", "".join([*parts, text[done:]])).replace(_IN_URL, "://localhost")

    def _rest(self, text: str, separator: re.Match[str] | None, end: int) -> str:
        rest = text[separator.end() if separator else end :].strip()
        return f" {self.remove(rest)}" if any(map(str.isalnum, rest)) or len(rest) > 3 else rest

    def _is_word(self, chunk: str) -> bool:
        return (is_known(chunk) and not kind_of(chunk)) or _NUMBER.fullmatch(chunk) is not None

    def _chunk(self, chunk: str, before: str, after: str, *, plain: bool) -> str:
        """The chunk, or what may remain of it, or nothing."""
        if _IN_URL in chunk:
            return chunk
        bare = chunk.rstrip(".!?…")
        if bare == "127.0.0.1":
            return chunk
        if number := _NUMBER.fullmatch(bare):
            unit = number[1]
            if unit and unit not in _UNITS and (len(unit) < 3 or not is_known(unit.lstrip("kMGT"))):
                return ""
            is_short = not _LONG.search(re.sub(r"\.\d+", "", bare))
            near = " ".join(filter(is_known, (unit, before, after)))
            return chunk if is_short or plain or has_quantity(near) or _SOURCE.search(before) else ""
        if len(bare) > 1 and bare[0] in "/~":
            return bare if _SYSTEM_PATH.match(bare) and is_known(bare) else self._file(bare)
        if _DATE.fullmatch(bare) or _VERSION.fullmatch(bare) or bare in self._interfaces or is_known(bare):
            return chunk
        if system := _SYSTEM.match(bare):
            return system[0]
        return self._file(bare) if _PATH.fullmatch(bare) and "." in bare.rpartition("/")[2] else ""

    def _url(self, url: re.Match[str]) -> str:
        scheme = url[1] if is_known(url[1]) else self.remove(url[1])
        return scheme + _IN_URL + ("" if url[2] else self.remove(url[0])[2:-1] + _IN_URL)

    def _file(self, path: str) -> str:
        """Relative to the installed packages, or without its folder."""
        if known := installed(path):
            return known
        folder, slash, name = path.rpartition("/")
        stem, dot, suffix = name.rpartition(".")
        if path in _BUILT_IN or (path.startswith("<frozen ") and is_known(path)):
            return path
        if not is_known(name) or kind_of(name) == "secret":
            name = f"{self.remove(name)}{dot}{suffix}" if stem and suffix in ("py", "cpp", "so", "log", "h") else ""
        if not name:
            return self.remove(path)
        return f"{self.remove(folder)}/{name}" if slash else name

    def _function(self, path: str, name: str) -> str:
        is_own = name in _BUILT_IN or (is_known(name) and _OWN.fullmatch(name) is not None)
        return name if is_own or defines(path, name.rpartition(".")[2]) else self.remove(name)

    def values(self, value: Any, key: str = "", *, trusted: bool = True) -> Any:
        """Parsed JSON: numbers by the name of their key, texts like logs, and nothing below the name of a secret."""
        kind = kind_of(key)
        if value is None or isinstance(value, bool):
            return value
        if kind == "secret":
            return self.remove(repr(value))
        if isinstance(value, dict):
            known = {name: is_known(name) and len(name) < 80 for name in map(str, value)}
            return {
                name if known[name] else self.remove(name): self.values(
                    inner, key if name == "value" else name, trusted=trusted and known[name]
                )
                for name, inner in zip(known, value.values(), strict=True)
            }
        if isinstance(value, list):
            if any(isinstance(each, str) and each.startswith("-") for each in value):
                return self._arguments(value)
            return [self.values(each, key, trusted=trusted) for each in value]
        if isinstance(value, str):
            return self._string(value, key if trusted else "", is_strict=not trusted or kind != "")
        is_short = isinstance(value, int) and abs(value) < 1000 and (trusted or is_known(key))
        is_fraction = isinstance(value, float) and abs(value) < 1000 and trusted
        return value if is_short or is_fraction or (not kind and has_quantity(key)) else self.remove(repr(value))

    def _string(self, value: str, key: str, *, is_strict: bool) -> str:
        if _BREAK.search(value):
            return self.remove(value) if is_strict else self.log(value)
        values, text = self._values, self.message(value, strict=True, about=key)
        if not is_strict or self._values == values:
            return text
        self._values = values
        return self.remove(value)

    def _arguments(self, values: Sequence[Any]) -> list[Any]:
        """Options by name, and values after names that are known."""
        found, option = list[Any](), ""
        for each in values:
            name, equals, value = each.partition("=") if isinstance(each, str) else ("", "", "")
            is_name = _NAME.fullmatch(name) is not None and (equals != "" or name[0] == "-")
            if is_name:
                option = name if is_known(name) and not kind_of(name) else "password"
                shown = name if is_known(name) else self.remove(name)
                found.append(shown + equals + (str(self._value(value, option)) if equals else ""))
            else:
                found.append(self._value(each, option))
            option = option if is_name and not equals else ""
        return found

    def _value(self, value: Any, name: str) -> Any:
        """All of it or nothing, like a setting or an argument."""
        if value is None or isinstance(value, bool):
            return value
        return self.remove(repr(value)) if kind_of(name) else self._string(str(value), name, is_strict=True)

    def settings(self, text: str) -> str:
        """The lines of a recipe: names that are known, with values that are; nothing below other names."""
        kept, left_out, below = list[str](), 0, sys.maxsize  # below: the indentation of a name that is not known
        for line in _BREAK.split(text):
            indent = len(line) - len(line.lstrip())
            if line.strip() and indent > below:
                left_out += 1
                continue
            found = _YAML.match(line)
            item = None if found else _ITEM.match(line)
            below = below if item and indent >= below else sys.maxsize
            if found:
                lead, name, colon, value, comment = found.groups()
                name, kind = name.strip('"'), kind_of(name)
                shown = name if is_known(name) else self.remove(name)
                kept.append(f"{lead}{shown}{colon}{self._setting(value, name)}{self._comment(comment)}")
                if not is_known(name) or kind == "secret":
                    below = indent + len(lead.lstrip())
            elif item and below == sys.maxsize:
                kept.append(item[1] + self._setting(item[2], "").strip() + self._comment(item[3]))
            elif not line.strip():
                kept.append("")
            else:
                left_out += 1
        self._counts["lines"] += left_out
        return "\n".join([*kept, *([f"# {left_out} lines left out"] if left_out else [])])

    def _setting(self, value: str | None, name: str) -> str:
        if not value or value in ("null", "true", "false", "|", ">", "[]", "{}", "|-", ">-"):
            return f" {value}" if value else ""
        return f" {self._value(value, name if is_known(name) else 'password')}"

    def _comment(self, comment: str | None) -> str:
        if not comment:
            return ""
        return f"{comment[: comment.index('#')]}# {self._string(comment.strip(' #'), '', is_strict=True)}"

    def variables(self, environment: Mapping[str, str]) -> dict[str, str | int]:
        """Variables that paceline knows by name, with values that are known. Others are only counted."""
        named = sorted(name for name in environment if name in variables() and kind_of(name) != "secret")
        self._counts["values"] += len(environment) - len(named)
        return {name: self._value(environment[name], name) for name in named} | {
            "others": len(environment) - len(named)
        }

    def file_name(self, name: str) -> str:
        """Of a file or folder, with nothing in it that a file system or a terminal could misunderstand."""
        is_plain = is_known(name) and re.fullmatch(r"[\w.-]{1,80}", name, re.ASCII)
        return name if is_plain else f"removed-{self.remove(name)[2:-1]}"


def _overlaps(groups: Sequence[tuple[int, int]], span: tuple[int, int]) -> bool:
    """Whether a span overlaps one of these, which are sorted."""
    at = bisect(groups, (span[0], sys.maxsize))
    return any(start < span[1] and span[0] < end for start, end in groups[max(0, at - 1) : at + 1])


def _hide_between(kept: list[str], text: str, spans: Sequence[tuple[int, int]]) -> None:
    """Known words between unknown ones: a passphrase may contain some."""
    last, joined = -1, True
    for at, shown in enumerate(kept):
        between = text[spans[at - 1][1] : spans[at][0]] if at else ""
        joined = joined and at > 0 and (between.isspace() or not re.search(r"\s", between))
        if not shown or "<#" in shown:  # (the rest of a path)
            if joined and last >= 0 and at - last < 5:
                kept[last + 1 : at] = [""] * (at - last - 1)
            last, joined = at, True
