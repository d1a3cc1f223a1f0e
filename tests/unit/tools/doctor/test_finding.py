"""What a finding says."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from string import Formatter
from typing import Any

import pytest

from paceline.tools.doctor import finding
from paceline.tools.doctor.finding import graded

FOLDER = Path(finding.__file__).parent
ADVICE: dict[str, Any] = tomllib.loads((FOLDER / "advice.toml").read_text(encoding="utf-8"))


def test_what_is_ok_needs_no_advice_and_a_case_inherits_what_it_leaves_out() -> None:
    assert graded("no such check", "ok", "fine", host="a").to_json() == {
        "check": "no such check", "status": "ok", "what": "fine", "host": "a",
    }  # fmt: skip
    small, full = (graded("shared memory", "warn", "64 MiB", case) for case in ("small", "full"))
    assert small.why == full.why != ""
    assert small.fix != full.fix
    assert "{" not in graded("port", "fail", "taken", "several hosts", other=29600).fix


def graded_calls() -> list[ast.Call]:
    nodes = [node for path in FOLDER.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    found = [each for each in nodes if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)]
    return [each for each in found if isinstance(each.func, ast.Name) and each.func.id == "graded"]


def texts(table: dict[str, Any]) -> str:
    return "".join(texts(value) if isinstance(value, dict) else value for value in table.values())


@pytest.mark.parametrize("call", graded_calls(), ids=lambda call: f"{ast.unparse(call)[:60]}")
def test_every_check_has_advice_with_the_values_that_it_fills_in(call: ast.Call) -> None:
    check = call.args[0].value if isinstance(call.args[0], ast.Constant) else None
    if check is None:  # chosen by the caller
        return
    assert check in ADVICE
    cases = [each.value for part in call.args[3:] for each in ast.walk(part) if isinstance(each, ast.Constant)]
    assert all(case in ADVICE[check] for case in cases if case)
    if len(call.args) < 4 or isinstance(call.args[3], ast.Constant):
        own = {name: text for name, text in ADVICE[check].items() if isinstance(text, str)}
        used = own | (ADVICE[check][cases[0]] if cases else {})
        wanted = {name for _, name, _, _ in Formatter().parse(texts(used)) if name}
        assert wanted <= {keyword.arg for keyword in call.keywords}
