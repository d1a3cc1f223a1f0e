"""What the page of a large run takes: time until points are on screen, memory of the server, the report, and training.

    python benchmarks/watch_page.py                       # a run of 10⁶ steps and 64 ranks, which is made first
    python benchmarks/watch_page.py --training            # steps per second with and without a page, interleaved

Needs Chromium (tests/system/install.sh). Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import psutil

from made_runs import make_run
from paceline.run.folder import RunFolder
from system import browser

ROUNDS = 5
SMALL = ["model.layers=2", "model.width=64", "model.context=64", "data.context=64", "batch=16", "log_every=10"]


@contextmanager
def watching(root: Path) -> Iterator[tuple[psutil.Popen, str, float]]:
    """`paceline watch` in a new process: the process, its address, and the seconds until it was printed."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "paceline", "watch"]
    process = psutil.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        url = process.stdout.readline().strip()
        yield process, url, time.perf_counter() - began
    finally:
        process.terminate()
        process.wait()


def seconds_until(page: Any, condition: Callable[[], object], began: float) -> float:
    while not condition():
        page.wait_for_timeout(10)
    return time.perf_counter() - began


def label(page: Any) -> str:
    found = page.locator('canvas[aria-label^="Loss: "]')
    return str(found.first.get_attribute("aria-label")) if found.count() else ""


def open_page(chromium: Any, root: Path, last: int) -> dict[str, float]:
    with watching(root) as (process, url, started):
        context = chromium.new_context(viewport={"width": 1400, "height": 900})
        page = context.new_page()
        began = time.perf_counter()
        page.goto(f"{url}#list")
        number = page.locator('a:has-text("large")').first.get_attribute("href")
        listed = time.perf_counter() - began
        began = time.perf_counter()
        page.goto(f"{url}{number}")
        page.reload()
        newest = seconds_until(page, lambda: label(page).endswith(f"step {last:,}"), began)
        everything = seconds_until(page, lambda: f"; step 1 to step {last:,}" in label(page), began)
        ranks = seconds_until(page, lambda: page.locator('canvas[aria-label*=" ranks, from "]').count(), began)
        memory = process.memory_info().rss / 1e6
        peak = int(Path(f"/proc/{process.pid}/status").read_text().partition("VmHWM:")[2].split()[0]) / 1e3
        context.close()
    found = {"start": started, "list": listed, "newest points": newest, "all points": everything, "ranks": ranks}
    return {**found, "memory (MB)": memory, "peak memory (MB)": peak}


def write_report(root: Path) -> tuple[float, float]:
    began = time.perf_counter()
    command = [sys.executable, "-m", "paceline", "report", "large", "-o", "large.html"]
    subprocess.run(command, cwd=root, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began, (root / "large.html").stat().st_size / 1e6


def latency(chromium: Any, root: Path) -> list[float]:
    """Seconds from a line in the metrics file until its step is on the page."""
    folder = make_run(root / "runs" / "growing", steps=500, ranks=2)
    found = []
    with watching(root) as (_, url, _):
        context = chromium.new_context()
        page = context.new_page()
        page.goto(f"{url}#list")
        number = page.locator('a:has-text("growing")').first.get_attribute("href")
        page.goto(f"{url}{number}")
        page.reload()
        seconds_until(page, lambda: label(page).endswith("step 500"), time.perf_counter())
        for step in range(501, 521):
            page.wait_for_timeout(37 * (step % 11))  # at any moment between two questions of the page
            with folder.metrics.open("a") as file:
                file.write(json.dumps({"step": step, "epoch": 0, "loss": 1.0, "lr": 0.1}) + "\n")
            until = time.perf_counter()
            found.append(seconds_until(page, lambda step=step: label(page).endswith(f"step {step}"), until))
        context.close()
    return found


def large_run(root: Path, steps: int, ranks: int) -> None:
    make_run(root / "runs" / "large", steps=steps, ranks=ranks)
    print(f"a run of {steps:,} steps and {ranks} ranks\n\n| | seconds |\n|---|---|")
    with browser.running() as chromium:
        for name, value in open_page(chromium, root, steps).items():
            print(f"| {name} | {value:.2f} |")
        seconds, megabytes = write_report(root)
        print(f"| report | {seconds:.2f} |\n| report (MB) | {megabytes:.2f} |")
        shutil.rmtree(root / "runs" / "large")
        times = latency(chromium, root)
        print(f"| a new point on screen: median, longest of {len(times)} | {median(times):.2f}, {max(times):.2f} |")


def speed(root: Path, name: str, steps: int) -> float:
    """Median samples per second of two ranks."""
    settings = [*SMALL, f"run={name}", f"train.max_steps={steps}", "save_last=false"]
    command = [sys.executable, "-m", "paceline", "train", "-n", "2", *settings]
    subprocess.run(command, cwd=root, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = map(json.loads, RunFolder(root / "runs" / name).metrics.read_text().splitlines())
    return median([line["samples_per_second"] for line in lines if "samples_per_second" in line][3:])


def training(root: Path, steps: int) -> None:
    without, with_page = [], []
    with browser.running() as chromium:
        for number in range(ROUNDS):
            without.append(speed(root, f"without-{number}", steps))
            with watching(root) as (_, url, _):
                context = chromium.new_context()
                page = context.new_page()
                page.goto(f"{url}#list")
                page.evaluate(
                    "() => { const look = () => { const found = [...document.querySelectorAll('a')]"
                    f".find((a) => a.textContent === 'with-{number}'); if (found) found.click();"
                    " else setTimeout(look, 200); }; look(); }"
                )
                with_page.append(speed(root, f"with-{number}", steps))
                assert f"with-{number}" in page.title(), page.title()
                context.close()
    ratios = [seen / unseen for seen, unseen in zip(with_page, without, strict=True)]
    print(
        f"samples/s without a page {[round(each) for each in without]}, with one {[round(each) for each in with_page]}"
    )
    print(f"ratio: median {median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--training", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-page-") as folder:
        if chosen.training:
            training(Path(folder), min(chosen.steps, 600))
        else:
            large_run(Path(folder), chosen.steps, chosen.ranks)


if __name__ == "__main__":
    main()
