"""The tables of "Corruption" and "Hostile manifests" in docs/reliability.md. Exit status 1 if a guarantee is violated.

    python benchmarks/checkpoint_damage.py [corruption cases] [corruption cases for torch] [hostile manifests]

Each case corrupts a fresh copy of a checkpoint of two ranks and loads everything in it; the bits are compared with what
was saved. torch.distributed.checkpoint loads in a separate process, because a corrupted pickle may crash it.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import torch
import torch.distributed.checkpoint as dcp

from faults import damages, hostile, saves
from faults.damages import ANY_FOLDER, OURS, Copy, Damage
from faults.peers import FAILURES

SEED = 5
Outcome = Callable[[Path], str]


def damage(
    kinds: Mapping[str, Damage], cases: int, copy: Copy, root: Path, outcome: Outcome
) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    for case in range(cases):
        kind = list(kinds)[case % len(kinds)]
        damaged = damages.damaged_copy(copy, root / "damaged" / copy.folder.name)
        kinds[kind](damaged, random.Random(SEED * 1_000_003 + case))
        result = outcome(damaged.folder)
        counts[kind][result] += 1
        if result.isupper():
            print(f"    case {case} ({kind}): {result}", file=sys.stderr)
        shutil.rmtree(root / "damaged")
    return counts


def torch_outcome(folder: Path, original: dict[str, bytes]) -> str:
    kinds = ("refused", "equal", "silent")
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        content = {name: torch.full_like(tensor, 77) for name, tensor in saves.values(0, damages.ROWS).items()}
        code = 0
        try:
            dcp.load(content, checkpoint_id=folder, no_dist=True)
            code = 1 if saves.bits(content) == original else 2
        except FAILURES:
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return kinds[os.WEXITSTATUS(status)] if os.WIFEXITED(status) else "refused"


def table(ours: dict[str, Counter[str]], theirs: dict[str, Counter[str]]) -> None:
    print("| corruption | paceline: rejected with a code | unchanged bits | silently wrong | no code "
          "| DCP: rejected | unchanged bits | silently wrong |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    ours["all"] = sum(ours.values(), Counter())
    theirs["all"] = sum(theirs.values(), Counter())
    for kind, counts in ours.items():
        own = [f"{counts[name]:,}" for name in damages.OUTCOMES]
        others = [f"{theirs[kind][name]:,}" if kind in theirs else "" for name in ("refused", "equal", "silent")]
        print(f"| {kind} | {' | '.join(own + others)} |")


def main() -> None:
    torch.set_num_threads(1)
    sizes = [int(text) for text in sys.argv[1:]] + [10_000, 1_000, 1_200][len(sys.argv) - 1 :]
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        root = Path(name)
        copy, theirs, original = damages.make(root)
        ours = damage({**ANY_FOLDER, **OURS}, sizes[0], copy, root, lambda folder: damages.outcome(folder, original))
        peer = damage(ANY_FOLDER, sizes[1], theirs, root, lambda folder: torch_outcome(folder, original))
        table(ours, peer)
        broken = ours["all"]["SILENT"] + ours["all"]["NO CODE"]
        print()
        broken += hostile.report(copy, original, root, sizes[2])
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
