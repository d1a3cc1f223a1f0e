"""Ranks that stand still, and what their launcher can read about them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import paceline
from paceline.diagnose.hang.evidence import RankEvidence
from paceline.errors import PacelineError
from paceline.launcher.local import hang_detector
from paceline.run import heartbeat
from paceline.run.folder import RunFolder
from paceline.run.heartbeat import RankPage
from paceline.runtime import environment

Pages = Mapping[int, RankPage]
Enough = Callable[[Sequence[RankEvidence]], object]
DEADLINE = 60.0


LOOKS = 5  # in a row: a rank that polls sleeps now and then


def all_stand_still(pages: Pages, ranks: int) -> bool:
    """On a machine under load, a rank that has not moved for a while may be waiting for the CPU."""
    stalled = len(pages) == ranks and all(page.place and page.stood >= 0.5 for page in pages.values())
    return stalled and all(_sleeps(page.pid) for page in pages.values())


def _sleeps(pid: int) -> bool:
    """Whether no thread of a process runs, or waits for the CPU."""
    try:
        stats = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread ended meanwhile
        return False
    return all(stat.rpartition(")")[2].split()[0] not in "RD" for stat in stats)


class Observer:
    """Waits in a thread until `ready(pages)`, collects evidence until it is `enough`, and kills the ranks."""

    def __init__(self, folder: Path, ready: Callable[[Pages], object], enough: Enough) -> None:
        self._folder, self._ready, self._enough = folder, ready, enough
        self.evidence: list[RankEvidence] = []
        self.pages: Pages = {}
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            self._observe()
        finally:  # or the test would wait for them
            for page in self.pages.values():
                with suppress(ProcessLookupError):
                    os.kill(page.pid, signal.SIGKILL)

    def _observe(self) -> None:
        deadline, looks = time.monotonic() + DEADLINE, 0
        while looks < LOOKS and time.monotonic() < deadline:
            looks = looks + 1 if self.pages and self._ready(self.pages) else 0
            time.sleep(0.02)
            with suppress(OSError):
                self.logs = RunFolder(Path((self._folder / "logs").read_text()))
                self.pages = heartbeat.read_pages(self.logs)
        pids = {rank: page.pid for rank, page in self.pages.items()}
        while not self.evidence or not (self._enough(self.evidence) or time.monotonic() > deadline):
            self.evidence = hang_detector.collect(self.logs, pids, node=0)


def observe(
    body: Callable[..., Any],
    ranks: int,
    folder: Path,
    ready: Callable[[Pages], object] | None = None,
    enough: Enough = lambda evidence: True,
) -> Observer:
    """Run `body` on ranks until all of them stand still, and read what can be read from outside."""

    def run() -> None:
        logs = environment.log_folder()
        assert logs is not None
        part = folder / f"logs-{os.getpid()}"
        part.write_text(str(logs))
        part.replace(folder / "logs")
        body()

    with Observer(folder, ready or (lambda pages: all_stand_still(pages, ranks)), enough) as observer:
        with suppress(PacelineError):
            paceline.launch(run, ranks=ranks)
    return observer
