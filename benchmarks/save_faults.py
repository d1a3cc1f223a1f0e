"""The tables of "Disk faults" in docs/reliability.md. Exit status 1 if a guarantee is violated.

    python benchmarks/save_faults.py          # the second table needs permission to mount

First, a save whose disk fails at one operation: every call of every operation, with every error, once and permanently.
Second, for comparison with torch, a real file system that becomes full during a save: 1 MB, with an old checkpoint of
0.3 MB, 0.2 MB free, and a new one of 0.6 MB.
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import torch

from faults import saves, write_faults
from faults.peers import DCP, FAILURES, Content, Paceline, Peer, TorchSave
from paceline.errors import CheckpointError


class PacelineFull(Paceline):
    """Reports enough free space, as if another program took it a moment later."""

    name = "paceline"

    def save(self, folder: Path, content: Content) -> None:
        saves.save(folder, 1, content, write_faults.Optimist(), overwrite=True)


def inject(root: Path) -> int:
    """Return the number of faults that violated a guarantee."""
    print("| save | faults | old or new still good, error with a code, next save works | wrong |\n|---|---|---|---|")
    counts: Counter[str] = Counter()
    problems: dict[str, list[str]] = {way.name: [] for way in write_faults.WAYS}
    for fault in write_faults.faults(root, write_faults.ALL_ERRORS):
        counts[fault.way.name] += 1
        problem = write_faults.problem(root / "faulty", fault)
        if problem is not None:
            problems[fault.way.name].append(f"{fault}: {problem}")
        shutil.rmtree(root / "faulty")
    for name, found in problems.items():
        print(f"| {name} | {counts[name]:,} | {counts[name] - len(found):,} | {len(found)} |")
        for problem in found[:3]:
            print(f"    {problem}")
    wrong = sum(len(found) for found in problems.values())
    print(f"| all | {counts.total():,} | {counts.total() - wrong:,} | {wrong} |\n")
    return wrong


def content(seed: int, rows: int) -> Content:
    return {"model/weight": torch.randn(rows, 1000, generator=torch.Generator().manual_seed(seed))}


def full_disk(peer: Peer, root: Path, over_old: bool) -> tuple[str, str]:
    """The error of the save, and what can be loaded afterwards."""
    old, new = content(1, 75), content(2, 150)
    with write_faults.small_disk(root / "small", 1 << 20) as disk:
        peer.save(disk / "old", old)
        filler = write_faults.fill(disk, 200_000)
        try:
            peer.save(disk / ("old" if over_old else "new"), new)
            said = "nothing"
        except CheckpointError as error:
            said = error.code
        except FAILURES as error:
            said = type(error).__name__
        filler.unlink()
        try:
            loaded = saves.bits(peer.load(disk / "old", old))
        except FAILURES:
            return said, "no"
    return said, "yes" if loaded == saves.bits(old) else "wrong bits"


def main() -> None:
    torch.set_num_threads(1)
    logging.disable()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        root = Path(name)
        wrong = inject(root)
        print("| disk full during a save | error | old checkpoint can be loaded |\n|---|---|---|")
        for over_old in (True, False):
            for peer in (PacelineFull(), DCP(), TorchSave()):
                try:
                    said, loads = full_disk(peer, root, over_old)
                except write_faults.NotMounted as error:
                    sys.exit(f"not measured, because a file system could not be mounted: {error}")
                finally:
                    shutil.rmtree(root / "small", ignore_errors=True)
                where = "overwriting" if over_old else "into a new folder"
                print(f"| {peer.name}, {where} | {said} | {loads} |")
                if isinstance(peer, PacelineFull):
                    wrong += loads != "yes" or not said.startswith("checkpoint.")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
