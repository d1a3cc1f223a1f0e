"""The coordinator's server: accepts connections, and drops those that do not authenticate in time.

Anybody who reaches the port can connect, so connections that have not joined are limited in number and in time, and a
channel reads only a few bytes before the client has proved that it holds the token. Beyond the limit a new connection
replaces the oldest of the address that has most of them: whoever floods the port displaces itself, and a node of the
job still gets in.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterator

from paceline.launcher.cluster.channel import AuthenticationFailed, Channel, ChannelClosed, InvalidMessage, Message

_MAX_PENDING, _PENDING_SECONDS = 256, 10.0
_FAIR_SECONDS = 0.5  # in which a connection is not replaced: enough for a node to join
_ACCEPTED_AT_ONCE = 32  # then the nodes are served again
_PAUSE_SECONDS = 0.05  # without accepting, if there is no room
_SILENT_SECONDS = 30.0  # between two lines about rejected connections
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class RejectionLog:
    """Anybody can have connections rejected, so only the first of a while is told."""

    def __init__(self) -> None:
        self._number, self._silent_until = 0, 0.0

    def note(self, channel: Channel, closed: ChannelClosed) -> str | None:
        """What to tell about a connection that was closed before it joined, if anything."""
        if not isinstance(closed, (AuthenticationFailed, InvalidMessage)):
            return None
        self._number += 1
        if time.monotonic() < self._silent_until:
            return None
        self._silent_until = time.monotonic() + _SILENT_SECONDS
        why = "wrong token" if isinstance(closed, AuthenticationFailed) else f"invalid message ({closed})"
        more = f"; {self._number} rejected so far" if self._number > 1 else ""
        return f"rejected a connection from {channel.peer_address}: {why}{more}"


class ConnectionServer:
    """A connection is pending until `admit`; one that is still pending after some seconds is closed."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        listener.setblocking(False)
        self._listener, self._token = listener, token
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._paused_until: float | None = None
        self._pending: dict[Channel, float] = {}  # since when; the oldest is the first
        self._admitted: set[Channel] = set()

    @property
    def address(self) -> str:
        return str(self._listener.getsockname()[0])

    def receive(self, timeout: float) -> Iterator[tuple[Channel, Message | ChannelClosed]]:
        """Messages that arrive within `timeout` seconds; for a connection that was closed, the reason."""
        if self._paused_until is not None and time.monotonic() > self._paused_until:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._paused_until = None
        ready = [key.data for key, _ in self._selector.select(timeout)]
        for channel in sorted(filter(None, ready), key=lambda each: each not in self._admitted):  # nodes come first
            try:
                for message in channel.receive():
                    if self._is_open(channel):  # not if it was dropped for an earlier message
                        yield channel, message
            except ChannelClosed as closed:
                if self._is_open(channel):
                    yield channel, closed
        if None in ready:  # the listener
            self._accept()
        for channel, since in list(self._pending.items()):
            if time.monotonic() - since > _PENDING_SECONDS:
                self.drop(channel)

    def admit(self, channel: Channel) -> None:
        del self._pending[channel]
        self._admitted.add(channel)

    def drop(self, channel: Channel) -> None:
        """Close one connection, if it is still open."""
        if self._is_open(channel):
            self._admitted.discard(channel)
            self._pending.pop(channel, None)
            self._selector.unregister(channel)
            channel.close()

    def close(self) -> None:
        for channel in [*self._admitted, *self._pending]:
            self.drop(channel)
        self._listener.close()
        self._selector.close()

    def _is_open(self, channel: Channel) -> bool:
        return channel in self._admitted or channel in self._pending

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            if len(self._pending) >= _MAX_PENDING and not self._make_room():
                break
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # often of the client, which has disconnected already
                if error.errno in _EXHAUSTED and not self._make_room():
                    break
                continue
            try:
                channel = Channel(connection, self._token, is_server=True)
                self._selector.register(channel, selectors.EVENT_READ, channel)
            except (ChannelClosed, OSError):
                connection.close()
            else:
                self._pending[channel] = time.monotonic()
        else:
            return
        # Leave the others in the kernel's queue for a moment: the listener stays readable, and we would not wait.
        self._selector.unregister(self._listener)
        self._paused_until = time.monotonic() + _PAUSE_SECONDS

    def _make_room(self) -> bool:
        """Drop the oldest connection of the address that has most of them, unless it is too young to have joined."""
        addresses = Counter(channel.peer_address for channel in self._pending)
        for address, _ in addresses.most_common(1):
            oldest = next(channel for channel in self._pending if channel.peer_address == address)
            if time.monotonic() - self._pending[oldest] > _FAIR_SECONDS:
                self.drop(oldest)
                return True
        return False
