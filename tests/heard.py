"""What paceline says while tests listen."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


def of_training(record: logging.LogRecord) -> bool:
    """Not of the thread that judges by the clock."""
    return record.threadName != "paceline-rank-monitor"


@contextmanager
def heard(level: int = logging.WARNING) -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(of_training)
    logger = logging.getLogger("paceline")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
