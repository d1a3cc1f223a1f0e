from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import user_code
from paceline.errors import ConfigError
from paceline.registry import Registry

CODE = """
from helper import WIDTH

class Net:
    def __init__(self, width=WIDTH): ...

    @classmethod
    def load(cls): return cls()

class Layer:
    def forward(self): ...
    def __call__(self): ...

def build(width, depth=2): return width
number, layer = 3, Layer()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with code, beside the working directory; what a test imports is forgotten."""
    modules = dict(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code = tmp_path / "code"
    code.mkdir()
    (code / "mine_of_test.py").write_text(CODE)
    (code / "helper.py").write_text("WIDTH = 7")
    yield code
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]


@pytest.mark.parametrize("name", ["mine_of_test:build", "mine_of_test.py:build", "../code/mine_of_test.py:build"])
def test_a_function_is_found_in_the_folder_of_the_recipe(folder: Path, name: str) -> None:
    assert user_code.load(name, str(folder))(5) == 5


def test_a_function_is_found_in_the_working_directory_and_among_installed_packages(folder: Path) -> None:
    Path("other_of_test.py").write_text("def make(): return 'here'")
    assert user_code.load("other_of_test:make", str(folder))() == "here"
    assert user_code.load("collections:OrderedDict", str(folder))() == {}


def test_modules_of_a_package_may_import_each_other(folder: Path) -> None:
    package = folder / "package_of_test"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sizes.py").write_text("WIDTH = 9")
    (package / "model.py").write_text("from .sizes import WIDTH\ndef build(): return WIDTH")
    assert user_code.load("package_of_test.model:build", str(folder))() == 9


def test_a_file_that_is_called_like_another_module_does_not_replace_it(folder: Path) -> None:
    (folder / "random.py").write_text("def build(): return 'mine'")
    (folder / "tabnanny.py").write_text("def build(): return 'mine'")  # of Python, not imported yet
    for name in ("random:build", "tabnanny:build"):
        assert user_code.load(name, str(folder))() == "mine"
    assert sys.modules["random"] is random and "tabnanny" not in sys.modules


def test_files_with_the_same_name_are_two_modules(folder: Path) -> None:
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "model_of_test.py").write_text(f"def build(): return {name!r}")
    for name in ("one", "two"):
        assert user_code.load(f"{name}/model_of_test.py:build", str(folder))() == name


def test_a_module_is_imported_once(folder: Path) -> None:
    first, second = (user_code.load(f"mine_of_test{end}:Net", str(folder)) for end in ("", ".py"))
    assert first is second


def test_a_name_may_have_dots(folder: Path) -> None:
    assert user_code.load("mine_of_test:Net.load", str(folder))().__class__.__name__ == "Net"


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("mine_of_tst:build", "config.no-module", "did you mean 'mine_of_test'?"),
        ("../code/mine_of_tst.py:build", "config.no-module", "did you mean '../code/mine_of_test.py'?"),
        ("mine_of_test.inner:build", "config.no-module", "did you mean 'mine_of_test'?"),
        ("mine_of_test:biuld", "config.no-such-name", "did you mean 'build'?"),
        ("mine_of_test:Net.lod", "config.no-such-name", "did you mean 'load'?"),
        ("mine_of_test:number", "config.not-callable", "an object of type int"),
        ("mine_of_test:layer", "config.not-callable", "an object of type Layer"),
        (":build", "config.no-module", "expected module:name"),
        ("mine_of_test:", "config.no-module", "expected module:name"),
    ],
)
def test_an_error_has_a_code_and_suggests_a_name(folder: Path, name: str, code: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        user_code.load(name, str(folder))
    assert caught.value.code == code and words in str(caught.value)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("\n\nimport no_such_module_of_test", "ModuleNotFoundError: No module named 'no_such_module_of_test'"),
        ("\n\n1 / 0", "ZeroDivisionError"),
        ("\n\ndef f(:", "SyntaxError"),
        ("import sys\n\nsys.exit(2)", "SystemExit: 2"),
    ],
)
def test_an_error_in_the_module_is_shown_with_its_line(folder: Path, code: str, words: str) -> None:
    (folder / "broken_of_test.py").write_text(code)
    with pytest.raises(ConfigError, match=r"broken_of_test\.py:3\)") as caught:
        user_code.load("broken_of_test:build", str(folder))
    assert caught.value.code == "config.import-failed" and words in str(caught.value)
    assert "broken_of_test" not in sys.modules  # it can be corrected and imported in the same process


def test_options_are_the_parameters_of_a_function_of_the_user(folder: Path) -> None:
    registry: Registry[None, Any] = Registry("thing", error=lambda code, what, fix="": ConfigError(code, what, fix=fix))
    registry.import_own("mine_of_test:build", str(folder))
    assert registry.find("mine_of_test:build", ["width"])(3) == 3
    for options, code in ((["width", "dpeth"], "config.unknown-option"), ([], "config.missing-option")):
        with pytest.raises(ConfigError) as caught:
            registry.find("mine_of_test:build", options)
        assert caught.value.code == code


def test_a_function_that_does_not_tell_its_parameters_takes_any_option(folder: Path) -> None:
    registry: Registry[None, Any] = Registry("thing")
    registry.import_own("builtins:dict", None)
    assert registry.find("builtins:dict", ["width"])(width=3) == {"width": 3}
