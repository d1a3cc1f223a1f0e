from __future__ import annotations

import mmap
import os
import threading

import pytest
import torch

from paceline.checkpoint import host_memory
from paceline.checkpoint.host_memory import HostMemory


def test_every_byte_can_be_used_and_is_backed_by_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PIECE", 1000)
    memory = HostMemory(10_001, None)
    memory.prepare()
    assert memory.bytes.shape == (10_001,) and not memory.bytes.any()
    memory.bytes.fill_(7)
    view = memory.bytes[9_000:]
    memory.unlock()
    del memory
    assert torch.equal(view, torch.full((1_001,), 7, dtype=torch.uint8))


def test_preparing_can_be_ended_early() -> None:
    memory = HostMemory(1 << 34, None)  # more than this machine may have: nothing is allocated until it is touched
    memory.stop()
    thread = threading.Thread(target=memory.prepare)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_a_forked_process_that_drops_the_memory_keeps_its_own() -> None:
    """With MADV_DONTFORK, mappings of the child are placed where the memory was, and removed with it."""
    size = 1 << 24
    kept = [host_memory._map(size) for _ in range(4)]
    child = os.fork()
    if not child:
        own = [mmap.mmap(-1, size) for _ in range(8)]
        kept.clear()
        for each in own:
            each[0] = 1  # a segmentation fault if it is gone
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
