from __future__ import annotations

import json

import pytest

from paceline import errors
from paceline.errors import CheckpointError, LaunchError, PacelineError

FAMILIES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PacelineError)]


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind is not PacelineError])
def test_an_error_is_the_same_in_another_process(kind: type[PacelineError]) -> None:
    error = kind("some-name", "What was seen.", why="why", fix="fix")
    again = PacelineError.from_dict(json.loads(json.dumps(error.to_dict())))
    assert type(again) is kind
    assert (str(again), again.code) == (str(error), error.code)


def test_a_family_of_a_newer_version_is_still_an_error() -> None:
    values = CheckpointError("some-name", "What was seen.").to_dict() | {"family": "unheard-of"}
    again = PacelineError.from_dict(values)
    assert type(again) is LaunchError and again.what == "What was seen."
