"""Every fenced block of README.md, CONTRIBUTING.md and docs/ runs, in the order of its page, in a folder per page.

Python is run as a script, commands of a shell as they are, recipes (yaml) are validated; `text` is output. HTML
comments in the lines before a block say what it needs (CONTRIBUTING.md, "Documentation"):

    <!-- file: train.py -->             the block is also saved under this name, for later blocks
    <!-- given: recipes -->             a copy of this file or folder of the repository; `a.py from b.py` names it a.py
    <!-- run with: train.max_steps=2 -->  added to commands that train or measure, so that they end soon
    <!-- dry run -->                    with --dry-run (make: -n), for what needs a GPU or other machines
    <!-- exits with: 1 -->              the status of the last command
    <!-- not run: reason -->            cannot be run at all; under 5 % of all blocks
    <!-- one rank: reason -->           a program that is not run on two ranks

A page that is built from a program (`<!-- Built from PROGRAM by …` in its first line) is run as that program, by a test
of its own.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
import yaml

import forked
import samples
import searching
from paceline import Config
from paceline.tools.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = ("bash", "sh", "console")
RUN = ("python", "yaml", *SHELL)
TRAINS = ("train", "sweep", "parity", "bench")
# In `make test`: a page shows how to train, and its later commands need a run that has ended, however short.
FEW_STEPS = [] if samples.ALL else ["train.max_steps=2"]
# They take seconds, no later command needs what they print, and tests/ranks runs each: `make test` reads their options.
COMPARE = () if samples.ALL else ("parity", "bench")
COMMENTS = ("file", "given", "run with", "dry run", "exits with", "not run", "one rank")


@dataclass
class Block:
    """A fenced block, and the comments before it."""

    line: int
    language: str
    text: str
    comments: dict[str, str]


def blocks_of(markdown: str) -> list[Block]:
    found, comments, lines = [], dict[str, str](), markdown.splitlines()
    opened: Block | None = None
    for number, line in enumerate(lines, 1):
        if opened is not None:
            if line.strip() == "```":
                found.append(opened)
                opened = None
            else:
                opened.text += line + "\n"
        elif fence := re.match(r"^ *```(.*)$", line):
            opened, comments = Block(number, fence[1].strip(), "", comments), {}
        elif comment := re.fullmatch(r"<!-- ([a-z ]+?)(?:: (.+))? -->", line):
            comments = {**comments, comment[1]: comment[2] or ""}
        else:
            comments = {}
    assert opened is None, "a block is not closed"
    return found


BUILT = re.compile(r"<!-- Built from (\S+) by ")
BLOCKS = {page: blocks_of(page.read_text()) for page in PAGES}
ALL = [(page, block) for page, blocks in BLOCKS.items() for block in blocks]
RUNNABLE = [(page, block) for page, block in ALL if block.language in RUN]


def commands_of(block: Block) -> list[str]:
    """Command lines; in a `console` block those after a `$`, the rest of which is output."""
    text = block.text.replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    if block.language == "console":
        return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [line for line in lines if line and not line.startswith("#")]


def words_of(command: str) -> list[str] | None:
    """The words of a simple command; None if it needs a shell."""
    reader = shlex.shlex(command, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    words = list(reader)
    if "=" in words[0] or words[0] == "export" or any(set(word) <= set("|&;<>()") for word in words) or "$" in command:
        return None
    return words


def run(command: str, comments: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """`paceline` and `python SCRIPT` run in forks of this process, everything else in a new one."""
    is_dry, added = "dry run" in comments, shlex.split(comments.get("run with", ""))
    words = words_of(command)
    if words is not None and words[0] == "paceline":
        dry = ["--dry-run"] if is_dry else []
        added = added if words[1] in TRAINS and words[2:3] != ["show"] else []
        if words[1] == "train" and not re.search(r"max_steps|pause_at|resume", " ".join([*words, *added])):
            added = [*added, *FEW_STEPS]
        return forked.paceline(words[1], *dry, *words[2:], *added, cwd=folder)
    if words is not None and words[0] == "python" and words[1].endswith(".py"):
        return forked.script(folder / words[1], *words[2:], *added, cwd=folder)
    if is_dry and words is not None:
        assert words[0] == "make", f"no dry run of {command}"
        words = [words[0], "-n", *words[1:]]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command if words is None else shlex.join([*words, *added])],
        cwd=ROOT if words and words[0] == "make" else folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=110,
    )


def prepare(block: Block, folder: Path) -> None:
    for given in filter(None, block.comments.get("given", "").split(", ")):
        name, _, origin = given.partition(" from ")
        source, target = ROOT / (origin or name), folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)
    if name := block.comments.get("file"):
        (folder / name).write_text(block.text)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if BLOCKS[page] and not BUILT.match(page.read_text())],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    folder = tmp_path
    if page.stem == "search":
        searching.preload()
    for block in (block for block in BLOCKS[page] if block.language in RUN and "not run" not in block.comments):
        at = f"{page.relative_to(ROOT)}:{block.line}"
        prepare(block, folder)
        if block.language == "yaml":
            Config.from_dict(yaml.safe_load(block.text), origin=at)
        elif block.language == "python":
            script = folder / block.comments.get("file", f"block_{block.line}.py")
            script.write_text(block.text)
            done = forked.script(script, cwd=folder)
            assert done.returncode == 0, f"{at}\n{done.stdout}{done.stderr}"
        else:
            folder = run_commands(block, folder, at)


PROGRAMS = {
    page: [block for block in blocks if block.language == "python" and "import paceline" in block.text]
    for page, blocks in BLOCKS.items()
    if not BUILT.match(page.read_text())
}
# What a newcomer pastes first; the others run in `make test-all`.
FIRST = {ROOT / "README.md"}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page in FIRST else pytest.mark.nightly, id=str(page.relative_to(ROOT)))
        for page, programs in PROGRAMS.items()
        if programs
    ],
)
def test_the_programs_of_a_page_run_on_two_ranks(page: Path, tmp_path: Path) -> None:
    for block in BLOCKS[page]:
        prepare(block, tmp_path)
        if block in PROGRAMS[page] and not block.comments.keys() & {"not run", "one rank"}:
            script = tmp_path / f"block_{block.line}.py"
            script.write_text(block.text)
            done = forked.paceline("launch", "-n", "2", script.name, cwd=tmp_path)
            assert done.returncode == 0, f"{page.relative_to(ROOT)}:{block.line}\n{done.stdout}{done.stderr}"


def run_commands(block: Block, folder: Path, at: str) -> Path:
    """The folder in which the next block runs: `cd` has the effect that it has in a shell."""
    commands = commands_of(block)
    assert commands, f"{at}: no command"
    for number, command in enumerate(commands, 1):
        if command.startswith("cd "):
            folder = folder / command.split()[1]
            assert folder.is_dir(), f"{at}: {command}"
            continue
        words = words_of(command)
        if words is not None and words[0] == "paceline" and words[1] in COMPARE:
            read_options([*words[1:], *shlex.split(block.comments.get("run with", ""))])
            continue
        done = run(command, block.comments, folder)
        wanted = int(block.comments.get("exits with", 0)) if number == len(commands) else 0
        assert done.returncode == wanted, f"{at}: {command}\n{done.stdout}{done.stderr}"
    return folder


def read_options(words: list[str]) -> None:
    """Fails if the command does not have them."""
    group = typer.main.get_command(app)
    context = group.make_context("paceline", words)
    while hasattr(group, "resolve_command"):
        name, group, words = group.resolve_command(context, [*context._protected_args, *context.args])
        assert group is not None and name is not None
        context = group.make_context(name, words, parent=context)


@pytest.mark.nightly
def test_what_a_newcomer_pastes_first_runs_in_a_new_interpreter(tmp_path: Path) -> None:
    first = next(block for block in BLOCKS[ROOT / "README.md"] if block.language == "python")
    (tmp_path / "script.py").write_text(first.text)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_page_that_is_built_from_a_program_has_a_test_that_runs_it() -> None:
    programs = [found[1] for page in PAGES if (found := BUILT.match(page.read_text()))]
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [path for path in programs if not (ROOT / path).is_file() or Path(path).name not in tests] == []


def test_almost_every_block_is_run() -> None:
    """A page whose blocks the collector does not see would pass otherwise."""
    fences = sum(len(re.findall(r"^ *```", page.read_text(), re.M)) for page in PAGES)
    assert len(RUNNABLE) > 40 and 2 * len(ALL) == fences
    left_out = [f"{page.name}:{block.line}" for page, block in RUNNABLE if "not run" in block.comments]
    assert len(left_out) < 0.05 * len(RUNNABLE), left_out
    assert all(block.comments["not run"] for _, block in RUNNABLE if "not run" in block.comments)
    alone = [block for _, block in RUNNABLE if "one rank" in block.comments]
    assert len(alone) <= 9 and all(block.comments["one rank"] for block in alone)


def test_every_block_has_a_known_type_and_known_comments() -> None:
    types = {f"{page.name}:{block.line}": block.language for page, block in ALL}
    assert {at: each for at, each in types.items() if each not in (*RUN, "text", "diff")} == {}
    unknown = {f"{page.name}:{block.line}": {*block.comments} - {*COMMENTS} for page, block in ALL}
    assert {at: names for at, names in unknown.items() if names} == {}


def test_guides_have_no_commands_outside_of_fenced_blocks() -> None:
    """In an indented block they would not be run. Such a block names the benchmark behind a figure, which may take
    hours; tests/arch/test_project_files.py knows that these programs exist."""
    pages = [*PAGES[:2], *(ROOT / "docs" / "guides").glob("*.md"), *(ROOT / "docs" / "errors").glob("*.md")]
    fenced = re.compile(r"^ *```.*?^ *```", re.M | re.S)
    texts = {page.name: fenced.sub("", page.read_text()) for page in pages}
    found = {name: re.findall(r"\n\n {4}(?!python benchmarks/)(\w.+)", text) for name, text in texts.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_comment_belongs_to_the_block_right_after_it() -> None:
    text = "<!-- file: a.py -->\n<!-- not run: no -->\n```python\nx\n```\n\n```bash\ny\n```\n"
    text += "<!-- dry run -->\nz\n```text\n```\n"
    assert [(block.language, block.comments) for block in blocks_of(text)] == [
        ("python", {"file": "a.py", "not run": "no"}),
        ("bash", {}),
        ("text", {}),
    ]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("paceline launch -n 2 a.py  # here", ["paceline", "launch", "-n", "2", "a.py"]),
        ("paceline sweep 'lr=log(1e-5,1e-2)'", ["paceline", "sweep", "lr=log(1e-5,1e-2)"]),
        ("paceline launch --k8s a.py > a.yaml", None),
        ("export A=1", None),
        ("A=1 python a.py", None),
    ],
)
def test_simple_commands_are_told_from_those_that_need_a_shell(command: str, words: list[str] | None) -> None:
    assert words_of(command) == words
