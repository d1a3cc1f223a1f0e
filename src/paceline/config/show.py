"""The effective recipe as text, with the origin of each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from paceline.config import files
from paceline.config.recipe import Config


def effective(config: Config) -> str:
    """YAML of the config, with the origin of each value as a comment."""
    lines = list(_lines(config.to_dict(), config))
    width = max(len(text) for text, origin in lines if origin)
    return "\n".join(f"{text:<{width}}  # {origin}" if origin else text for text, origin in lines)


def _lines(values: Mapping[str, Any], config: Config, path: str = "") -> Iterator[tuple[str, str]]:
    indent = "  " * path.count(".")
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{_scalar(key)}:", ""
            yield from _lines(value, config, f"{path}{key}.")
        else:
            yield f"{indent}{_scalar(key)}: {_scalar(value)}", config.origin(f"{path}{key}")


def _scalar(value: Any) -> str:
    text = yaml.dump(value, Dumper=files.Dumper, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n...\n").strip()
