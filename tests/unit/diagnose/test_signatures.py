"""What the text that a rank left is about."""

from __future__ import annotations

import pytest

from paceline.diagnose import signatures

GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/"
CLOSED = f"{GLOO}pair.cc:553] Connection closed by peer [10.0.0.2]:29082. This is typically caused by a remote worker"


def traceback(last: str, line: str = "step()") -> str:
    return f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    {line}\n{last}\n'


@pytest.mark.parametrize(
    ("last", "signature"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.", "gpu-memory"),
        (
            "torch.distributed.DistNetworkError: The server socket has failed to listen. code: -98, name: EADDRINUSE",
            "port-in-use",
        ),
        ("OSError: [Errno 98] Address already in use", "port-in-use"),
        (CLOSED, "lost-connection"),
        (f"{GLOO}pair.cc:537] Read error [10.0.0.3]:16557: Connection reset by peer.", "lost-connection"),
        ("torch.distributed.DistBackendError: ncclRemoteError: A call failed", "lost-connection"),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes.", "lost-connection"),
        (f"{GLOO}unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete", "timeout"),
        (f"{GLOO}pair.cc:1] Application timeout caused pair closure", "timeout"),
        ("torch.distributed.DistStoreError: wait timeout after 2000ms, keys: /default_pg/0//cpu//0/0", "timeout"),
        ("torch.distributed.DistStoreError: Timed out after 3 seconds waiting for clients. 1/2 clients", "timeout"),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", None),
        ("TimeoutError: timed out", None),
        ("ValueError: own", None),
    ],
)
def test_errors_of_torch_are_recognized_and_others_left_alone(last: str, signature: str | None) -> None:
    assert signatures.classify(traceback(last), "") == signature


@pytest.mark.parametrize(
    ("code", "signature"),
    [
        ("train.out-of-memory", "gpu-memory"),
        ("world.port-in-use", "port-in-use"),
        ("world.different-versions", "version-mismatch"),
        ("launch.node-differs", "version-mismatch"),
        ("data.no-such-file", None),
    ],
)
def test_codes_are_recognized(code: str, signature: str | None) -> None:
    assert signatures.classify(f"[{code}] It went wrong.", code) == signature


def test_of_chained_exceptions_the_first_counts() -> None:
    then = "\nDuring handling of the above exception, another exception occurred:\n\n"
    own, lost = traceback("ValueError: own"), traceback(CLOSED)
    assert signatures.classify(own + then + lost, "") is None
    assert signatures.classify(lost + then + own, "") == "lost-connection"


def test_source_lines_quoted_by_a_traceback_are_ignored() -> None:
    assert signatures.classify(traceback("RuntimeError: own", 'retry("address already in use")'), "") is None


def test_the_exception_of_a_traceback_and_the_peers_it_names() -> None:
    assert signatures.exception_name(traceback("torch.OutOfMemoryError: CUDA")) == "torch.OutOfMemoryError"
    assert signatures.exception_name("killed") == "killed" and signatures.exception_name("") == ""
    both = f"{CLOSED}\nnet error node-b<50123> remote"
    assert signatures.peers(both) == ["10.0.0.2:29082", "node-b:50123"]


def test_the_rank_whose_error_is_repeated() -> None:
    assert signatures.blamed_rank("Saving failed on rank 3: ValueError: own") == 3
    assert signatures.blamed_rank("Saving failed") is None
