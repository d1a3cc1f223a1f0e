"""The `paceline` logger: all output except the progress bar and results.

    logging.getLogger("paceline").setLevel(logging.ERROR)  # silence
    logging.getLogger("paceline").addHandler(handler)      # route or format; add a NullHandler to use the root logger

Nothing is configured on import. The first message installs a console handler, unless "paceline" has handlers already.
Every record has a `rank`: an int on a rank, None in a launcher.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

Stream = Literal["stdout", "stderr"]

_LOGGER = logging.getLogger("paceline")


class Log(logging.LoggerAdapter[logging.Logger]):
    """The `paceline` logger of a rank or launcher. By default only rank 0 logs; `quiet` hides all but warnings."""

    def __init__(
        self, rank: int | None = None, *, quiet: bool = False, every_rank: bool = False, stream: Stream = "stderr"
    ) -> None:
        super().__init__(_LOGGER, {"rank": rank, "stream": stream})
        self._enabled = not rank or every_rank
        self._level = logging.WARNING if quiet else logging.NOTSET
        self.on_warning: Callable[[str], None] | None = None  # also called with the text of each warning

    def isEnabledFor(self, level: int) -> bool:
        if not self._enabled or level < self._level:
            return False
        _ensure_handler()
        return super().isEnabledFor(level)

    def warning(self, msg: object, *args: object, **kwargs: Any) -> None:
        if self.on_warning is not None:
            self.on_warning(str(msg))
        super().warning(msg, *args, **{"stacklevel": 2, **kwargs})  # the record names our caller


@contextmanager
def at_level(name: str, level: int) -> Iterator[None]:
    """Another level for the logger of that name."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def rank_log(rank: int, *, quiet: bool = False) -> Log:
    """The logger of a rank, which writes to stdout. Only rank 0 logs."""
    return Log(rank, quiet=quiet, stream="stdout")


# For launchers, which write to stderr. Bound methods rather than functions, so that a record names its caller.
_launcher = Log()
info, warning = _launcher.info, _launcher.warning


class ConsoleHandler(logging.Handler):
    """Writes to the current sys.stdout or sys.stderr, which ranks and the progress bar may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=getattr(sys, getattr(record, "stream", "stderr")), flush=True)

    def format(self, record: logging.LogRecord) -> str:
        text, level = super().format(record), record.levelname.lower()  # a line break that ends a bar stays first
        return text if record.levelno < logging.WARNING else "\n" * text.startswith("\n") + f"{level}: {text.lstrip()}"


def _ensure_handler() -> None:
    """Configure the logger, unless the user has set handlers or a level."""
    if not _LOGGER.handlers:
        _LOGGER.addHandler(ConsoleHandler())
        _LOGGER.propagate = False  # or a script that calls logging.basicConfig() would show every line twice
    if _LOGGER.level == logging.NOTSET:  # or the level of the root logger, WARNING, would apply
        _LOGGER.setLevel(logging.INFO)
