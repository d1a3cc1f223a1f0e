"""Tests with real services. Where they are asked for, in CI, one that is skipped has failed: it shows nothing."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("PACELINE_SYSTEM_TESTS") == "1":
        report.outcome, report.longrepr = "failed", f"skipped under PACELINE_SYSTEM_TESTS=1: {report.longrepr}"
    return report
