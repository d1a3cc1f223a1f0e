"""The door of a meeting: who comes, who has shown the token, and who is gone."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

from paceline.launcher.cluster.channel import Channel, Closed, Message

_STRANGERS, _STRANGER_SECONDS = 64, 10.0


class ConnectionServer:
    """Connections are strangers until `let_in`; those that do not get that far in time are closed."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        listener.setblocking(False)
        self._listener, self._token = listener, token
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._strangers: dict[Channel, float] = {}
        self._inside: set[Channel] = set()

    @property
    def address(self) -> str:
        return str(self._listener.getsockname()[0])

    def hear(self, timeout: float) -> Iterator[tuple[Channel, Message | Closed]]:
        """What came within that time: messages, and for connections that have ended, why."""
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
                continue
            channel: Channel = key.data
            try:
                for message in channel.receive():
                    yield channel, message
            except Closed as closed:
                yield channel, closed
            except ValueError as error:  # no JSON
                yield channel, Closed(str(error))
        for channel, since in list(self._strangers.items()):
            if time.monotonic() - since > _STRANGER_SECONDS:
                self.close(channel)

    def let_in(self, channel: Channel) -> None:
        del self._strangers[channel]
        self._inside.add(channel)

    def close(self, channel: Channel) -> None:
        if channel in self._inside or channel in self._strangers:
            self._inside.discard(channel)
            self._strangers.pop(channel, None)
            self._selector.unregister(channel)
            channel.close()

    def shut(self) -> None:
        for channel in [*self._inside, *self._strangers]:
            self.close(channel)
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # whoever came is gone again
            return
        if len(self._strangers) < _STRANGERS:
            with suppress(Closed):
                channel = Channel(connection, self._token, is_server=True)
                self._strangers[channel] = time.monotonic()
                self._selector.register(connection, selectors.EVENT_READ, channel)
                return
        connection.close()
