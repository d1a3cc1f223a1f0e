"""The wall time of a sweep beside Ray Tune's, for the same trials of a recipe, two at a time.

    pip install 'ray[tune]'
    python benchmarks/sweep_beside_ray.py --rounds 2

Both train `recipes/mlp.yaml` with a Trainer on one rank in each trial, with the same 24 pairs of parameters. Rounds are
interleaved. Also prints how long a place of the sweep was free between two trials.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parents[1] / "recipes" / "mlp.yaml"
RATES = [1e-4 * 10 ** (number / 8) for number in range(24)]


def paceline_program(folder: str) -> None:
    import paceline
    from paceline.tools.search import scheduler

    waits: list[float] = []
    run = scheduler.Sweep.run

    def measured(self: Any) -> int:
        status = run(self)
        waits.extend(self.waits)
        return status

    scheduler.Sweep.run = measured  # type: ignore[method-assign]
    began = time.monotonic()
    study = paceline.sweep(
        RECIPE, {"optimizer.lr": RATES}, trials=len(RATES), parallel=2, sampler="grid", name=f"{folder}/study"
    )
    assert study.best is not None
    print(json.dumps({"seconds": time.monotonic() - began, "best": study.best.value, "waits": waits}))


def ray_program(folder: str) -> None:
    import ray
    from ray import tune

    def trainable(settings: dict[str, Any]) -> None:
        import paceline

        config = paceline.Config.from_file(RECIPE, [f"optimizer.lr={settings['lr']!r}", "run=false", "quiet=true"])
        history = paceline.Trainer.from_config(config).train()
        tune.report({"loss": history.evaluations[-1]["loss"]})

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    began = time.monotonic()
    tuner = tune.Tuner(
        tune.with_resources(trainable, {"cpu": 1}),
        param_space={"lr": tune.grid_search(RATES)},
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=2, reuse_actors=True),
        run_config=tune.RunConfig(storage_path=folder, verbose=0),
    )
    best = tuner.fit().get_best_result().metrics["loss"]
    print(json.dumps({"seconds": time.monotonic() - began, "best": best}))


def measure(which: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        command = [sys.executable, __file__, "--program", which, "--folder", folder]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return {**found, "wall": time.monotonic() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--program", choices=["paceline", "ray"])
    parser.add_argument("--folder", default="")
    options = parser.parse_args()
    if options.program:
        {"paceline": paceline_program, "ray": ray_program}[options.program](options.folder)
        return
    found: dict[str, list[dict[str, Any]]] = {"paceline": [], "ray": []}
    for number in range(options.rounds):
        for which in ("paceline", "ray") if number % 2 == 0 else ("ray", "paceline"):
            found[which].append(measure(which))
            shown = {key: value for key, value in found[which][-1].items() if key != "waits"}
            print(which, json.dumps(shown), flush=True)
    for key in ("wall", "seconds"):
        ours, theirs = (statistics.median(each[key] for each in found[which]) for which in ("paceline", "ray"))
        print(f"{key}: paceline {ours:.1f} s, Ray Tune {theirs:.1f} s, ratio {ours / theirs:.2f}")
    waits = [1000 * wait for each in found["paceline"] for wait in each["waits"]]
    print(f"a place was free for {statistics.median(waits):.0f} ms at the median, {max(waits):.0f} ms at most")


if __name__ == "__main__":
    main()
