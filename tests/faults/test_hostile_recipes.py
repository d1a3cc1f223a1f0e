"""A recipe that somebody else wrote is accepted or refused with a code, whatever it contains."""

from __future__ import annotations

import pytest

from faults import hostile_recipes
from paceline.config.recipe import Config
from paceline.errors import ConfigError

IN_CI = 150  # `make soak-recipes` reads 10,000


def test_generated_recipes_get_an_answer() -> None:
    answers = list(hostile_recipes.read_all(range(IN_CI)))
    assert [answer for answer in answers if answer.problem] == []
    assert {answer.code for answer in answers} >= {"", "config.malformed", "config.unreadable", "config.unknown-key"}


@pytest.mark.parametrize("value", ["&a [*a]", "[" * 900 + "]" * 900, "\0", "\udc80", "2024-01-01", "1" * 5000])
def test_an_override_may_be_hostile_too(value: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.malformed"):
        Config.from_dict({"model": {"name": "gpt"}}, [f"model.x={value}"])
