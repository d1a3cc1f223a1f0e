"""A pytest plugin, found by pytest where paceline is installed: `--no-leaks` fails a test that leaves things behind.

Our own tests switch it on in their conftest; it does nothing for anybody who did not ask.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-leaks",
        action="store_true",
        help="fail a test that leaves a process, a port, an environment variable or a process group behind",
    )


@pytest.fixture(autouse=True)
def paceline_no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.config.getoption("--no-leaks"):
        yield
        return
    from paceline.testing import leaks

    before = leaks.take()
    yield
    left = leaks.find(before)
    if left:
        pytest.fail("the test left something behind: " + "; ".join(left), pytrace=False)
