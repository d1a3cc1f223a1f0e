"""`paceline explain`: the catalog page of an error code."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.options import examples

EXAMPLES = examples("explain", "explain launch", "explain config.unknown-key")


def _codes(incomplete: str) -> list[str]:
    from paceline.diagnose import catalog

    return [code for code in catalog.pages() if code.startswith(incomplete)]


def explain(
    code: Annotated[
        str,
        typer.Argument(
            metavar="[CODE]",
            help="error code as printed in brackets, e.g. config.unknown-key, or a family of codes; default: list all",
            autocompletion=_codes,
        ),
    ] = "",
) -> None:
    """Explain an error code: its meaning, its common causes and how to fix it."""
    from paceline.diagnose import catalog

    print(catalog.page(code.strip("[]")) if code else catalog.summaries(catalog.pages()))
