"""Take the screenshots of docs/guides/images: wide, narrow, light, dark, a failed run, 64 ranks, runs side by side.

    python benchmarks/page_screenshots.py

Needs Chromium (tests/system/install.sh). The runs are made, except for one that trains here.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from made_runs import make_run
from paceline.run.folder import RunFolder
from paceline.tools.watch.page_server import PageServer
from paceline.tools.watch.watched_runs import WatchedRuns
from system import browser

IMAGES = Path(__file__).parents[1] / "docs" / "guides" / "images"
# Name, run, width, height, colours, how far it is scrolled.
SHOTS = (
    ("page-light", "trained", 1400, 1000, "light", 0),
    ("page-dark", "trained", 1400, 1000, "dark", 0),
    ("page-64-ranks", "large", 1600, 1150, "light", 1080),
    ("page-wide", "large", 2560, 1300, "dark", 0),
    ("page-failed", "failed", 1400, 900, "light", 0),
    ("page-failed-phone", "failed", 390, 844, "dark", 0),
    ("page-compare", "compare", 1400, 900, "light", 0),
    ("page-list", "list", 1400, 640, "light", 0),
)


def make_runs(root: Path) -> None:
    settings = (
        "run=trained",
        "train.max_steps=300",
        "eval_every=50",
        "save_every=100",
        "profile=[100,110]",
        "clip_norm=1.0",
    )
    command = [sys.executable, "-m", "paceline", "train", "-n", "2", *settings]
    subprocess.run(command, cwd=root, check=True, stdout=subprocess.DEVNULL)
    make_run(root / "runs" / "large", steps=20_000, ranks=64)
    make_run(root / "runs" / "failed", steps=3_000, ranks=16, failed=True, seed=3)
    for rate in (0.003, 0.01):
        for seed in range(3):
            recipe = [f"optimizer.lr={rate}", "save_best=accuracy", f"tags=[vit, {'sweep' if seed else 'baseline'}]"]
            make_run(root / "runs" / f"vit-{rate}-seed{seed}", steps=int(9 / rate), seed=seed, settings=recipe)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, browser.running() as chromium:
        root = Path(folder)
        make_runs(root)
        server = PageServer(WatchedRuns([], root / "runs"))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ids = {run["name"]: run["id"] for run in server.runs.listed()["runs"]}
        routes = {name: f"run={number}" for name, number in ids.items()}
        routes |= {"compare": f"compare={','.join(ids[name] for name in ids if 'seed' in name)}"}
        routes |= {"list": "list&columns=state,tags,curve,best,loss,set:optimizer.lr,set:seed,step,updated"}
        for name, run, width, height, scheme, scrolled in SHOTS:
            with browser.opened(chromium, f"{server.url}#{routes[run]}", width, height, scheme) as (page, observed):
                page.wait_for_timeout(1500)  # for the files of ranks
                page.evaluate(f"scrollTo(0, {scrolled})")
                page.wait_for_timeout(300)
                page.screenshot(path=str(IMAGES / f"{name}.png"))
                assert observed.errors == [], observed.errors
            print(IMAGES / f"{name}.png")
        assert RunFolder(root / "runs" / "trained").metrics.exists()
        server.shutdown()


if __name__ == "__main__":
    main()
