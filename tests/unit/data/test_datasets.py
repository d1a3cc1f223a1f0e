from __future__ import annotations

import pytest

import paceline
from paceline.errors import DataError


def test_unknown_datasets_and_options_have_codes() -> None:
    with pytest.raises(DataError) as name:
        paceline.get_data("shape")
    assert name.value.code == "data.unknown-name" and "did you mean 'shapes'" in str(name.value)
    with pytest.raises(DataError) as option:
        paceline.get_data("shapes", sizes=3)
    assert option.value.code == "data.unknown-option" and "did you mean 'size'" in str(option.value)
