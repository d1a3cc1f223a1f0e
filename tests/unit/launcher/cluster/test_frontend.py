"""Launchers that exit before they join; tests/system has real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.config.launch import LaunchSpec, NodeRange
from paceline.launcher.cluster import frontend
from paceline.launcher.workload import Workload

BUSY = "busy"
WRONG = "no such node"


class Refusing:
    """A backend whose launchers exit for these reasons, one after the other."""

    names = ("a",)

    def __init__(self, reasons: Iterator[str]) -> None:
        self._reasons, self._is_started, self.starts = reasons, False, 0

    def start(self, node: int, order: bytes) -> None:
        self._is_started = True
        self.starts += 1

    def ended(self) -> dict[int, str]:
        ended = {0: next(self._reasons)} if self._is_started else {}
        self._is_started = False
        return ended

    def is_accident(self, reason: str) -> bool:
        return reason == BUSY

    def stop(self) -> None:
        pass


@pytest.mark.parametrize(
    ("reasons", "starts", "code"),
    [
        ([BUSY] * 100, frontend._MOST_STARTS, "launch.node-unavailable"),
        ([BUSY, BUSY, WRONG], 3, "launch.node-failed"),
        ([WRONG], 1, "launch.node-failed"),
    ],
)
def test_a_launcher_that_an_accident_ended_is_started_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], reasons: list[str], starts: int, code: str
) -> None:
    monkeypatch.setattr(frontend, "_MAX_PAUSE", 0.0)
    backend = Refusing(iter(reasons))
    spec = LaunchSpec(nodes=NodeRange(1, 1))
    ended = frontend.launch_on(backend, Workload(lambda: None), spec, [1], address="127.0.0.1")
    said = capfd.readouterr().err
    assert (ended.status, backend.starts) == (2, starts)
    assert f"[{code}]" in said and reasons[starts - 1] in said
    assert said.count("the launcher on a did not start (busy); starting it again") == starts - 1
