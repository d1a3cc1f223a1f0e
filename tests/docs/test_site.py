"""The site builds without a warning: every link and anchor leads somewhere, every page is in the navigation, and pages
read as they do in the repository."""

from __future__ import annotations

import fcntl
import html
import io
import logging
import os
import re
import shutil
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import forked
import paceline
from paceline.diagnose import catalog
from paceline.tools.cli.workloads import recipe_keys
from paceline.train.trainer_kwargs import TrainerKwargs
from reference_pages import GROUPS

ROOT = Path(__file__).parents[2]


def build(config: Path, site: Path) -> None:
    """In a forked process: `mkdocs build --strict`. What it warns about is printed."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    heard = io.StringIO()
    logging.getLogger("mkdocs").addHandler(logging.StreamHandler(heard))
    try:
        build(load_config(str(config), site_dir=str(site), strict=True))
    finally:
        print(heard.getvalue())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the first worker that needs it, once in a run."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder, built = shared / "site", shared / "site-is-built"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            done = forked.function(lambda: build(ROOT / "mkdocs.yml", folder), ROOT)
            assert done.returncode == 0, done.stdout + done.stderr
            built.touch()
    return folder


def article(site: Path, page: str) -> str:
    """The text of a page, as HTML."""
    text = (site / page / "index.html").read_text()
    return text[text.index("<article") : text.index("</article>")]


def test_the_reference_has_every_key_command_error_and_public_name(site: Path) -> None:
    recipe, commands = article(site, "reference/recipe"), article(site, "reference/commands")
    assert [key.name for key in recipe_keys() if f"<code>{key.name}</code>" not in recipe] == []
    assert [option for option in ("--hosts", "--layouts", "--pruner", "--ema") if option not in commands] == []
    errors = article(site, "reference/errors") + article(site, "reference/log-failures")
    assert [code for code in catalog.pages() if f'id="{code}"' not in errors] == []
    api = "".join(article(site, f"reference/api/{page.name}") for page in (site / "reference" / "api").iterdir())
    assert [name for name in paceline.__all__ if f"paceline.{name}" not in api] == []


def test_every_key_of_a_recipe_has_one_place_in_the_reference() -> None:
    """A new key needs its name in `GROUPS` of tools/reference_pages.py."""
    placed = [name for names in GROUPS.values() for name in names]
    assert sorted(placed) == sorted(paceline.Config.model_fields)


def test_every_argument_of_the_trainer_is_listed_with_its_type_default_and_meaning(site: Path) -> None:
    text = article(site, "reference/api/Trainer").partition("Attributes")[0]
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.+?)</tr>", text, re.S)]
    found = {re.sub("<.*?>", "", name): (kind, value, meaning) for name, kind, value, meaning in filter(None, rows)}
    arguments = {"model", "optimizer", "loss_fn", "criterion", "scheduler", "metrics", "callbacks", "device"}
    arguments |= {"collate_fn"}
    assert {*found} == {*TrainerKwargs.__annotations__, *arguments, "comm_hook", "comm_state"}
    assert [
        name for name, (kind, value, meaning) in found.items() if not kind or "Literal" in kind or not meaning
    ] == []
    defaults = {name: html.unescape(re.sub("<.*?>", "", value)) for name, (_, value, _) in found.items()}
    assert (defaults["batch"], defaults["keep"], defaults["precision"], defaults["ddp"]) == (
        "None",
        "3",
        "'fp32'",
        "{}",
    )
    assert [name for name, default in defaults.items() if not default] == ["model"]


def test_pages_fetch_nothing_from_the_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    fetched = re.compile(r'<(?:script|img|iframe)[^>]* src="https?:|<link[^>]* href="https?:|fonts\.g')
    assert [page.name for page in pages if fetched.search(page.read_text())] == []


def test_a_page_has_the_lists_and_tables_that_it_has_in_the_repository(site: Path) -> None:
    """Python-Markdown is stricter than GitHub: without a blank line before it, a list becomes part of the paragraph."""
    reader = MarkdownIt("commonmark").enable("table")
    differing = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        name = str(page.relative_to(ROOT / "docs").with_suffix("")).removesuffix("README")
        here, there = reader.render(page.read_text()), article(site, name)
        for tag in ("li", "tr", "pre", "h2", "h3"):
            found = [len(re.findall(f"<{tag}[ >]", text)) for text in (here, there)]
            differing += [f"{name}: {tag} {found}"] if found[0] != found[1] else []
    assert differing == []


def test_broken_links_and_pages_without_a_place_fail_the_build(tmp_path: Path) -> None:
    """Of a site that has a few of the pages: the others take most of the time."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("decisions", "errors", "reference"))
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml", "src", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs" / "lost.md").write_text(
        "[a](guides/no-page.md) [b](guides/launch.md#no-heading) [c](../src/paceline/no_file.py) [d](../LICENSE)"
    )
    done = forked.function(lambda: build(tmp_path / "mkdocs.yml", tmp_path / "site"), tmp_path)
    assert done.returncode != 0
    wanted = ("no-page.md", "no-heading", "no_file.py", "LICENSE", "lost.md\n")
    assert [each for each in wanted if each not in done.stdout] == [], done.stdout + done.stderr
