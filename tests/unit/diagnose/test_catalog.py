"""Error pages."""

from __future__ import annotations

import pytest

from paceline.diagnose import catalog
from paceline.errors import PacelineError


def test_a_code_has_a_page_and_a_family_lists_its_codes() -> None:
    assert catalog.page("launch.no-coordinator").startswith("launch.no-coordinator\n\n")
    codes = [line.split()[0] for line in catalog.page("launch").splitlines()]
    assert "launch.coordinator-lost" in codes and all(code.startswith("launch.") for code in codes)


def test_an_unknown_code_suggests_a_known_one() -> None:
    with pytest.raises(PacelineError, match=r"(?s)unknown-code.*Unknown error code.*did you mean.*launch\.no-script"):
        catalog.page("launch.no-scrip")
