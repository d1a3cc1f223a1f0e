from __future__ import annotations

from typing import Any

import pytest
import torch

import paceline
from paceline.errors import DataError


def test_unknown_datasets_and_options_have_codes() -> None:
    with pytest.raises(DataError) as name:
        paceline.get_data("shape")
    assert name.value.code == "data.unknown-name" and "did you mean 'shapes'" in str(name.value)
    with pytest.raises(DataError) as option:
        paceline.get_data("shapes", sizes=3)
    assert option.value.code == "data.unknown-option" and "did you mean 'size'" in str(option.value)


def test_a_dataset_class_is_trained_on_without_an_evaluation_set() -> None:
    @paceline.register_data("squares")
    class Squares(torch.utils.data.Dataset[torch.Tensor]):
        def __init__(self, count: int = 4) -> None:
            self.count = count

        def __len__(self) -> int:
            return self.count

    train, val = paceline.get_data("squares", count=9)
    assert isinstance(train, Squares) and len(train) == 9 and val is None


@pytest.mark.parametrize("made", [None, (), ([1], [2], [3]), {"train": [1]}, (None, [1]), 7], ids=str)
def test_what_a_dataset_function_may_not_return_is_named_with_its_line(made: Any) -> None:
    @paceline.register_data("odd")
    def odd(path: str) -> Any:
        return made

    with pytest.raises(DataError) as caught:
        paceline.get_data("odd", path="x")
    line = odd.__code__.co_firstlineno
    assert caught.value.code == "data.not-a-pair" and f"test_datasets.py:{line}" in caught.value.what
    with pytest.raises(DataError) as missing:
        paceline.get_data("odd")
    assert missing.value.code == "data.missing-option" and "requires the option 'path'" in missing.value.what
    assert f"test_datasets.py:{line}" in missing.value.what


def test_a_registration_without_a_name_is_refused() -> None:
    with pytest.raises(DataError, match="Expected a name") as caught:

        @paceline.register_data  # type: ignore[arg-type]
        def nameless() -> Any: ...

    assert caught.value.code == "data.bad-registration"
    with pytest.raises(DataError, match="got 3"):
        paceline.register_data("three")(3)  # type: ignore[type-var]
