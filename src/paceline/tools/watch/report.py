"""The page as one document, and `paceline report`: that page with the values of runs in it, which needs no server.

Markup, style and script of `page/` become a single file that loads nothing. Scripts and styles are allowed by their
hashes, and nothing else is: text of a run that became markup would do nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError
from paceline.run import regular_files
from paceline.run.folder import RunFolder
from paceline.tools.watch import page_values
from paceline.tools.watch.live_run import LiveRun
from paceline.tools.watch.page_values import log_lines
from paceline.tools.watch.run_screen import By

_BUCKETS = 3000  # of all runs together: 150 kB per curve
_MEDIA_BYTES = 4 << 20
_LOG_BYTES, _MIN_LOG_LINES, _MAX_LOG_LINES = 1 << 20, 5, 300  # of all ranks
_FOLDER = Path(__file__).with_name("page")
_SCRIPTS = (
    "dom", "source", "axes", "chart", "heatmap", "figures", "media_view", "run_view", "groups", "compare_view",
    "columns", "list_view", "sheet", "sweep_view", "app",
)  # fmt: skip


def write_report(folders: Sequence[RunFolder], path: Path, by: By = "step") -> None:
    """Write a page that shows one run, or several of them over each other, aligned by step, time or samples."""
    runs = [_values(number, folder, _BUCKETS // len(folders)) for number, folder in enumerate(folders)]
    values = {"written": time.time(), "by": by, "chosen": [run["id"] for run in runs], "runs": runs}
    try:
        regular_files.replace(path, standalone_page(values))
    except OSError as error:
        raise LaunchError("report-not-written", f"Can't write {path}: {error.strerror}.") from None


def _values(number: int, folder: RunFolder, buckets: int) -> dict[str, Any]:
    run = LiveRun(folder)
    run.read_everything()
    about, ranks = page_values.about(run), page_values.ranks(run)
    return {
        "id": str(number),
        "head": page_values.head(run),
        "curves": page_values.curves(run, buckets=buckets),
        "cursor": "end",
        "about": about,
        "about_id": "only",
        "ranks": ranks,
        "log": _logs(folder, about["logs"]),
        "media": _media(folder),
    }


def _media(folder: RunFolder) -> dict[str, Any]:
    """The newest entries, as many as fit. Images are part of the page."""
    kept, left = list[dict[str, Any]](), _MEDIA_BYTES
    for entry in reversed(page_values.media(folder).get("entries", [])):
        if entry["kind"] == "image":
            entry["data"] = base64.b64encode(page_values.image_bytes(folder, entry["name"], entry["step"])).decode()
        left -= len(json.dumps(entry))
        if left < 0:
            break
        kept.append(entry)
    return {"entries": kept[::-1]}


def _logs(folder: RunFolder, ranks: Sequence[int]) -> dict[str, Any]:
    """The last lines of the log of each rank, fewer of them with more ranks."""
    found, left = {}, _LOG_BYTES
    most = max(_MIN_LOG_LINES, min(_MAX_LOG_LINES, 8000 // max(1, len(ranks))))
    for rank in ranks:
        log = log_lines(folder, rank, most=most)
        left -= sum(len(text) for _, text in log["lines"])
        if left < 0:
            break
        found[str(rank)] = log
    return found


def live_page() -> tuple[bytes, str]:
    """The page that asks a server, and the content security policy for its header."""
    return _document("", "").encode(), f"{_policy()}; connect-src 'self'; img-src blob:; frame-ancestors 'none'"


def standalone_page(values: dict[str, Any]) -> bytes:
    """The page with the values that it shows."""
    # "<" would end the element, or open a comment, whatever string it is in.
    text = json.dumps(values, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    meta = f'<meta http-equiv="Content-Security-Policy" content="{_policy()}; img-src data:">'
    return _document(meta, f'<script type="application/json" id="values">{text}</script>').encode()


def _document(meta: str, data: str) -> str:
    parts = {
        "policy": meta,
        "style": f"<style>{_style()}</style>",
        "data": data,
        "script": f"<script>{_script()}</script>",
    }
    text = (_FOLDER / "page.html").read_text()
    for name, part in parts.items():
        before, mark, after = text.partition(f"<!--{name}-->")
        assert mark, f"page.html has no place for {name}"
        text = before + part + after
    return text


def _policy() -> str:
    script, style = (f"'sha256-{_hash(text)}'" for text in (_script(), _style()))
    return f"default-src 'none'; script-src {script}; style-src {style}; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _script() -> str:
    # In a function of its own, so that nothing is added to the window.
    bodies = "\n".join((_FOLDER / f"{name}.js").read_text() for name in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{bodies}}})();\n'


@cache
def _style() -> str:
    return (_FOLDER / "style.css").read_text()
