"""Channels between launchers: JSON messages over TCP, signed with the job token.

Each side sends a nonce; the key of a connection is derived from both nonces and the token. The signature of a frame
covers its direction, its sequence number and its payload, so nobody without the token can forge, replay or reorder
frames. Nothing is encrypted: messages hold no secrets.

    server: MAGIC, nonce (32 bytes)
    client: nonce (32 bytes), then an empty frame, whose signature proves that it holds the token
    both:   length (4 bytes), signature (32 bytes), JSON
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import select
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
_MAX_BYTES = 16 << 20  # of a message
_MAX_UNAUTHENTICATED_BYTES = 256  # the same, for a server, until the client has proved that it holds the token
_SEND_SECONDS = 10.0
_CONNECT_SECONDS = 2.0  # per address; callers retry
_HANDSHAKE_SECONDS = 10.0
_MIN_TOKEN_LENGTH = 16
_open_connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class ChannelClosed(Exception):
    """The connection was closed, or what arrived is not from a launcher of this job."""


class AuthenticationFailed(ChannelClosed):
    """The peer does not hold the token of this job."""


class InvalidMessage(ChannelClosed):
    """The peer holds the token, but its message has no meaning."""


class Channel:
    """One end of a connection. Receiving never blocks; messages are small and sent at once."""

    def __init__(self, connection: socket.socket, token: str, *, is_server: bool) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _enable_keepalive(connection)
            # Read now: a connection that the peer has reset has no addresses any more.
            self.own_address, self.peer_address = (
                str(name[0]) for name in (connection.getsockname(), connection.getpeername())
            )
        except OSError as error:
            raise ChannelClosed(error.strerror or str(error)) from None
        _open_connections.add(connection)
        connection.setblocking(False)
        self._socket, self._token, self._is_server = connection, os.fsencode(token), is_server
        self._own_nonce = secrets.token_bytes(_NONCE)
        self._key: bytes | None = None
        self._sent = self._received = 0
        self._buffer = bytearray()
        self.last_received = time.monotonic()  # time of the last authenticated message
        self._write((_MAGIC if is_server else b"") + self._own_nonce)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_authenticated(self) -> bool:
        """Whether the peer has proved that it holds the token."""
        return self._received > 0

    @property
    def _max_bytes(self) -> int:
        return _MAX_BYTES if self.is_authenticated or not self._is_server else _MAX_UNAUTHENTICATED_BYTES

    def send(self, message: Message) -> None:
        if self._key is None:
            raise ChannelClosed("the handshake is not complete")
        self._send(json.dumps(message).encode())

    def _send(self, payload: bytes) -> None:
        signature = self._sign(payload, self._sent, from_server=self._is_server)
        self._sent += 1
        self._write(len(payload).to_bytes(_LENGTH, "big") + signature + payload)

    def receive(self) -> list[Message]:
        """Messages that arrived since the last call."""
        is_closed = self._read()
        messages = []
        if self._key is None:
            self._handshake()
        while self._key is not None and (payload := self._next_frame()) is not None:
            if payload:
                messages.append(_decode(payload))
        if is_closed and not messages:
            raise ChannelClosed("the connection was closed")
        return messages

    def close(self) -> None:
        self._socket.close()

    def _read(self) -> bool:
        try:
            while data := self._socket.recv(min(self._max_bytes, 1 << 16)):
                self._buffer += data
                if len(self._buffer) > self._max_bytes + _LENGTH + _SIGNATURE:
                    return False  # the rest stays in the socket until these messages are processed
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelClosed(error.strerror or str(error)) from None
        return True

    def _handshake(self) -> None:
        preamble = b"" if self._is_server else _MAGIC
        if not preamble.startswith(self._buffer[: len(preamble)]):
            raise ChannelClosed("not a paceline launcher")
        if len(self._buffer) >= len(preamble) + _NONCE:
            peer_nonce = bytes(self._buffer[len(preamble) : len(preamble) + _NONCE])
            del self._buffer[: len(preamble) + _NONCE]
            nonces = self._own_nonce + peer_nonce if self._is_server else peer_nonce + self._own_nonce
            self._key = hmac.digest(self._token, nonces, hashlib.sha256)
            if not self._is_server:
                self._send(b"")

    def _next_frame(self) -> bytes | None:
        begin = _LENGTH + _SIGNATURE
        if len(self._buffer) < _LENGTH:
            return None
        length = int.from_bytes(self._buffer[:_LENGTH], "big")
        if length > self._max_bytes:
            raise ChannelClosed(f"message too large: {length} bytes")
        if len(self._buffer) < begin + length:
            return None
        signature, payload = bytes(self._buffer[_LENGTH:begin]), bytes(self._buffer[begin : begin + length])
        expected = self._sign(payload, self._received, from_server=not self._is_server)
        if not hmac.compare_digest(signature, expected):
            raise AuthenticationFailed("message not signed with this job's token")
        del self._buffer[: begin + length]
        self._received += 1
        self.last_received = time.monotonic()
        return payload

    def _sign(self, payload: bytes, number: int, *, from_server: bool) -> bytes:
        assert self._key is not None
        return hmac.digest(self._key, bytes([from_server]) + number.to_bytes(8, "big") + payload, hashlib.sha256)

    def _write(self, data: bytes) -> None:
        self._socket.settimeout(_SEND_SECONDS)
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise ChannelClosed(error.strerror or str(error)) from None
        finally:
            self._socket.setblocking(False)


def _enable_keepalive(connection: socket.socket) -> None:
    """Let the kernel detect a dead machine, also while a launcher there is busy."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000)


