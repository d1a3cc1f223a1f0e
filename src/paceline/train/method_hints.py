"""Unknown methods of the Trainer that other frameworks have: the error says what to call instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.config.foreign_names import find_hint


class MethodHints:
    if not TYPE_CHECKING:  # for type checkers, unknown attributes remain errors

        def __getattr__(self, name: str) -> Any:
            hint = find_hint("methods", name)
            words = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{words}; use {hint}" if hint else words, name=name, obj=self)
