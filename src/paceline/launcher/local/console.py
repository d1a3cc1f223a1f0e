"""Rank 0 on screen and in a file at the same time.

While a `Console` is open, the output of this process, and of every rank that does not redirect it, goes to a helper
process, which copies it to the screen and to a log. In a terminal, ranks get a pseudo-terminal, so that progress bars
stay live; the log keeps the final state of each line, without escape codes.
"""

from __future__ import annotations

import fcntl
import math
import os
import pty
import re
import selectors
import signal
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from paceline.run import regular_files
from paceline.runtime.processes import fork, set_title

_DRAIN_SECONDS = 2.0
_LOOK_SECONDS = 0.1  # between polls of followed logs
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]")


class Console:
    """`log` is that of rank 0; None if it runs on another node. `shown` are logs of further ranks to show on screen;
    every line is then prefixed with its rank."""

    def __init__(self, log: Path | None, shown: Mapping[int, Path] | None = None) -> None:
        self._log = log
        self._shown = shown or {}

    def __enter__(self) -> Console:
        _flush()
        self._screen = (os.dup(1), os.dup(2))
        readers, writers = _terminal() if os.isatty(1) else zip(os.pipe(), os.pipe(), strict=True)
        stop_reader, self._stop = os.pipe()
        self._copier = fork()
        if self._copier == 0:
            try:
                set_title("paceline: console", "pl-console")
                for descriptor in {*writers, self._stop}:
                    os.close(descriptor)
                routes = dict(zip(readers, self._screen, strict=False))
                followed = [_Followed(rank, path) for rank, path in self._shown.items() if rank or self._log is None]
                prefix = _prefix(0) if 0 in self._shown else b""
                _copy(routes, stop_reader, self._log, prefix, followed, terminal=len(readers) == 1)
            finally:
                os._exit(0)
        os.close(stop_reader)
        for descriptor in readers:
            os.close(descriptor)
        os.dup2(writers[0], 1)
        os.dup2(writers[1], 2)
        for descriptor in set(writers):
            os.close(descriptor)
        return self

    def __exit__(self, *exc: object) -> None:
        """Restore the output of this process, after everything that ranks wrote has been copied."""
        _flush()
        for number, descriptor in enumerate(self._screen, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        # Tell the copier to stop. It does not wait for the end of any pipe: a process left by a rank may hold them.
        with suppress(BrokenPipeError):
            os.write(self._stop, b".")
        os.close(self._stop)
        try:
            os.waitpid(self._copier, 0)
        except BaseException:  # a signal, while the copier cannot write to the screen
            os.kill(self._copier, signal.SIGKILL)
            os.waitpid(self._copier, 0)
            raise


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _terminal() -> tuple[Sequence[int], Sequence[int]]:
    """A pseudo-terminal of the same size that passes output through unchanged."""
    reader, writer = pty.openpty()
    attributes = termios.tcgetattr(writer)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(writer, termios.TCSANOW, attributes)
    _copy_size(1, reader)
    return [reader], [writer, writer]


def _copy_size(source: int, target: int) -> None:
    size = fcntl.ioctl(source, termios.TIOCGWINSZ, b"\0" * 8)
    fcntl.ioctl(target, termios.TIOCSWINSZ, size)


class _Followed:
    """Follows the log of a rank that does not write to the screen, line by line."""

    def __init__(self, rank: int, path: Path) -> None:
        self._prefix, self._path, self._rest = _prefix(rank), path, b""
        self._at = path.lstat().st_size if path.exists() else 0  # existing output is from an earlier start

    def new_lines(self, *, is_last: bool = False) -> bytes:
        """Complete lines; at the end also the last one if nothing ended it."""
        try:
            with os.fdopen(regular_files.open_descriptor(self._path), "rb") as file:
                file.seek(self._at)
                data = file.read()
        except OSError:
            return b""  # not created yet
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if is_last and self._rest:
            lines.append(self._rest)
        return b"".join(self._prefix + line + b"\n" for line in lines)


def _prefix(rank: int) -> bytes:
    """Colored by rank in a terminal."""
    words = f"[rank {rank}] "
    return (f"\x1b[{31 + rank % 6}m{words}\x1b[0m" if os.isatty(1) else words).encode()


def _copy(
    routes: dict[int, int], stop: int, log: Path | None, prefix: bytes, followed: Sequence[_Followed], *, terminal: bool
) -> None:
    """Copy until told to stop, then drain. Runs in the helper process."""
    # Ctrl-C is handled by ranks and the launcher, whose remaining output must still be copied.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    screen = next(iter(routes.values()))
    if terminal:
        [reader] = routes

        def resized(number: int, frame: FrameType | None) -> None:
            _copy_size(screen, reader)

        signal.signal(signal.SIGWINCH, resized)
    outputs = {reader: _Output(target, prefix) for reader, target in routes.items()}
    file = regular_files.open_log(log)
    with selectors.DefaultSelector() as selector:
        for reader in (*routes, stop):
            selector.register(reader, selectors.EVENT_READ)
        pending, patience, end = b"", _LOOK_SECONDS if followed else None, math.inf
        while ((ready := selector.select(patience)) or (followed and end == math.inf)) and time.monotonic() < end:
            for each in followed:
                _write(screen, each.new_lines())
            for key, _ in ready:
                data = _read(key.fd)
                if key.fd == stop:
                    patience, end = 0.0, time.monotonic() + _DRAIN_SECONDS
                if key.fd == stop or not data:
                    selector.unregister(key.fd)
                    continue
                outputs[key.fd].write(data)
                if terminal:
                    *lines, pending = (pending + data).split(b"\n")
                    # A progress bar redraws its line without ending it: keep only the last state.
                    pending = pending[pending.rstrip(b"\r").rfind(b"\r") + 1 :]
                    data = b"".join(_plain(line) + b"\n" for line in lines)
                _write(file, data)
        if pending:
            _write(file, _plain(pending) + b"\n")
    for output in outputs.values():
        output.finish()
    for each in followed:
        _write(screen, each.new_lines(is_last=True))


class _Output:
    """The screen, optionally with a prefix before every line."""

    def __init__(self, target: int, prefix: bytes) -> None:
        self._target, self._prefix, self._rest = target, prefix, b""

    def write(self, data: bytes) -> None:
        if self._prefix:
            *lines, self._rest = (self._rest + data).split(b"\n")
            data = b"".join(self._prefix + _plain(line) + b"\n" for line in lines)
        _write(self._target, data)

    def finish(self) -> None:
        """Show the last line, which nothing ended."""
        if self._rest:
            _write(self._target, self._prefix + _plain(self._rest) + b"\n")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # a pseudo-terminal whose other side is closed raises
        return b""


def _write(descriptor: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        pass  # the screen is gone (a closed pipe), or the disk of the log is full; keep writing the other


def _plain(line: bytes) -> bytes:
    """The final state of a redrawn line."""
    return _ESCAPES.sub(b"", line).rstrip(b"\r").rsplit(b"\r", 1)[-1]
