"""What a check found, and what `paceline doctor` prints of it."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from paceline.text import plural

Status = Literal["ok", "warn", "fail"]
ORDER: tuple[Status, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True)
class Finding:
    """`warn`: training works, but slower or less safely than it could. `fail`: it will not start, or will break."""

    check: str  # what was looked at, in a word or two: "shared memory"
    status: Status
    what: str  # what was seen
    why: str = ""  # what follows from it
    fix: str = ""  # the command or setting that changes it
    host: str = ""  # if several were checked

    def to_json(self) -> dict[str, str]:
        return {name: value for name, value in asdict(self).items() if value}


def graded(check: str, status: Status, what: str, case: str = "", *, host: str = "", **values: object) -> Finding:
    """With the reason and the fix that advice.toml has for the check, or for a case of it. What is ok needs neither."""
    if status == "ok":
        return Finding(check, status, what, host=host)
    texts = _advice()[check] | (_advice()[check][case] if case else {})
    why, fix = (texts.get(each, "").format(**values) for each in ("why", "fix"))
    return Finding(check, status, what, why, fix, host)


@cache
def _advice() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("advice.toml").read_text(encoding="utf-8"))


def level_of(value: float, fail: float, warn: float) -> Status:
    """Of a number that fails below `fail`, and is a warning below `warn`."""
    return "fail" if value < fail else "warn" if value < warn else "ok"


def worst(findings: Iterable[Finding]) -> Status:
    return max((finding.status for finding in findings), key=ORDER.index, default="ok")


def describe(findings: Sequence[Finding]) -> str:
    """What is wrong comes last, next to the prompt. Of several hosts, only the number of passed checks is shown."""
    passed = Counter(each.host for each in findings if each.host and each.status == "ok")
    several = len({each.host for each in findings if each.host}) > 1
    lines = [f"ok    {host}: {plural(number, 'check')} passed" for host, number in passed.items() if several]
    for each in sorted(findings, key=lambda each: ORDER.index(each.status)):
        if several and each.host and each.status == "ok":
            continue
        where = f"{each.host}: " if several and each.host else ""
        lines.append(f"{each.status:<4}  {where}{each.check}: {each.what}")
        lines += [f"      {name}: {text}" for name, text in (("why", each.why), ("fix", each.fix)) if text]
    return "\n".join([*lines, "", summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    numbers = {status: sum(each.status == status for each in findings) for status in ORDER}
    if numbers["fail"]:
        found = f"{plural(numbers['fail'], 'problem')} and {plural(numbers['warn'], 'warning')}"
        return f"{found}: training is likely to fail."
    if numbers["warn"]:
        return f"{plural(numbers['warn'], 'warning')}: training works, but see above."
    return f"{plural(numbers['ok'], 'check')} passed."


def to_json(findings: Sequence[Finding], **more: Any) -> str:
    return json.dumps({"status": worst(findings), "findings": [each.to_json() for each in findings], **more}, indent=1)
