"""The tables "Crash points" in docs/reliability.md. Exit status 1 if a promise of paceline does not hold.

    python benchmarks/crash_points.py [random states of each scenario] [kills of each]

First, states that a crash can leave: the file operations of a save are recorded, every prefix of them is replayed, and
seeded combinations of what was not synced (the model: tests/faults/crash_states.py). Second, with torch beside it,
processes that are killed (SIGKILL) at a random moment of a save of 40 MB, and what can be loaded then.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import torch

from faults import saves
from faults.peers import FAILURES, PEERS, Content, Peer

SEED = 5


def replay(random_states: int) -> int:
    """How many states were wrong."""
    print("| save | operations | states | a good one found | wrong |\n|---|---|---|---|---|")
    states = wrong = 0
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        root = Path(name)
        for recorded in saves.record_all(root):
            problems, count = [], 0
            for prefix, state in saves.crashes(recorded, random_states, SEED):
                count += 1
                place = root / "crashed"
                problem = saves.problem_after(recorded, prefix, state, place)
                if problem:
                    problems.append(f"after {prefix} operations: {problem}")
                shutil.rmtree(place)
            print(
                f"| {recorded.name} | {len(recorded.operations)} | {count:,} | {count - len(problems):,} "
                f"| {len(problems)} |",
                flush=True,
            )
            for problem in problems[:3]:
                print(f"    {problem}")
            states, wrong = states + count, wrong + len(problems)
    print(f"| all | | {states:,} | {states - wrong:,} | {wrong} |\n")
    return wrong if states >= 2000 or random_states < 300 else wrong + 1


def content(seed: int) -> Content:
    generator = torch.Generator().manual_seed(seed)
    return {f"model/{number}": torch.randn(1000, 1000, generator=generator) for number in range(10)}


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


def kill_saves(peer: Peer, kills: int, over_old: bool) -> Counter[str]:
    old, new = content(1), content(2)
    chance = random.Random(SEED)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "timed"
        peer.save(folder, old)
        began = time.perf_counter()
        peer.save(folder, new)
        longest = time.perf_counter() - began
        shutil.rmtree(folder)
        while sum(counts.values()) < kills:
            if over_old:
                peer.save(folder, old)
            if killed(peer, folder, new, chance.uniform(0, longest)):
                counts[outcome(peer, folder, old if over_old else None, new)] += 1
            shutil.rmtree(folder, ignore_errors=True)
    return counts


def main() -> None:
    torch.set_num_threads(1)
    logging.disable()  # torch logs each load that fails
    random_states = int(sys.argv[1]) if len(sys.argv) > 1 else 450
    kills = int(sys.argv[2]) if len(sys.argv) > 2 else 60
    wrong = replay(random_states)
    print("| killed while saving | kills | old found | new found | nothing loadable | mixture loaded |")
    print("|---|---|---|---|---|---|")
    for over_old in (True, False):
        for peer in PEERS:
            counts = kill_saves(peer, kills, over_old)
            where = "over an old one" if over_old else "into a fresh folder"
            numbers = " | ".join(str(counts[kind]) for kind in ("old", "new", "nothing", "mixture"))
            print(f"| {peer.name}, {where} | {kills} | {numbers} |", flush=True)
            if peer.name == "paceline":
                wrong += counts["mixture"] + (counts["nothing"] if over_old else 0)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
