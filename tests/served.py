"""A page server in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.run.folder import RunFolder
from paceline.tools.watch.page_server import PageServer
from paceline.tools.watch.watched_runs import WatchedRuns


@contextmanager
def serving(chosen: list[RunFolder], root: Path, host: str = "127.0.0.1") -> Iterator[PageServer]:
    with serving_with(PageServer(WatchedRuns(chosen, root), host)) as server:
        yield server


@contextmanager
def serving_with(server: PageServer) -> Iterator[PageServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
