"""A pytest plugin, loaded by pytest if paceline is installed. It does nothing without `--no-leaks`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-leaks",
        action="store_true",
        help="fail tests that leak a process, a port, an environment variable or a process group",
    )


@pytest.fixture(autouse=True)
def paceline_no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.config.getoption("--no-leaks"):
        yield
        return
    from paceline.testing import leaks

    before = leaks.snapshot()
    yield
    leaked = leaks.find(before)
    if leaked:
        pytest.fail("the test leaked resources: " + "; ".join(leaked), pytrace=False)
