"""The `paceline` logger: everything that paceline shows, except the progress bar and results.

    logging.getLogger("paceline").setLevel(logging.ERROR)  # silence
    logging.getLogger("paceline").addHandler(handler)      # route or format; a NullHandler leaves it to the root logger

Nothing is configured on import. When there is a first line to show, a console handler is installed, unless "paceline"
has handlers already. Every record has a `rank`: an int on a rank, None in a launcher.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

Stream = Literal["stdout", "stderr"]

_LOGGER = logging.getLogger("paceline")


class Log(logging.LoggerAdapter[logging.Logger]):
    """The `paceline` logger as one rank or launcher uses it: only rank 0 logs, and `quiet` leaves warnings."""

    def __init__(
        self, rank: int | None = None, *, quiet: bool = False, every_rank: bool = False, stream: Stream = "stderr"
    ) -> None:
        super().__init__(_LOGGER, {"rank": rank, "stream": stream})
        self._shows = not rank or every_rank
        self._level = logging.WARNING if quiet else logging.NOTSET

    def isEnabledFor(self, level: int) -> bool:
        if not self._shows or level < self._level:
            return False
        _ensure_handler()
        return super().isEnabledFor(level)


def rank_log(rank: int, *, quiet: bool = False) -> Log:
    """For a rank, which writes to stdout. Only rank 0 logs."""
    return Log(rank, quiet=quiet, stream="stdout")


# For launchers, which write to stderr. Bound methods rather than functions, so that a record names its caller.
_launcher = Log()
info, warning = _launcher.info, _launcher.warning


class ConsoleHandler(logging.Handler):
    """Writes to the standard streams as they are when a record arrives: ranks replace theirs, as does the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=getattr(sys, getattr(record, "stream", "stderr")), flush=True)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"{record.levelname.lower()}: {text}" if record.levelno >= logging.WARNING else text


def _ensure_handler() -> None:
    """The user's handlers and level come first."""
    if not _LOGGER.handlers:
        _LOGGER.addHandler(ConsoleHandler())
        _LOGGER.propagate = False  # or a script that calls logging.basicConfig() would show every line twice
    if _LOGGER.level == logging.NOTSET:  # or the root logger's WARNING would hold
        _LOGGER.setLevel(logging.INFO)
