"""A save by a process that is killed (SIGKILL) at a random moment, and what can be loaded afterwards."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from faults import saves
from faults.peers import FAILURES, Content, Peer


def content(seed: int, tensors: int) -> Content:
    """4 MB a tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {f"model/{number}": torch.randn(1000, 1000, generator=generator) for number in range(tensors)}


def killed(peer: Peer, folder: Path, new: Content, delay: float) -> bool:
    """Save in a child that is killed after `delay` seconds; False if it was done by then."""
    ready, begin = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(begin, b"x")
            peer.save(folder, new)
            code = 0
        finally:
            os._exit(code)
    os.read(ready, 1)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(ready)
    os.close(begin)
    return os.WIFSIGNALED(status)


def outcome(peer: Peer, folder: Path, old: Content | None, new: Content) -> str:
    try:
        loaded = saves.bits(peer.load(folder, new))
    except FAILURES:
        return "nothing"
    if loaded == saves.bits(new):
        return "new"
    return "old" if old is not None and loaded == saves.bits(old) else "mixture"


def kill_saves(peer: Peer, kills: int, *, over_old: bool, tensors: int, seed: int) -> Counter[str]:
    """What was found after each kill. Saves that had ended by then are not counted."""
    old, new = content(1, tensors), content(2, tensors)
    chance = random.Random(seed)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "timed"
        peer.save(folder, old)
        began = time.perf_counter()
        peer.save(folder, new)
        longest = time.perf_counter() - began
        shutil.rmtree(folder)
        while counts.total() < kills:
            if over_old:
                peer.save(folder, old)
            if killed(peer, folder, new, chance.uniform(0, longest)):
                counts[outcome(peer, folder, old if over_old else None, new)] += 1
            shutil.rmtree(folder, ignore_errors=True)
    return counts
