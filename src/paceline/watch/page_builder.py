"""The page as one document: markup, style and script of `page/` in a single file that loads nothing.

Scripts and styles are allowed by their hashes, and nothing else is: text of a run that became markup would do nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).with_name("page")
_SCRIPTS = ("dom", "source", "chart", "heatmap", "figures", "run_view", "compare_view", "app")


def live_page() -> tuple[bytes, str]:
    """The page that asks a server, and the content security policy for its header."""
    return _document("", "").encode(), f"{_policy()}; connect-src 'self'; frame-ancestors 'none'"


def standalone_page(values: dict[str, Any]) -> bytes:
    """The page with the values that it shows."""
    # "<" would end the element, or open a comment, whatever string it is in.
    text = json.dumps(values, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    meta = f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">'
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
