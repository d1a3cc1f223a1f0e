"""The coordinator's server: accepts connections, and drops those that do not authenticate in time."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

from paceline.launcher.cluster.channel import Channel, ChannelClosed, Message

_MAX_PENDING, _PENDING_SECONDS = 64, 10.0


class ConnectionServer:
    """A connection is pending until `admit`; one that is still pending after some seconds is closed."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        listener.setblocking(False)
        self._listener, self._token = listener, token
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._pending: dict[Channel, float] = {}
        self._admitted: set[Channel] = set()

    @property
    def address(self) -> str:
        return str(self._listener.getsockname()[0])

    def receive(self, timeout: float) -> Iterator[tuple[Channel, Message | ChannelClosed]]:
        """Messages that arrive within `timeout` seconds; for a connection that was closed, the reason."""
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
                continue
            channel: Channel = key.data
            try:
                for message in channel.receive():
                    yield channel, message
            except ChannelClosed as closed:
                yield channel, closed
            except ValueError as error:  # invalid JSON
                yield channel, ChannelClosed(str(error))
        for channel, since in list(self._pending.items()):
            if time.monotonic() - since > _PENDING_SECONDS:
                self.drop(channel)

    def admit(self, channel: Channel) -> None:
        del self._pending[channel]
        self._admitted.add(channel)

    def drop(self, channel: Channel) -> None:
        """Close one connection, if it is still open."""
        if channel in self._admitted or channel in self._pending:
            self._admitted.discard(channel)
            self._pending.pop(channel, None)
            self._selector.unregister(channel)
            channel.close()

    def close(self) -> None:
        for channel in [*self._admitted, *self._pending]:
            self.drop(channel)
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client has already disconnected
            return
        if len(self._pending) < _MAX_PENDING:
            with suppress(ChannelClosed):
                channel = Channel(connection, self._token, is_server=True)
                self._pending[channel] = time.monotonic()
                self._selector.register(connection, selectors.EVENT_READ, channel)
                return
        connection.close()
