"""The public surface equals its committed snapshots.

Only public names are used here, so the tests stay as they are when inner modules move. Wording (help texts,
descriptions, the text of messages) is not part of the snapshots.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import signal
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from torch import nn

import forked
import paceline
import snapshots
from paceline import testing
from paceline.diagnose import catalog
from samples import ALL

GUIDE = Path(__file__).parents[2] / "docs" / "reference" / "supervision.md"


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "paceline", *args]


def output_of(*args: str) -> str:
    """In a new interpreter: other tests register components of their own in this one."""
    return subprocess.run(command(*args), capture_output=True, text=True, check=True, timeout=60).stdout


def parameters(function: Callable[..., Any]) -> list[str]:
    """Each parameter as `name`, `name=default`, or with the star of its kind; `Unpack`ed keywords are spelled out."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        if parameter.kind is parameter.VAR_KEYWORD:
            keywords = unpacked(function, parameter.name)
            found += [f"{name} (keyword only, optional)" for name in keywords] if keywords else ["**kwargs"]
        elif parameter.kind is parameter.VAR_POSITIONAL:
            found.append("*args")
        else:
            note = {parameter.KEYWORD_ONLY: " (keyword only)", parameter.POSITIONAL_ONLY: " (positional only)"}
            found.append(f"{parameter.name}{default}{note.get(parameter.kind, '')}")
    return found


def unpacked(function: Callable[..., Any], name: str) -> list[str]:
    """The keys of the TypedDict in `**name: Unpack[…]`; none where it is annotated otherwise."""
    annotation = typing.get_type_hints(function.__init__ if isinstance(function, type) else function).get(name)
    kinds = typing.get_args(annotation)
    return sorted(typing.get_type_hints(kinds[0])) if typing.get_origin(annotation) is typing.Unpack else []


