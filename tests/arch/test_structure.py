"""The shape of the code, held by tests: small pieces, no surprises. import-linter (in `make lint`) holds the rooms."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import paceline
from paceline import errors
from paceline.diagnose import catalog
from paceline.plan.passes import INCOMPATIBLE

SOURCE = Path(paceline.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
FAMILIES = {kind.__name__: kind.family for kind in (errors.PacelineError, *errors.PacelineError.__subclasses__())}


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            yield node


def test_no_file_is_over_400_lines() -> None:
    assert len(FILES) > 50
    assert [str(path) for path in FILES if len(path.read_text().splitlines()) > 400] == []


def docstring_lines(function: ast.FunctionDef) -> int:
    """Of a public name it is a page."""
    first = function.body[0]
    return (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(function) else 0


def test_no_function_is_over_60_lines() -> None:
    long = [
        f"{path}:{function.name}"
        for path in FILES
        for function in functions(path)
        if (function.end_lineno or 0) - function.lineno + 1 - docstring_lines(function) > 60
    ]
    assert long == []


def test_every_module_opens_with_a_docstring() -> None:
    assert [
        str(path) for path in FILES if path.read_text() and not ast.get_docstring(ast.parse(path.read_text()))
    ] == []


def test_inner_packages_export_nothing() -> None:
    """Re-exports are how import cycles begin; `testing` is a public surface of its own."""
    inner = [path for path in SOURCE.glob("*/__init__.py") if path.parent.name != "testing"]
    assert [str(path) for path in inner if path.read_text().strip()] == []


def test_nothing_is_read_with_pickle_or_run_through_a_shell() -> None:
    banned = ("pickle.load", "torch.load(", "weights_only=False", "yaml.load(", "shell=True", "os.system(")
    found = {f"{path.name}: {word}" for path in FILES for word in banned if word in path.read_text()}
    assert found == {"external.py: torch.load("}  # files from elsewhere
    brought = next(path for path in FILES if path.name == "external.py").read_text()
    assert brought.count("torch.load(") == brought.count("weights_only=True")


def test_rank_variables_are_spelled_in_one_file() -> None:
    """torchrun's for a rank, and all of our own."""
    name = re.compile(r"(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|TORCHELASTIC_RESTART_COUNT|PACELINE_[A-Z_]+")
    users = {
        path.relative_to(SOURCE).as_posix()
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and name.fullmatch(node.value)
    }
    assert users == {"runtime/environment.py"}


def families_of(call: ast.expr) -> list[str]:
    """Which families an expression that is called makes errors of; the registry makes those of all its users."""
    if isinstance(call, ast.Name) and call.id in FAMILIES:
        return [FAMILIES[call.id]]
    return ["data", "model", "train"] if isinstance(call, ast.Attribute) and call.attr == "_error" else []


def used_codes() -> set[str]:
    found = set()
    calls = [node for path in FILES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    for node in calls:
        for family in families_of(node.func) if node.args else []:
            names = [part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)]
            found |= {f"{family}.{name}" for name in names if isinstance(name, str) and name.islower()}
    return found | {f"layout.{refused.code}" for refused in INCOMPATIBLE}


def test_every_error_code_has_a_page_and_every_page_a_code() -> None:
    codes = used_codes() - {"config.type", "config.extra_forbidden"}
    assert len(codes) > 40
    assert codes == set(catalog.own_pages())


def test_importing_paceline_imports_neither_torch_nor_pydantic() -> None:
    code = "import sys, paceline; print(sorted({'torch', 'numpy', 'pydantic', 'rich', 'typer'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_help_and_config_do_not_import_torch(tmp_path: Path) -> None:
    """A torch that can't be imported stands in the way: whoever needs it fails."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    commands = "--help", "train --help", "config show", "config schema", "explain data.empty", "ls"
    code = (
        "import sys\n"
        "from paceline.__main__ import main\n"
        f"for command in {commands}:\n"
        "    sys.argv = ['paceline', *command.split()]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code, (command, end.code)\n"
        "    print(f'\\n{command} has ended')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{SOURCE.parent}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [command for command in commands if f"\n{command} has ended\n" not in done.stdout] == []


def test_only_the_agent_of_a_launcher_imports_torch(tmp_path: Path) -> None:
    """Elsewhere torch waits until it is needed: front ends and `paceline launch --help` start without it."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    modules = [".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) for path in FILES]
    launcher = [name for name in modules if name.startswith("paceline.launcher.") and "__init__" not in name]
    code = (
        "import importlib\n"
        f"for name in {launcher}:\n"
        "    try: importlib.import_module(name)\n"
        "    except ImportError: print(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{SOURCE.parent}"},
    )  # fmt: skip
    assert done.stdout.split() == ["paceline.launcher.local.agent"]


def test_every_public_name_can_be_loaded() -> None:
    assert [name for name in paceline.__all__ if getattr(paceline, name) is None] == []
    assert set(paceline.__all__) <= set(dir(paceline))