def _close_in_forked_child() -> None:
    """A connection inherited by forked ranks would outlive its launcher, and its loss would go unnoticed."""
    for connection in list(_open_connections):
        connection.close()


os.register_at_fork(after_in_child=_close_in_forked_child)


def _decode(payload: bytes) -> Message:
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise InvalidMessage("it has no kind")
    return message


def connect(addresses: Sequence[tuple[str, int]], token: str) -> Channel | None:
    """A channel to the first address at which a paceline launcher answers; None if there is none yet."""
    for address in addresses:
        try:
            connection = socket.create_connection(address, timeout=_CONNECT_SECONDS)
        except OSError:
            continue
        try:
            channel = Channel(connection, token, is_server=False)
            _wait_for_handshake(channel)
            return channel
        except ChannelClosed:
            connection.close()
    return None


def _wait_for_handshake(channel: Channel) -> None:
    deadline = time.monotonic() + _HANDSHAKE_SECONDS
    while channel._key is None:
        if time.monotonic() > deadline:
            raise ChannelClosed("no answer")
        select.select([channel], [], [], 0.1)
        channel.receive()


def job_token() -> str:
    """The secret shared by the launchers of a job that are started by hand: PACELINE_TOKEN, which is removed from the
    environment of the ranks, else the content of ~/.paceline/token, which is created if it is missing."""
    if token := os.environ.pop(TOKEN, None):
        fix = f"export {TOKEN}=$(openssl rand -hex 32), and the same value on every node"
        return _checked(token.strip(), TOKEN, fix)
    path = Path.home() / ".paceline" / "token"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    if not path.exists():
        own = path.with_name(f"token-{os.getpid()}-{secrets.token_hex(4)}")
        own.touch(mode=0o600)
        own.write_text(secrets.token_hex(32))
        with suppress(FileExistsError):  # another launcher was faster: its token counts
            os.link(own, path)
        own.unlink()
    return _read_token(path)


def _read_token(path: Path) -> str:
    fix = f"rm {path}: a new one is created when it is needed; copy it to the other machines again"
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        why = "anybody who has the token can start and stop your jobs"
        raise LaunchError("open-token", f"Other users can read {path}.", why=why, fix=fix)
    return _checked(os.fsdecode(path.read_bytes()).strip(), str(path), fix)


def _checked(token: str, where: str, fix: str) -> str:
    if len(token) < _MIN_TOKEN_LENGTH:
        what = f"The token in {where} is shorter than {_MIN_TOKEN_LENGTH} characters."
        raise LaunchError("open-token", what, fix=fix)
    return token
