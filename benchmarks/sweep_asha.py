"""Compares successive halving with a full search over the same trials, and both with the recipe's own values.

python benchmarks/sweep_asha.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paceline.run.study_folder import StudyFolder, values
from paceline.tools.search.study import Study

RECIPE = Path(__file__).parents[1] / "recipes" / "mlp.yaml"
SPACE = ["optimizer.lr=log(1e-4,1e-1)", "optimizer.weight_decay=log(1e-4,1)", "model.width=int(16,128,16)"]


def sweep(folder: Path, trials: int, seed: int, *more: str) -> tuple[Study, float]:
    words = ["sweep", str(RECIPE), "--trials", str(trials), "--parallel", "2", "--sampler", "random", "--seed"]
    began = time.monotonic()
    command = [sys.executable, "-m", "paceline", *words, str(seed), "--name", str(folder), *SPACE, *more]
    subprocess.run(command, check=True, capture_output=True)
    return Study.load(StudyFolder(folder)), time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        default = StudyFolder(Path(scratch)).trial(0)
        command = [sys.executable, "-m", "paceline", "train", str(RECIPE), "-n", "1", f"run={default.path}"]
        subprocess.run(command, check=True, capture_output=True)
        own = values(default, "loss")[-1][1]
        full, full_time = sweep(Path(scratch, "full"), options.trials, options.seed)
        asha, asha_time = sweep(Path(scratch, "asha"), options.trials, options.seed, "--pruner", "asha")
        steps = [sum(trial.steps for trial in study.trials()) for study in (full, asha)]
        assert full.best is not None and asha.best is not None
        assert full.best.value is not None and asha.best.value is not None
        result = {
            "loss of the recipe": own,
            "best loss, all trials to the end": full.best.value,
            "best loss, asha": asha.best.value,
            "ratio of the losses": asha.best.value / full.best.value,
            "steps": steps[0],
            "steps, asha": steps[1],
            "ratio of the steps": steps[1] / steps[0],
            "seconds": round(full_time, 1),
            "seconds, asha": round(asha_time, 1),
            "same trial": asha.best.number == full.best.number,
        }
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