def public(names: typing.Iterable[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("_"))


def members(kind: type) -> dict[str, Any]:
    """The public members that classes of paceline define: methods with their parameters, properties by that word."""
    found: dict[str, Any] = {"()": parameters(kind)}
    own = {name for base in kind.__mro__ if base.__module__.startswith("paceline.") for name in vars(base)}
    for name in public(own):
        value = inspect.getattr_static(kind, name)
        if isinstance(value, property):
            found[name] = "property"
        elif isinstance(value, types.FunctionType | classmethod | staticmethod):
            found[name] = parameters(getattr(kind, name))
    return found


def functions(module: types.ModuleType) -> dict[str, list[str]]:
    """A module's public functions, without those that it imported from elsewhere."""
    own = {name: value for name, value in vars(module).items() if inspect.isfunction(value)}
    return {name: parameters(own[name]) for name in public(own) if own[name].__module__.startswith("paceline.")}


def test_public_names() -> None:
    snapshots.compare("names", {"paceline": sorted(paceline.__all__), "paceline.testing": sorted(testing.__all__)})


def test_trainer() -> None:
    trainer = paceline.Trainer(nn.Linear(2, 2), criterion=nn.MSELoss(), run=False, quiet=True, device="cpu")
    snapshots.compare("trainer", {**members(paceline.Trainer), "attributes of an instance": public(dir(trainer))})


def test_functions_and_records() -> None:
    kinds = (paceline.History, paceline.Loss, paceline.Study)
    names = (
        "get_data", "get_model", "launch", "noise", "register_data", "register_logger", "register_model", "sweep",
        "register_optimizer",
    )  # fmt: skip
    snapshots.compare(
        "functions",
        {
            **{f"paceline.{name}": parameters(getattr(paceline, name)) for name in names},
            **{f"paceline.{kind.__name__}": members(kind) for kind in kinds},
            "paceline.Config": {
                name: parameters(getattr(paceline.Config, name))
                for name in ("default", "from_dict", "from_file", "to_dict")
            },
            "paceline.dist": functions(paceline.dist),
            "paceline.testing": {
                name: parameters(getattr(testing, name)) for name in sorted(testing.__all__) if name.islower()
            },
        },
    )


def commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, group
    for name, each in getattr(group, "commands", {}).items():
        if not each.hidden:  # `node` is what a launcher tells another machine's to run, not what a person types
            yield from commands(each, f"{path} {name}")


def takes(parameter: Any) -> str:
    kind = "flag" if getattr(parameter, "is_flag", False) else "values" if parameter.multiple else "value"
    return f"{kind}, required" if parameter.required else kind


def test_options_of_every_verb() -> None:
    main = importlib.import_module("paceline.__main__").main  # what `python -m paceline` calls
    [app] = [value for value in vars(sys.modules[main.__module__]).values() if isinstance(value, typer.Typer)]
    found: dict[str, dict[str, str]] = {}
    for path, each in commands(typer.main.get_command(app), "paceline"):
        found[path] = {}
        arguments = [one for one in each.params if one.param_type_name == "argument"]
        found[path] |= {f"argument {n}": f"nargs {one.nargs}" for n, one in enumerate(arguments)}
        options = [one for one in each.params if one.param_type_name == "option"]
        found[path] |= {" ".join(sorted([*one.opts, *one.secondary_opts])): takes(one) for one in options}
    snapshots.compare("options", found)


def plain(schema: Any, definitions: dict[str, Any]) -> Any:
    """A schema without wording and without names of inner classes: references are replaced by what they stand for."""
    if isinstance(schema, list):
        return [plain(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        schema = {**definitions[schema["$ref"].rpartition("/")[2]], **schema}
    found = {}
    for key, value in schema.items():
        if key == "properties":
            found[key] = {name: plain(each, definitions) for name, each in value.items()}
        elif key not in ("$ref", "$defs", "title", "description"):
            found[key] = plain(value, definitions)
    return found


def test_config_schema() -> None:
    schema = json.loads(output_of("config", "schema"))
    snapshots.compare("config_schema", plain(schema, schema["$defs"]))


def explained(folder: Path, *family: str) -> list[str]:
    return [line.split()[0] for line in forked.paceline("explain", *family, cwd=folder).stdout.splitlines()]


def test_errors_and_their_codes(in_folder: Path) -> None:
    base = paceline.errors.PacelineError
    kinds = sorted([base, *base.__subclasses__()], key=lambda kind: kind.__name__)
    assert all(getattr(paceline.errors, kind.__name__) is kind for kind in kinds)
    codes = [code for kind in kinds for code in explained(in_folder, kind.family)]
    of_logs = sorted(catalog.log_pages())
    assert sorted(explained(in_folder)) == sorted([*codes, *of_logs])
    snapshots.compare("log_codes", of_logs)
    snapshots.compare("errors", {"classes": {kind.__name__: kind.family for kind in kinds}, "codes": sorted(codes)})


def test_documented_exit_statuses() -> None:
    rows = re.findall(r"^\| ([\dn+ ]+?) \| ([\w -]*?) *\|", GUIDE.read_text(), flags=re.MULTILINE)
    assert len(rows) > 10
    snapshots.compare("exit_statuses", dict(rows))


FAILING = "import os, signal, sys\nif os.environ['RANK'] == '1':\n    {}\n"
STATUSES = [
    (["launch", "-n", "2", FAILING.format("pass")], 0),
    (["launch", "-n", "2", FAILING.format("raise ValueError('wrong')")], 1),
    (["launch", "-n", "2", FAILING.format("sys.exit(7)")], 7),
    (["launch", "-n", "2", FAILING.format("os.kill(os.getpid(), signal.SIGKILL)")], 137),
    (["launch", "--no-such-option"], 2),
    (["no-such-verb"], 2),
    (["train", "no_such_key=1"], 2),
    (["train", "no-such-file.yaml"], 2),
    (["explain", "no.such-code"], 2),
    (["checkpoint", "verify", "no-such-folder"], 2),
    (["--version"], 0),
]


@pytest.mark.parametrize(("args", "status"), STATUSES)
def test_exit_status(in_folder: Path, args: list[str], status: int) -> None:
    *options, last = args
    if "\n" in last:
        (in_folder / "script.py").write_text(last)
        last = "script.py"
    if status == 0 or (status == 1 and ALL):  # also in a new interpreter
        done = subprocess.run(command(*options, last), capture_output=True, text=True, timeout=60)
        assert done.returncode == status, done.stderr
    done = forked.paceline(*options, last, cwd=in_folder)
    assert done.returncode == status, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_exit_status_after_a_signal(in_folder: Path, number: signal.Signals) -> None:
    (in_folder / "script.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(100)\n")
    launcher = subprocess.Popen(command("launch", "-n", "1", "script.py"), stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    with launcher, launcher.stdout:
        assert any(line.strip() == "ready" for line in launcher.stdout)
        launcher.send_signal(number)
        assert launcher.wait(timeout=60) == 128 + number
