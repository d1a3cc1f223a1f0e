"""An error as plain values, so that one rank's can be raised on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.errors import CheckpointError


def capture_error(work: Callable[[], dict[str, Any]], otherwise: str) -> dict[str, Any]:
    """What the work gives; or, under "error", the name, text, reason and fix of what it raised. What has no code of its
    own gets the name `otherwise`."""
    try:
        return work()
    except CheckpointError as error:
        return {"error": [error.code.partition(".")[2], error.what, error.why, error.fix]}
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) else None
        return {"error": [otherwise, reason or f"{type(error).__name__}: {error}", "", ""]}
