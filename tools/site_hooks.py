"""Hooks of mkdocs: the pages of the site that are not in docs/.

The home page is README.md; contributing.md and changelog.md come from the root of the repository; reference/ is
generated from the code (reference_pages.py); a source file that a page links to gets a page of its own. Links are
rewritten accordingly, so that the same Markdown works in the repository and on the site.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from os.path import relpath
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from reference_pages import reference_pages

ROOT = Path(__file__).absolute().parents[1]
# Files of the repository -> pages of the site.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "src/paceline/diagnose/catalog.md": "reference/errors.md",
    "src/paceline/diagnose/log_files/catalog.md": "reference/log-failures.md",
    "docs/decisions": "decisions/001-packages.md",
}
# Headings of the repository's page about the reference -> pages of the site that are generated from the code.
GENERATED = {
    "docs/reference/README.md#the-trainer": "reference/api/Trainer.md",
    "docs/reference/README.md#recipe-keys": "reference/recipe.md",
    "docs/reference/README.md#commands": "reference/commands.md",
    "docs/reference/README.md#error-codes": "reference/errors.md",
}
LINK = re.compile(r"(\]\()(?!\w+:)([^)\s#]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.M | re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, then expand `nav`."""
    found = {page: with_codes((ROOT / path).read_text()) for path, page in PAGES.items() if (ROOT / path).is_file()}
    found |= reference_pages()
    written = {path: (ROOT / "docs" / path).read_text() for path in files.src_uris if path.endswith(".md")}
    for path in sorted(linked_files({**written, **found})):
        found[f"source/{path}.md"] = source_page(path)
    for path, text in found.items():
        files.append(File.generated(config, path, content=text))
    listed = set(re.findall(r"[\w/-]+\.md", str(config.nav)))
    config.nav = expand(config.nav, sorted(files.src_uris.keys() - listed))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links that lead out of docs/."""
    at = page.file.src_uri
    return outside_code(markdown, lambda text: LINK.sub(lambda link: rewritten(link, at), text))


def with_codes(markdown: str) -> str:
    """The section of an error code gets the code as its anchor."""
    return re.sub(r"^## ([a-z]+\.[a-z0-9-]+)$", r"## \1 { #\1 }", markdown, flags=re.M)


def outside_code(markdown: str, change: Any) -> str:
    """Apply `change` to the text between fenced blocks."""
    parts, start = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[start : fence.start()]), fence[0]]
        start = fence.end()
    return "".join([*parts, change(markdown[start:])])


def repository_path(target: str, page: str) -> str:
    """The file of the repository that a link on a page of the site means."""
    origin = next((path for path, made in PAGES.items() if made == page), f"docs/{page}")
    return relpath((ROOT / origin).parent / target, ROOT)


def site_path(path: str) -> str:
    """The page of the site for a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def rewritten(link: re.Match[str], page: str) -> str:
    path = repository_path(link[2], page)
    if made := GENERATED.get(path + link[3][:-1]):
        return f"{link[1]}{relpath(made, PurePosixPath(page).parent)})"
    if page.startswith("reference/") and not link[2].startswith(".."):
        return link[0]  # between generated pages
    target = relpath(site_path(path), PurePosixPath(page).parent)
    return f"{link[1]}{quote(target)}{link[3]}"


def linked_files(pages: dict[str, str]) -> Iterator[str]:
    """Source files that pages link to."""
    found = {
        repository_path(link[2], page)
        for page, text in pages.items()
        if not page.startswith("reference/")
        for link in LINK.finditer(FENCE.sub("", text))
    }
    return (path for path in found if site_path(path).startswith("source/") and (ROOT / path).is_file())


def source_page(path: str) -> str:
    """A source file as a page; not part of the search index."""
    language = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "bash"}.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n````{language}\n{(ROOT / path).read_text()}\n````\n"


def expand(entry: Any, paths: list[str]) -> Any:
    """Replace each pattern in `nav` by the pages that match it; one that none matches disappears, with its title."""
    if isinstance(entry, dict):
        return {title: pages for title, value in entry.items() if (pages := expand(value, paths))}
    if isinstance(entry, list):
        found: list[Any] = []
        for each in entry:
            pages = expand(each, paths)
            found += pages if isinstance(pages, list) else [pages] if pages else []
        return found
    return [path for path in paths if fnmatch(path, entry)] if "*" in entry else entry
