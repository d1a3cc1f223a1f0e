"""`paceline explain`: the catalog page of an error code."""

from __future__ import annotations

from typing import Annotated

import typer


def explain(
    code: Annotated[str, typer.Argument(help="error code as printed in brackets, e.g. config.unknown-key")],
) -> None:
    """Explain an error code: its meaning, its common causes and how to fix it."""
    from paceline.diagnose import catalog

    print(catalog.page(code.strip("[]")))
