"""What `paceline doctor` prints."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from paceline.doctor.finding import ORDER, Finding, worst
from paceline.text import plural


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
