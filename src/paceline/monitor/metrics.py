"""`metrics.jsonl`: one JSON object a line, appended at log points. Readers need nothing but this file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class MetricsFile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        lines = "".join(json.dumps({key: _json(value) for key, value in record.items()}) + "\n" for record in records)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(lines)


def _json(value: Any) -> Any:
    """JSON has no word for a number that is none (NaN, infinity): null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
