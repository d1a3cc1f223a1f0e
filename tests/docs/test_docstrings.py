"""`help()` of every public name reads as a page: what it does, its parameters, what it raises, an example that runs.

Examples of methods continue that of their class, and those of a module's functions that of the module. All of a class
or module run in one process, each in a folder of its own. Those of `paceline.dist` also run on two ranks.
"""

from __future__ import annotations

import ast
import doctest
import inspect
import io
import os
import pydoc
import re
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest

import forked
import paceline
from docstrings import Docstring, doc, parameters, parse, public_names, unpacked
from paceline.diagnose import catalog
from paceline.testing import run_on_ranks

NAMES = public_names()
DOCSTRINGS = {name: parse(doc(value)) for name, value in NAMES.items()}
ERRORS = {name for name, value in vars(paceline.errors).items() if isinstance(value, type)}
# Members of named tuples and errors need no example of their own: that of their class shows them.
NEEDS_EXAMPLE = [
    name
    for name, value in NAMES.items()
    if not isinstance(value, property) and not (isinstance(value, type) and issubclass(value, Exception))
]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def undocumented(value: Any, found: Docstring) -> list[str]:
    """Parameters that the docstring does not describe."""
    if isinstance(value, property | types.ModuleType):
        return []
    if isinstance(value, type) and not {"__init__", "__new__"} & vars(value).keys():
        return []  # that of its base class, which is public as well
    described = {**found.items.get("Args", {}), **found.items.get("Attributes", {}), **found.items.get("Settings", {})}
    return [each for each in [*parameters(value), *unpacked(value)] if not described.get(each)]


def raises(value: Any) -> bool:
    """Whether the body of a function or method itself raises an error."""
    if not isinstance(value, types.FunctionType | types.MethodType):
        return False
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    return any(isinstance(node, ast.Raise) for node in ast.walk(tree))


def family_of(name: str) -> str:
    """The class or module whose example that of the name continues, or its own name."""
    outer = name.rpartition(".")[0]
    return family_of(outer) if outer in DOCSTRINGS else name


FAMILIES = sorted({family_of(name) for name in NEEDS_EXAMPLE})


def members_of(family: str) -> list[str]:
    return [name for name in NEEDS_EXAMPLE if family_of(name) == family]


def code_of(name: str) -> str:
    """The example of a name, after those of its class or module."""
    outer = name.rpartition(".")[0]
    before = code_of(outer) if outer in DOCSTRINGS else ""
    return f"{before}\n{DOCSTRINGS[name].parts.get('Example', '')}\n"


def run_example(code: str, name: str) -> None:
    """Raise with a report if the output differs."""
    test = doctest.DocTestParser().get_doctest(code, {}, name, None, None)
    heard = io.StringIO()
    result = doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=heard.write)
    if result.failed:
        raise AssertionError(heard.getvalue())


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_documented(name: str) -> None:
    found = DOCSTRINGS[name]
    assert found.text, "no docstring"
    assert undocumented(NAMES[name], found) == []
    assert "Raises" in found.items or not raises(NAMES[name]), "what it raises"


def run_examples(names: list[str]) -> None:
    """Each in a folder of its own. All are run, whatever the first ones do."""
    folder, failed = Path.cwd(), []
    for name in names:
        (folder / name).mkdir()
        os.chdir(folder / name)
        try:
            run_example(code_of(name), name)
        except AssertionError as error:
            failed.append(str(error))
    assert failed == [], "\n".join(failed)


@pytest.mark.parametrize("name", NEEDS_EXAMPLE)
def test_a_public_name_has_an_example(name: str) -> None:
    assert ">>> " in DOCSTRINGS[name].parts.get("Example", ""), "no example"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_examples_of_a_class_or_module_run(family: str, tmp_path: Path) -> None:
    done = forked.function(lambda: run_examples(members_of(family)), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_examples_of_collectives_run_on_two_ranks() -> None:
    def run_all() -> None:
        for name in members_of("paceline.dist"):
            run_example(code_of(name), name)

    assert len(members_of("paceline.dist")) > 15
    run_on_ranks(2, run_all)


def test_errors_are_named_with_codes_that_exist() -> None:
    raising = {name: found.items["Raises"] for name, found in DOCSTRINGS.items() if "Raises" in found.items}
    assert len(raising) > 25
    known = ERRORS | {"KeyboardInterrupt", "RankFailure"}
    assert {f"{name}: {each}" for name, found in raising.items() for each in found if each not in known} == set()
    texts = {name: " ".join(found.values()) for name, found in raising.items()}
    codes = {(name, code) for name, text in texts.items() for code in re.findall(r"`([a-z]+\.[a-z0-9-]+)`", text)}
    assert len(codes) > 30
    assert {f"{name}: {code}" for name, code in codes if code not in catalog.own_pages()} == set()


def test_the_help_of_the_trainer_reads_as_a_page() -> None:
    page = pydoc.render_doc(paceline.Trainer, renderer=pydoc.plaintext)
    wanted = ("batch: samples per optimizer step, over all ranks", "clip_norm: maximum gradient norm", "Raises:")
    assert [each for each in (*wanted, ">>> history = trainer.train(data", " load_best(") if each not in page] == []


def test_a_gap_is_found() -> None:
    def function(first: int, second: int) -> None:
        """Do it.

        Args:
            first: a number
        """

    assert undocumented(function, parse(doc(function))) == ["second"]
    assert raises(paceline.noise) and not raises(paceline.register_model)
    with pytest.raises(AssertionError, match="Expected"):
        run_example(">>> 1 + 1\n3\n", "x")
