"""Names of registered components in the fields of a recipe."""

from __future__ import annotations

from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from paceline.own_code import is_own
from paceline.registry import Registry


class NameIn:
    """A name in a registry: an enum in the JSON schema, which user registrations extend. `own`: or `module:name`, of
    the user's code."""

    def __init__(self, registry: Registry[Any, Any], *, own: bool = False) -> None:
        self._registry, self._own = registry, own

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._known)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        known = {"type": "string", "enum": self._registry.declared}
        return {"anyOf": [known, {"type": "string", "pattern": ".:."}]} if self._own else known

    def _known(self, value: Any) -> str:
        names = self._registry.declared
        if self._own and isinstance(value, str) and is_own(value):
            return value
        if not isinstance(value, str) or value not in names:
            expected = f"{', '.join(repr(name) for name in names[:-1])} or {names[-1]!r}"
            raise PydanticKnownError("literal_error", {"expected": expected})
        return value
