"""What failures look like in logs, whoever wrote them: the patterns of `log_patterns.toml` next to this file."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

Role = Literal["cause", "symptom", "waited", "consequence"]
ROLES: tuple[Role, ...] = get_args(Role)  # a match of the first is worth most


class LogSignature(NamedTuple):
    code: str
    role: Role
    pattern: re.Pattern[str]


@cache
def signatures() -> tuple[LogSignature, ...]:
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return tuple(
        LogSignature(code, table["role"], re.compile("|".join(table["patterns"])))
        for code, table in tomllib.loads(text).items()
    )


def match(text: str) -> LogSignature | None:
    """The signature of a line."""
    return next((signature for signature in signatures() if signature.pattern.search(text)), None)
