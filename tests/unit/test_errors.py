from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TypeGuard

import pytest

from paceline import errors
from paceline.errors import CheckpointError, LaunchError, PacelineError

FAMILIES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PacelineError)]
NAMES = {kind.__name__: kind.family for kind in FAMILIES}


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind is not PacelineError])
def test_an_error_is_the_same_in_another_process(kind: type[PacelineError]) -> None:
    error = kind("some-name", "What was seen.", why="why", fix="fix")
    again = PacelineError.from_dict(json.loads(json.dumps(error.to_dict())))
    assert type(again) is kind
    assert (str(again), again.code) == (str(error), error.code)


def test_a_family_of_a_newer_version_is_still_an_error() -> None:
    values = CheckpointError("some-name", "What was seen.").to_dict() | {"family": "unheard-of"}
    again = PacelineError.from_dict(values)
    assert type(again) is LaunchError and again.what == "What was seen."


def test_advice_is_about_codes_that_exist_and_does_not_repeat_what_is_said_where_they_are_raised() -> None:
    """An entry that no error reads would be edited in vain."""
    source = Path(errors.__file__).parent
    calls = [node for path in source.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())) if is_error(node)]
    advice = tomllib.loads((source / "errors.toml").read_text())
    for family, names in advice.items():
        for name, texts in names.items():
            given = [{each.arg for each in call.keywords} for call in calls if call_code(call) == (family, name)]
            assert given, f"{family}.{name} is not raised"
            assert {*texts} <= {"why", "fix"}
            assert not {*texts} & set.intersection(*given), f"{family}.{name} says it where it is raised"


def is_error(node: ast.AST) -> TypeGuard[ast.Call]:
    name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    return name in NAMES and isinstance(node, ast.Call) and bool(node.args)


def call_code(call: ast.Call) -> tuple[str, object]:
    name = ast.unparse(call.func).rpartition(".")[2]
    return NAMES[name], getattr(call.args[0], "value", None)


@pytest.mark.parametrize("before", ["", "resource.setrlimit(resource.RLIMIT_NOFILE, (1, 1)); "])
def test_an_error_is_told_in_any_locale_and_without_a_free_descriptor(before: str) -> None:
    code = f"import resource; from paceline import errors; {before}print(errors.CheckpointError('no-ema', 'None.'))"
    variables = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("[checkpoint.no-ema] None."), done.stderr
    assert ("fix: " in done.stdout) is not bool(before)
