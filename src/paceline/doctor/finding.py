"""What a check found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

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


def graded(check: str, status: Status, what: str, why: str, fix: str) -> Finding:
    """What is ok needs neither a reason nor a fix."""
    return Finding(check, status, what) if status == "ok" else Finding(check, status, what, why, fix)


def worst(findings: Iterable[Finding]) -> Status:
    return max((finding.status for finding in findings), key=ORDER.index, default="ok")
