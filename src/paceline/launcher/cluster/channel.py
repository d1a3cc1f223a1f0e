"""Words between launchers: JSON messages over TCP, each signed with the job's token.

Both sides draw a random number; the key of a connection follows from these and the token. Every frame carries a
signature over its direction, its number and its content, so that nothing can be forged, replayed or put in another
order by somebody who does not have the token. Nothing is encrypted: messages hold no secrets.

    server: MAGIC, 32 random bytes          client: 32 random bytes
    both:   length (4 bytes), signature (32 bytes), JSON
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError
from paceline.runtime.environment import TOKEN

Message = dict[str, Any]

_MAGIC = b"paceline-1\n"
_NONCE, _SIGNATURE, _LENGTH = 32, 32, 4
_LARGEST = 16 << 20  # bytes of a message
_LARGEST_OF_A_STRANGER = 1 << 20  # until the other side has shown that it holds the token
_SEND_SECONDS = 10.0
_SHORTEST_TOKEN = 16
_HANDSHAKE_SECONDS = 10.0
_REACH_SECONDS = 2.0  # for one address of several; those that wait try again


class Closed(Exception):
    """The other side is gone, or is not who it should be."""


class Channel:
    """One end of a connection. Reading never blocks; what is sent is small and goes out at once."""

    def __init__(self, connection: socket.socket, token: str, *, is_server: bool) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _miss_dead_machines(connection)
        _keep_from_children(connection)
        connection.setblocking(False)
        self._socket, self._token, self._is_server = connection, token.encode(), is_server
        self._own_nonce = secrets.token_bytes(_NONCE)
        self._key: bytes | None = None
        self._sent = self._received = 0
        self._buffer = b""
        self.heard = time.monotonic()  # when something that was in order arrived last
        self._write((_MAGIC if is_server else b"") + self._own_nonce)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_proven(self) -> bool:
        """Whether the other side has shown that it holds the token."""
        return self._received > 0

    @property
    def _largest(self) -> int:
        return _LARGEST if self.is_proven else _LARGEST_OF_A_STRANGER

    @property
    def own_address(self) -> str:
        return str(self._socket.getsockname()[0])

    @property
    def peer_address(self) -> str:
        return str(self._socket.getpeername()[0])

    def send(self, message: Message) -> None:
        if self._key is None:
            raise Closed("the other side has not introduced itself")
        payload = json.dumps(message).encode()
        signature = self._sign(payload, self._sent, from_server=self._is_server)
        self._sent += 1
        self._write(len(payload).to_bytes(_LENGTH, "big") + signature + payload)

    def receive(self) -> list[Message]:
        """What has arrived since the last call."""
        ended = self._read()
        messages = []
        if self._key is None:
            self._meet()
        while self._key is not None and (payload := self._next_frame()) is not None:
            messages.append(json.loads(payload))
        if ended and not messages:
            raise Closed("the connection was closed")
        return messages

    def close(self) -> None:
        self._socket.close()

    def _read(self) -> bool:
        try:
            while data := self._socket.recv(1 << 16):
                self._buffer += data
                if len(self._buffer) > self._largest + (1 << 16):
                    return False  # the rest stays in the socket until this is dealt with
        except BlockingIOError:
            return False
        except OSError as error:
            raise Closed(error.strerror or str(error)) from None
        return True

    def _meet(self) -> None:
        greeting = b"" if self._is_server else _MAGIC
        if not greeting.startswith(self._buffer[: len(greeting)]):
            raise Closed("that is no launcher of paceline")
        if len(self._buffer) >= len(greeting) + _NONCE:
            theirs = self._buffer[len(greeting) : len(greeting) + _NONCE]
            self._buffer = self._buffer[len(greeting) + _NONCE :]
            nonces = self._own_nonce + theirs if self._is_server else theirs + self._own_nonce
            self._key = hmac.digest(self._token, nonces, hashlib.sha256)

    def _next_frame(self) -> bytes | None:
        begin = _LENGTH + _SIGNATURE
        if len(self._buffer) < _LENGTH:
            return None
        length = int.from_bytes(self._buffer[:_LENGTH], "big")
        if length > self._largest:
            raise Closed(f"a message of {length} bytes was announced")
        if len(self._buffer) < begin + length:
            return None
        signature, payload = self._buffer[_LENGTH:begin], self._buffer[begin : begin + length]
        expected = self._sign(payload, self._received, from_server=not self._is_server)
        if not hmac.compare_digest(signature, expected):
            raise Closed("a message was not signed with this job's token")
        self._buffer = self._buffer[begin + length :]
        self._received += 1
        self.heard = time.monotonic()
        return payload

    def _sign(self, payload: bytes, number: int, *, from_server: bool) -> bytes:
        assert self._key is not None
        return hmac.digest(self._key, bytes([from_server]) + number.to_bytes(8, "big") + payload, hashlib.sha256)

    def _write(self, data: bytes) -> None:
        self._socket.settimeout(_SEND_SECONDS)
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise Closed(error.strerror or str(error)) from None
        finally:
            self._socket.setblocking(False)


def _miss_dead_machines(connection: socket.socket) -> None:
    """The kernel asks whether the other machine still lives, also while a launcher there is busy."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000)


def _keep_from_children(connection: socket.socket) -> None:
    """A connection that ranks were forked with would outlive its launcher, and nobody would miss that."""
    own = weakref.ref(connection)

    def close() -> None:
        inherited = own()
        if inherited is not None:
            inherited.close()

    os.register_at_fork(after_in_child=close)


def connect(addresses: Sequence[tuple[str, int]], token: str) -> Channel | None:
    """A channel to the first address that a launcher of this job answers at; None where nobody listens yet."""
    for address in addresses:
        try:
            connection = socket.create_connection(address, timeout=_REACH_SECONDS)
        except OSError:
            continue
        try:
            channel = Channel(connection, token, is_server=False)
            _introduce(channel)
            return channel
        except Closed:
            connection.close()
    return None


def _introduce(channel: Channel) -> None:
    """Wait until the server has introduced itself."""
    end = time.monotonic() + _HANDSHAKE_SECONDS
    while channel._key is None:
        if time.monotonic() > end:
            raise Closed("nobody answered")
        channel.receive()
        time.sleep(0.005)


def job_token() -> str:
    """The secret that launchers of one job share when a person starts each of them: PACELINE_TOKEN, of which ranks do
    not learn, else the one in ~/.paceline/token, which is made when it is first needed."""
    if told := os.environ.pop(TOKEN, None):
        return told
    path = Path.home() / ".paceline" / "token"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not path.exists():
        own = path.with_name(f"token-{os.getpid()}-{secrets.token_hex(4)}")
        own.touch(mode=0o600)
        own.write_text(secrets.token_hex(32))
        with suppress(FileExistsError):  # another launcher was quicker: its token counts
            os.link(own, path)
        own.unlink()
    return _read_token(path)


def _read_token(path: Path) -> str:
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise LaunchError(
            "open-token",
            f"Others can read {path}.",
            why="who has the token can start and stop this user's jobs",
            fix=f"rm {path}; a new one is made when it is needed. Copy it to the other machines again",
        )
    token = path.read_text().strip()
    if len(token) < _SHORTEST_TOKEN:
        raise LaunchError(
            "open-token",
            f"{path} holds no token of {_SHORTEST_TOKEN} letters or more.",
            why="a short one can be guessed",
            fix=f"rm {path}; a new one is made when it is needed. Copy it to the other machines again",
        )
    return token
