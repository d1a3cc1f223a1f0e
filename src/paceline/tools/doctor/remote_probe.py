"""Runs on a host before anything is launched there: ssh_hosts.py sends this file over ssh to the host's interpreter,
followed by a call of `main`.

That interpreter may be old, and paceline may be missing: standard library only, no syntax newer than Python 3.7. Each
line of the answer has a mark, since login shells print lines of their own, and is sent as soon as it is known.
"""

import importlib
import json
import os
import platform
import socket
import struct
import sys
import time

MARK = "paceline-doctor "


def main(request: str) -> None:
    wanted = json.loads(request)
    connection = os.environ.get("SSH_CONNECTION", "").split()  # client address and port, server address and port
    _tell("address", connection[2] if len(connection) == 4 else "")
    _tell("versions", {name: _version(name) for name in ("paceline", "python", "torch")})
    _tell("has_folder", os.path.isdir(wanted["folder"]))  # noqa: PTH112
    addresses = connection[:1] * wanted["by_ssh"] + wanted["addresses"]
    _tell("connection", _connect(addresses, wanted["port"], bytes.fromhex(wanted["hello"]), wanted["seconds"]))
    _tell("import_error", _import_error())


def _tell(name: str, value: object) -> None:
    sys.stdout.write(MARK + json.dumps({name: value}) + "\n")
    sys.stdout.flush()


def _version(name: str) -> str:
    if name == "python":
        return platform.python_version()
    try:
        from importlib import metadata

        return metadata.version(name)
    except Exception:  # Python 3.7 has no such module; others differ in what they raise
        return "not installed"


def _connect(addresses: "list[str]", port: int, hello: bytes, seconds: float) -> "dict[str, object]":
    """Try the addresses of the front end. `clock_offset`: seconds by which the clock here is ahead of the one there."""
    errors = []
    for address in dict.fromkeys(addresses):
        try:
            with socket.create_connection((address, port), timeout=seconds) as connection:
                began = time.time()
                connection.sendall(hello)
                answer = connection.recv(8, socket.MSG_WAITALL)
                there = struct.unpack("!d", answer)[0]
                return {"address": address, "clock_offset": (began + time.time()) / 2 - there}
        except (OSError, struct.error) as error:
            reason = getattr(error, "strerror", None) or error
            errors.append(f"{address}:{port}: {reason}")
    return {"errors": errors}


def _import_error() -> str:
    for name in ("paceline", "torch"):
        try:
            importlib.import_module(name)
        except BaseException as error:
            return f"{name}: {type(error).__name__}: {error}"
    return ""
