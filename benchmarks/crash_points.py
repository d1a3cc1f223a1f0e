"""The tables of "Crash points" in docs/reliability.md. Exit status 1 if a guarantee of paceline is violated.

    python benchmarks/crash_points.py [random states per scenario] [kills per scenario]

First, states that a crash can leave: the file operations of a save are recorded, and every prefix of them is replayed,
with seeded combinations of what was not synced (the model: tests/faults/crash_states.py). Second, for comparison with
torch, processes that are killed (SIGKILL) at a random moment of a save of 40 MB, and what can be loaded afterwards.
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import torch

from faults import random_kills, saves
from faults.peers import PEERS

SEED = 5
TENSORS = 10  # of 4 MB each


def replay(random_states: int) -> int:
    """Return the number of wrong states."""
    print("| save | operations | states | intact one found | wrong |\n|---|---|---|---|---|")
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


def main() -> None:
    torch.set_num_threads(1)
    logging.disable()  # torch logs each load that fails
    random_states = int(sys.argv[1]) if len(sys.argv) > 1 else 450
    kills = int(sys.argv[2]) if len(sys.argv) > 2 else 60
    wrong = replay(random_states)
    print("| killed while saving | kills | old found | new found | none loadable | mixed state loaded |")
    print("|---|---|---|---|---|---|")
    for over_old in (True, False):
        for peer in PEERS:
            counts = random_kills.kill_saves(peer, kills, over_old=over_old, tensors=TENSORS, seed=SEED)
            where = "overwriting" if over_old else "into a fresh folder"
            numbers = " | ".join(str(counts[kind]) for kind in ("old", "new", "nothing", "mixture"))
            print(f"| {peer.name}, {where} | {kills} | {numbers} |", flush=True)
            if peer.name == "paceline":
                wrong += counts["mixture"] + (counts["nothing"] if over_old else 0)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
