"""The tables of "Kills during a save" in docs/reliability.md. Exit status 1 if a guarantee of paceline is violated.

    python benchmarks/save_kills.py [--bits CHECKPOINTS]

Two ranks train and save, and one of them is killed (SIGKILL) at each phase of a save; then the checkpoints on disk are
read completely and a new run resumes from them (tests/faults/kills.py defines the guarantees). The same is done for
torch.distributed.checkpoint. With --bits: that many checkpoints are written during training, and each one is compared
with a hash of the state at its step.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from faults import bits, dcp_kills, kills, worlds

AT_ONCE = 50  # checkpoints on disk at the same time
WIDTH = 512  # of the model for --bits: 4 MB per checkpoint


def paceline(root: Path) -> int:
    """Return the number of kills that violated a guarantee."""
    expected = {strategy: kills.unbroken(root / f"unbroken-{strategy}", strategy) for strategy in ("ddp", "fsdp")}
    counts: Counter[tuple[str, str, bool]] = Counter()
    failed = 0
    for number, kill in enumerate(kills.all_kills()):
        folder = root / str(number)
        problem = kills.problem_after(kill, folder, expected[kill.strategy])
        shutil.rmtree(folder)
        counts[kill.strategy, "background" if kill.background else "blocking", not problem] += 1
        if problem:
            failed += 1
            print(f"{kill}: {problem}", flush=True)
    print("| layout | save | kills | resumed exactly | did not |\n|---|---|---|---|---|")
    for strategy in ("ddp", "fsdp"):
        for how in ("background", "blocking"):
            good, bad = counts[strategy, how, True], counts[strategy, how, False]
            print(f"| {strategy} | {how} | {good + bad} | {good} | {bad} |", flush=True)
    return failed


def torch_dcp(root: Path) -> None:
    print("\n| torch.distributed.checkpoint | kills | old or new | silently mixed | not loadable | hangs |")
    print("|---|---|---|---|---|---|")
    details = []
    for way, new_folders in dcp_kills.WAYS.items():
        counts: Counter[str] = Counter()
        for number, kill in enumerate(dcp_kills.all_kills(new_folders)):
            outcome = dcp_kills.outcome_of(kill, root / f"dcp-{new_folders}-{number}")
            counts[outcome] += 1
            if outcome not in ("old", "new"):
                details.append(f"{way}, rank {kill.rank}, {kill.phase}: {outcome}")
        rest = [counts["mixed"], counts["can't be loaded"], counts["the other rank hangs"]]
        cells = [counts.total(), counts["old"] + counts["new"], *rest]
        print(f"| {way} | {' | '.join(map(str, cells))} |", flush=True)
    print("\n" + "\n".join(details))


def background_bits(root: Path, checkpoints: int) -> int:
    """Return the number of checkpoints that differ from the state of their step."""
    wrong: list[str] = []
    done = 0
    while done < checkpoints:
        folder = root / "bits"
        steps = min(AT_ONCE, checkpoints - done)
        noted = worlds.values(1, partial(bits.train, folder, steps, WIDTH))[0]
        wrong += bits.wrong_ones(folder, noted)
        done += len(noted)
        shutil.rmtree(folder)
    print(f"\n{done} checkpoints written in the background: {done - len(wrong)} are bitwise identical to their step")
    print("\n".join(wrong[:5]))
    return len(wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, metavar="CHECKPOINTS")
    options = parser.parse_args()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        root = Path(name)
        if options.bits is not None:
            sys.exit(background_bits(root, options.bits) > 0)
        failed = paceline(root)
        torch_dcp(root)
        sys.exit(failed > 0)


if __name__ == "__main__":
    main()
