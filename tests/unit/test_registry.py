from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import DataError
from paceline.registry import Registry


def planets(**options: Any) -> Registry[int, str]:
    registry: Registry[int, str] = Registry("planet", **options)
    registry.declare("mars", 2)

    @registry.implement("mars")
    def mars(sun: str, *, red: bool = True) -> str:
        return f"{sun} {red}"

    return registry


def test_a_component_has_facts_and_an_implementation() -> None:
    registry = planets(skip=1)
    assert registry.facts("mars") == 2
    assert registry.find("mars", ["red"])("sol", red=False) == "sol False"


def test_an_unknown_name_or_option_offers_the_nearest() -> None:
    registry = planets(error=DataError, hint="register_planet")
    with pytest.raises(DataError, match=r"(?s)unknown-name.*did you mean 'mars'.*register_planet"):
        registry.find("marz")
    with pytest.raises(DataError, match=r"unknown-option.*did you mean 'red'"):
        registry.find("mars", ["redd"])
    with pytest.raises(LookupError, match="did you mean 'mars'"):
        planets().find("marz")


def test_what_is_passed_by_the_library_is_no_option() -> None:
    assert planets().options("mars") == ["sun", "red"]
    assert planets(skip=1).options("mars") == ["red"]
    registry = planets()
    registry.implement("venus")(lambda **anything: "hot")
    assert registry.options("venus") is None
    assert registry.find("venus", ["anything", "at-all"])() == "hot"


def test_modules_that_implement_components_are_loaded_before_a_lookup() -> None:
    loaded: list[str] = []
    planets(load=lambda: loaded.append("now")).find("mars")
    assert loaded
