"""Kills a sweep, its trials and their ranks at random moments, and compares what it finds with an undisturbed sweep.

    python benchmarks/sweep_kills.py --kills 20

Each kill is a SIGKILL to the process of the sweep, to the launcher of a trial, to the parent of its ranks, or to a
rank. A killed sweep is started again with the same command. Exits with status 1 if a trial is lost, has other
parameters, was trained to the end twice, has another value, or if the best trial is another one.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from paceline.run import ledger
from paceline.run.study_folder import StudyFolder
from paceline.tools.search.study import Study

RECIPE = Path(__file__).parents[1] / "recipes" / "mlp.yaml"


def command(folder: Path, trials: int, epochs: int) -> list[str]:
    return [
        sys.executable, "-m", "paceline", "sweep", str(RECIPE), "--trials", str(trials), "--parallel", "2",
        "--sampler", "random", "--name", str(folder), f"train.epochs={epochs}", "save_every=20", "eval_every=50",
        "optimizer.lr=log(1e-4,1e-1)", "batch=choice(32,64,128)", "sweep.retries=100",
    ]  # fmt: skip


def processes(sweep: psutil.Process) -> dict[str, list[psutil.Process]]:
    """By kind: what can be killed now."""
    found: dict[str, list[psutil.Process]] = {"sweep": [sweep], "launcher": [], "parent": [], "rank": []}
    try:
        for launcher in sweep.children():
            found["launcher"].append(launcher)
            for parent in launcher.children():
                found["parent"].append(parent)
                found["rank"] += parent.children()
    except psutil.NoSuchProcess:
        pass
    return found


def disturbed(folder: Path, kills: int, seed: int, trials: int, epochs: int) -> list[str]:
    """Run a sweep to its end, with kills on the way. Returns what was killed."""
    chance, killed = random.Random(seed), []
    deadline = time.monotonic() + 1200
    while True:
        sweep = subprocess.Popen(command(folder, trials, epochs), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while sweep.poll() is None and time.monotonic() < deadline:
            time.sleep(chance.uniform(0.3, 3.0))
            if len(killed) >= kills or not folder.joinpath("sweep.json").exists():
                continue
            kind = chance.choice(["sweep", "launcher", "parent", "rank"])
            try:
                candidates = processes(psutil.Process(sweep.pid))[kind]
                if candidates:
                    chance.choice(candidates).send_signal(signal.SIGKILL)
                    killed.append(kind)
            except psutil.NoSuchProcess:
                continue
        assert sweep.stderr is not None
        said = sweep.stderr.read().decode()
        if sweep.wait() == 0:
            return killed
        if sweep.returncode != -signal.SIGKILL or time.monotonic() > deadline:
            raise SystemExit(f"the sweep ended with status {sweep.returncode}:\n{said}")


def problems(reference: Path, folder: Path) -> list[str]:
    expected, found = (Study.load(StudyFolder(path)) for path in (reference, folder))
    wrong = []
    if len(found.trials()) != len(expected.trials()):
        wrong.append(f"{len(found.trials())} trials instead of {len(expected.trials())}")
    for one, other in zip(expected.trials(), found.trials(), strict=False):
        if one.params != other.params:
            wrong.append(f"trial {one.number}: {other.params} instead of {one.params}")
        if (one.state, one.value) != (other.state, other.value):
            wrong.append(f"trial {one.number}: {other.state} {other.value} instead of {one.state} {one.value}")
        events = ledger.events(found.folder.trial(one.number))
        ends = [event for event in events if event["event"] == "finished" and event["step"] == one.steps]
        trained = [event for event in events if event["event"] == "restored" and event["step"] == one.steps]
        if len(ends) - len(trained) > 1:
            wrong.append(f"trial {one.number} was trained to the end {len(ends)} times")
    if expected.best is None or found.best is None or expected.best.number != found.best.number:
        wrong.append(f"the best trial is {found.best} instead of {expected.best}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        reference, folder = Path(scratch, "reference"), Path(scratch, "killed")
        disturbed(reference, 0, 0, options.trials, options.epochs)
        began = time.monotonic()
        killed = disturbed(folder, options.kills, options.seed, options.trials, options.epochs)
        counts = {kind: killed.count(kind) for kind in sorted(set(killed))}
        print(f"{len(killed)} kills in {time.monotonic() - began:.0f} s: {counts}")
        found = problems(reference, folder)
        print("\n".join(found) or f"all {options.trials} trials ended once, with the values of an undisturbed sweep")
        raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
