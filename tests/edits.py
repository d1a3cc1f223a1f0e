"""Changes to the library as lists of edits, applied to a scratch copy in which the result is then run.

An edit is one insertion of text into one file, next to what is there already: a row of a table, a member of a class, a
function. `tests/arch/test_edits.py` lists the changes and how many edits each of them may take.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import runpy
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent, indent

import paceline

SOURCE = Path(paceline.__file__).parent


@dataclass(frozen=True)
class Edit:
    """Insert `text` into the file `path`, at its end; or `into` what is defined there under that name at the top level,
    or inside a function (`function.name`).

    A class gets it as its last member, a tuple, list, set or dict as its last item, and a function as its first
    statements.
    """

    path: str
    text: str
    into: str | None = None


@dataclass(frozen=True)
class Change:
    """`use` is a script that uses what was added, and fails if that does not work."""

    name: str
    edits: tuple[Edit, ...]
    use: str


def copy_source(folder: Path) -> Path:
    """A scratch copy of the source, for any number of changes; the folder for PYTHONPATH."""
    copy = folder / "src"
    shutil.copytree(SOURCE, copy / SOURCE.name)  # with compiled files, as modification times are kept
    return copy


@contextmanager
def applied(change: Change, copy: Path) -> Iterator[None]:
    """The change is in the copy, and then no longer: the files are put back with their times, and so their compiled
    files, which nothing that runs meanwhile overwrites, stay valid."""
    kept: dict[Path, Path] = {}
    paths = [copy / SOURCE.name / edit.path for edit in change.edits]
    try:
        for path in {path for path in paths if path.exists()}:
            kept[path] = path.rename(path.with_name(f"{path.name}.kept"))
            shutil.copyfile(kept[path], path)
        for path, edit in zip(paths, change.edits, strict=True):
            path.write_text(insert(path.read_text() if path.exists() else "", edit))
        yield
    finally:
        for path in {*paths}:
            path.unlink(missing_ok=True)
        for path, original in kept.items():
            original.rename(path)


def insert(source: str, edit: Edit) -> str:
    text = dedent(edit.text).strip("\n") + "\n"
    if edit.into is None:
        return f"{source}\n\n{text}"
    node = _defined(ast.parse(source).body, edit.into)
    lines = source.splitlines(keepends=True)
    if isinstance(node, ast.ClassDef):
        row, text = node.end_lineno, indent(text, "    ")
    elif isinstance(node, ast.FunctionDef):
        first = node.body[1] if ast.get_docstring(node) else node.body[0]
        row, text = first.lineno - 1, indent(text, "    ")
    else:  # before the closing bracket
        row, column = node.end_lineno, node.end_col_offset - 1
        assert row is not None
        before = lines[row - 1].encode()[:column].decode().rstrip()
        comma = "" if not before or before.endswith((",", "(", "[", "{")) else ","
        lines[row - 1] = f"{before}{comma}\n{text}{lines[row - 1].encode()[column:].decode()}"
        return "".join(lines)
    assert row is not None
    return "".join([*lines[:row], text, *lines[row:]])


def _defined(body: list[ast.stmt], dotted: str) -> ast.ClassDef | ast.FunctionDef | ast.expr:
    name, _, inner = dotted.partition(".")
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return _defined(node.body, inner) if inner else node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            assert isinstance(node.value, ast.Tuple | ast.List | ast.Set | ast.Dict), name
            return node.value
    raise LookupError(f"nothing named {dotted} is defined there")


def run(source: Path, script: Path) -> tuple[int, str]:
    """A script's exit code and output, with the changed library.

    It runs in a fork of this process, in which torch is imported already: a few tenths of a second instead of four.
    """
    output = script.with_suffix(".out")
    child = multiprocessing.get_context("fork").Process(target=_run_forked, args=(source, script, output))
    child.start()
    child.join(timeout=60)
    if child.is_alive():
        child.kill()
        child.join()
    assert child.exitcode is not None
    return child.exitcode, output.read_text()


def _run_forked(source: Path, script: Path, output: Path) -> None:
    file = output.open("w")
    for number in (1, 2):
        os.dup2(file.fileno(), number)
    sys.stdout = sys.stderr = file
    for name in [name for name in sys.modules if name.partition(".")[0] == "paceline"]:
        del sys.modules[name]
    sys.path.insert(0, str(source))
    os.environ |= {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}  # for processes that the script starts
    sys.dont_write_bytecode = True
    os.chdir(script.parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except BaseException:
        traceback.print_exc()
        file.flush()
        os._exit(1)
    file.flush()
    os._exit(0)


def try_out(change: Change, copy: Path, folder: Path) -> None:
    """Make the change in a copy and run its script in this folder."""
    script = folder / "use.py"
    located = f"import paceline\nassert paceline.__file__.startswith({str(copy)!r}), paceline.__file__\n"
    script.write_text(located + dedent(change.use))
    with applied(change, copy):
        code, output = run(copy, script)
    assert code == 0, output
