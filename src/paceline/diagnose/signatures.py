"""Failure signatures: what a traceback, a coded error or the last lines of a log are about.

The patterns include the names of torch's own components where possible: a user's connection to something else, such as
a download that fails, is an exception like any other.
"""

from __future__ import annotations

import re
from typing import Literal

Signature = Literal["gpu-memory", "lost-connection", "port-in-use", "timeout", "version-mismatch"]

_VERSION_CODES = {"world.different-versions", "launch.node-differs"}
_PORT = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_GPU_MEMORY = re.compile(r"(CUDA|HIP|XPU) out of memory|\bOutOfMemoryError\b")
_TIMEOUT = re.compile(
    r"Timed out waiting \d+ms|Timed out after \d+ seconds waiting for clients|timed out after \d+ms"
    r"|Watchdog caught collective operation timeout|Application timeout caused pair closure"
    r"|DistStoreError: .*[Tt]ime|wait timeout after \d+ms"
)
_LOST = re.compile(
    r"(gloo/|RuntimeError: |DistBackendError: ).*(Connection (reset|closed) by peer|Broken pipe)"
    r"|remote process exited or there was a network error|ncclRemoteError"
    r"|DistNetworkError|failed to recv, got 0 bytes"
)
_MISMATCH = re.compile(r"op\.preamble\.length <= op\.nbytes|distributed collective mismatch")
_PEER = re.compile(r"(?:peer|error) (?:\[([\da-fA-F.:]+)\]:|([\w.-]+)<)(\d+)")
_BLAMED = re.compile(r" failed on rank (\d+): ")
_CHAIN = re.compile(r"\n(?:The above exception was the direct cause|During handling of the above exception)")
_TRACEBACK = "Traceback (most recent call last):\n"


def classify(text: str, code: str) -> Signature | None:
    """The known signature of a failure, or None. In a chain of exceptions the first counts. `code` is the code of a
    paceline error, or empty."""
    text = _without_source(_CHAIN.split(text)[0])
    if code in _VERSION_CODES:
        return "version-mismatch"
    if code.endswith(".port-in-use") or _PORT.search(text):
        return "port-in-use"
    if code == "train.out-of-memory" or _GPU_MEMORY.search(text):
        return "gpu-memory"
    if _TIMEOUT.search(text):
        return "timeout"
    if _LOST.search(text):
        return "lost-connection"
    return None


def _without_source(text: str) -> str:
    """A traceback without the source lines it quotes: only the error's own text counts."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("    "))


def blamed_rank(text: str) -> int | None:
    """The rank whose error this one only repeats: a failure in one rank's part of a save is raised on every rank."""
    found = _BLAMED.search(text)
    return int(found.group(1)) if found else None


def is_mismatch(text: str) -> bool:
    """Whether gloo received the message of another collective, or a tensor of another size. It throws in a thread of
    its own, which aborts the process, or in the one that waits."""
    return _MISMATCH.search(text) is not None


def has_traceback(text: str) -> bool:
    return _TRACEBACK in text


def exception_name(text: str) -> str:
    """The class of the exception at the end of a traceback."""
    after = text.rpartition(_TRACEBACK)[2]
    last = next((line for line in after.splitlines() if line and not line.startswith(" ")), "")
    name = re.match(r"[A-Za-z_][\w.]*", last)
    return name.group() if name else ""


def peers(text: str) -> list[str]:
    """Addresses of the peers to which a connection was lost, as reported by gloo and NCCL."""
    return [f"{address or name}:{port}" for address, name, port in _PEER.findall(text)]
