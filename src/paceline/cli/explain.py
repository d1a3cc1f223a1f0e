"""`paceline explain`: what an error code means."""

from __future__ import annotations

from typing import Annotated

import typer


def explain(
    code: Annotated[str, typer.Argument(help="the code in brackets, e.g. config.unknown-key")],
) -> None:
    """Say what an error code means, why it comes up, and what to do."""
    from paceline.diagnose import catalog

    print(catalog.page(code.strip("[]")))
