"""The reference of the site, generated from the code: API, recipe keys, commands.

    pages = reference_pages()    # {"reference/recipe.md": "# Recipe keys …", …}

Nothing of it is stored in the repository, so it can't be out of date (docs/decisions/031-site-and-reference.md).
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import typer

import paceline
from docstrings import Docstring, doc, members, module_names, parse, signature_of
from paceline.config.recipe import Config
from paceline.tools.cli.main import app
from paceline.tools.cli.workloads import RecipeKey, recipe_keys
from paceline.train.trainer_kwargs import TrainerKwargs

# The keys of a recipe by subject, in the order of the reference. A test knows that each one has a place.
GROUPS = {
    "Model": ("model", "init_from", "code", "sync_batchnorm", "dropout"),
    "Data and batches": ("data", "batch", "batch_per_rank", "micro_batch", "accumulate", "shuffle", "workers"),
    "Length of training": ("train",),
    "Optimization": ("optimizer", "schedule", "scheduler_interval", "clip_norm", "clip_value", "ema"),
    "Precision": ("precision", "tf32", "scaler"),
    "Speed and memory": ("compile", "blocks", "recompute", "channels_last", "graph"),
    "Layout": ("strategy", "layout", "ddp", "fsdp", "tensor", "pipeline", "split", "sync"),
    "Evaluation": ("metrics", "eval_every", "save_best", "early_stop"),
    "Run folder and checkpoints": (
        "run", "tags", "resume", "save_every", "save_minutes", "save_last", "keep", "keep_best",
        "keep_every", "checkpoint",
    ),
    "Logging": ("log_every", "loggers", "quiet", "report", "profile"),
    "Checks": ("preflight", "unused_parameters", "nonfinite"),
    "Reproducibility": ("seed", "deterministic", "slices"),
    "Devices and ranks": ("device", "backend", "timeout", "fallback", "port", "env", "launch"),
    "Search": ("sweep",),
}  # fmt: skip
ALIASES = {"MetricsLike": "list | dict | None", "Reduce | None": "Callable[[Any, GradBucket], Future] | None"}
KINDS = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}

RECIPE_PAGE = """Every key of a recipe by subject, generated from its JSON schema. `paceline config keys` prints the
same, and `paceline config schema` the schema itself, for editors. On the command line, `section.key=value` sets a key.
In Python, most keys are keywords of [`paceline.Trainer`](api/Trainer.md), with sections as dicts."""

SETTINGS = """Keywords of the Trainer, and keys of a recipe. A section takes a dict of its keys, or its main value:
`ema=0.999` is short for `ema={"decay": 0.999}`."""


def reference_pages() -> dict[str, str]:
    """The text of each page, by its path."""
    return {
        **{f"reference/api/{name}.md": text for name, text in api_pages()},
        "reference/recipe.md": recipe_page(),
        "reference/commands.md": commands_page(),
    }


def api_pages() -> Iterator[tuple[str, str]]:
    """A page for each class and module, and one for all functions."""
    functions = []
    for name in [*paceline.__all__, "testing"]:
        value = getattr(paceline, name)
        if isinstance(value, types.ModuleType):
            yield name, module_page(name, value)
        elif isinstance(value, type):
            yield name, "\n".join(class_lines(f"paceline.{name}", value, 1))
        else:
            functions += function_lines(f"paceline.{name}", value, 2)
    yield "functions", "\n".join(["# Functions", "", *functions])


def module_page(name: str, module: types.ModuleType) -> str:
    lines = [f"# paceline.{name}", "", *docstring_lines(parse(doc(module)))]
    for each in module_names(module):
        value = getattr(module, each)
        render = class_lines if isinstance(value, type) else function_lines
        lines += render(f"paceline.{name}.{each}", value, 2)
    return "\n".join(lines)


def class_lines(name: str, kind: type, level: int) -> list[str]:
    lines = ["#" * level + f" {name}", "", *signature_lines(name, kind), *docstring_lines(parse(doc(kind)))]
    for each, value in members(kind):
        if isinstance(value, property):
            lines += [f"{'#' * (level + 1)} {each}", "", "*property*", "", *docstring_lines(parse(doc(value)))]
        else:
            lines += function_lines(each, value, level + 1)
    return lines


def function_lines(name: str, function: Any, level: int) -> list[str]:
    return [f"{'#' * level} {name}", "", *signature_lines(name, function), *docstring_lines(parse(doc(function)))]


def signature_lines(name: str, value: Any) -> list[str]:
    """The signature, one parameter per line if it is long. Annotations are shown as they are written."""
    signature = signature_of(value)
    kept = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
    shown = str(signature.replace(parameters=kept)).replace("'", "")
    if len(name + shown) > 100:
        inner = [str(each).replace("'", "") for each in with_markers(kept)]
        result = shown.rpartition(" -> ")[2] if " -> " in shown else ""
        shown = "(\n    " + ",\n    ".join(inner) + ",\n)" + (f" -> {result}" if result else "")
    return ["```python", f"{name}{shown}", "```", ""]


def with_markers(parameters: list[inspect.Parameter]) -> Iterator[Any]:
    """With the `*` before keyword-only parameters."""
    starred = False
    for each in parameters:
        starred |= each.kind is each.VAR_POSITIONAL
        if each.kind is each.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        yield each


def docstring_lines(found: Docstring) -> list[str]:
    """A docstring as Markdown."""
    lines = [code_blocks(found.text), ""]
    titles = {"Args": "Parameters", "Settings": "Settings", "Attributes": "Attributes", "Raises": "Raises"}
    for section, title in titles.items():
        if "Settings" in found.items and section in ("Args", "Settings"):
            lines += setting_tables() if section == "Settings" else argument_table(found.items["Args"])
        elif section in found.items:
            lines += [f"**{title}**", ""]
            lines += [f"- `{name}`: {text}" for name, text in found.items[section].items()] + [""]
    for section in ("Returns", "Yields"):
        if section in found.parts:
            lines += [f"**{section}** " + " ".join(found.parts[section].split()), ""]
    if "Example" in found.parts:
        lines += ["**Example**", "", "```pycon", found.parts["Example"], "```", ""]
    return lines


def code_blocks(text: str) -> str:
    """Indented blocks of a docstring as fenced ones."""
    fenced = re.sub(
        r"(?:^|\n\n)((?: {4}.*(?:\n|$)|\n(?= {4}))+)",
        lambda block: "\n\n```text\n" + inspect.cleandoc(block[1]).rstrip() + "\n```\n\n",
        text,
    )
    return re.sub(r"\n{3,}", "\n\n", fenced).strip()


def recipe_page() -> str:
    """Every key of a recipe, by subject, then by section."""
    properties = Config.json_schema()["properties"]
    plain = {key.name: key for key in recipe_keys() if "." not in key.name}
    sections = {name: list(keys) for name, keys in groupby(recipe_keys(), key=lambda key: key.name.rpartition(".")[0])}
    lines = ["# Recipe keys", "", RECIPE_PAGE, ""]
    head = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for title, names in GROUPS.items():
        lines += [f"## {title}", ""]
        rows = [recipe_row(plain[name]) for name in names if name in plain]
        lines += [*head, *rows, ""] if rows else []
        for section in (each for name in names for each in sections if each.partition(".")[0] == name):
            lines += [f"### {section}", ""]
            lines += [sentence(properties[section].get("description", "")), ""] if "." not in section else []
            lines += [*head, *map(recipe_row, sections[section]), ""]
    return "\n".join(lines)


def argument_table(described: dict[str, str]) -> list[str]:
    """The arguments of the Trainer that are no settings."""
    lines = ["**Model, loss and other objects**", "", "| argument | type | default | meaning |", "|---|---|---|---|"]
    for name, each in list(signature_of(paceline.Trainer).parameters.items())[1:-1]:
        kind = ALIASES.get(each.annotation, each.annotation)
        default = "" if each.default is each.empty else f"{each.default!r}"
        lines.append(f"| `{name}` | {cell(kind)} | {default} | {cell(described[name])} |")
    return [*lines, ""]


def setting_tables() -> list[str]:
    """The settings of the Trainer by subject: type, default and meaning."""
    kinds = {name: written_kind(each.__forward_arg__) for name, each in TrainerKwargs.__annotations__.items()}
    sections = {key.name.partition(".")[0] for key in recipe_keys() if "." in key.name}
    lines = ["**Settings**", "", SETTINGS, ""]
    for title, names in GROUPS.items():
        rows = []
        for name in (each for each in names if each in kinds):
            found = Config.model_fields[name]
            value = found.get_default()
            default = "{}" if name in sections and value is not None else repr(value)
            more = f" ([keys](../recipe.md#{name}))" if name in sections else ""
            rows.append(f"| `{name}` | {cell(kinds[name])} | {cell(default)} | {cell(found.description or '')}{more} |")
        if rows:
            lines += [f"*{title}*", "", "| setting | type | default | meaning |", "|---|---|---|---|", *rows, ""]
    return lines


def written_kind(annotation: str) -> str:
    """`Literal["a", "b"] | None` as `"a" | "b" | None`."""
    return re.sub(r"Literal\[(.+?)\]", lambda found: found[1].replace("'", '"').replace(", ", " | "), annotation)


def recipe_row(key: RecipeKey) -> str:
    default = "" if key.default in ("", "null") else f"`{key.default}`"
    return f"| `{key.name}` | {cell(key.kind)} | {cell(default)} | {cell(key.help)} |"


def commands_page() -> str:
    """Every command with its arguments and options."""
    lines = ["# Commands", "", "Every command of `paceline`, as `--help` describes it.", ""]
    for path, command in commands(typer.main.get_command(app), "paceline"):
        lines += [f"## {path}", "", sentence((command.help or "").strip()), "", *usage_lines(path, command)]
        lines += option_lines(command)
        if command.epilog:
            examples = [line for line in command.epilog.split("\n\n") if line.startswith("paceline")]
            lines += ["**Examples**", "", "```text", *examples, "```", ""]
    return "\n".join(lines)


def commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not getattr(group, "commands", {}) or path == "paceline":
        yield path, group
    for name, each in getattr(group, "commands", {}).items():
        if not each.hidden:
            yield from commands(each, f"{path} {name}")


def usage_lines(path: str, command: Any) -> list[str]:
    words = [each.metavar or each.name.upper() for each in command.params if each.param_type_name == "argument"]
    if hasattr(command, "commands"):
        words = ["COMMAND", "[ARGS]..."]
    return ["```text", " ".join([path, "[OPTIONS]", *words]), "```", ""]


def option_lines(command: Any) -> list[str]:
    rows = []
    for each in command.params:
        if each.param_type_name == "argument":
            names = f"`{each.metavar or each.name.upper()}`"
        else:
            value = "" if each.is_flag else f" {each.metavar or value_kind(command.callback, each.name)}"
            names = ", ".join(f"`{option}{value}`" for option in [*each.opts, *each.secondary_opts])
        default = each.default
        shown = "" if default in (None, False, "", ()) or callable(default) else f"`{default}`"
        rows.append(f"| {cell(names)} | {cell(shown)} | {cell(getattr(each, 'help', '') or '')} |")
    return ["| option | default | meaning |", "|---|---|---|", *rows, ""] if rows else []


def value_kind(function: Any, name: str) -> str:
    """What an option without a metavar takes, from the annotation of its parameter."""
    parameters = inspect.signature(function, eval_str=True).parameters if function else {}
    kind = parameters[name].annotation if name in parameters else str
    while kind not in KINDS and get_args(kind):  # Annotated, optional, list
        kind = next(each for each in get_args(kind) if each is not type(None))
    return KINDS.get(kind, "TEXT")


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if not text or text.endswith(".") else f"{text}."
