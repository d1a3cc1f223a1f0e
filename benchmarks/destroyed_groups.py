"""Hangs while process groups are destroyed: the table "The end of a script" in docs/reliability.md.

    python benchmarks/destroyed_groups.py                    # 500 launches of a plain DDP script, 20 of loops
    python benchmarks/destroyed_groups.py --launches 50 --load 2
    python benchmarks/destroyed_groups.py --torchrun         # torchrun's rates beside them

A loop opens a gloo group, trains with DDP in it, and destroys it, 50 times in a launch. Exit status 1 if a launch of
paceline hangs or fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import forked  # which imports torch once, before launches are forked

ROOT = Path(__file__).parents[1]
LIMIT = 120.0  # seconds; a launch takes one or two on an idle machine
LOOP = """
import os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
rank = int(os.environ["RANK"])
def open_and_destroy(number):
    dist.init_process_group("gloo", store=dist.FileStore(f"store-{number}", 2), rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(16, 4))
    for _ in range(3):
        model(torch.randn(8, 16)).sum().backward()
    dist.all_reduce(torch.zeros(2))
    dist.destroy_process_group()
for number in range(50):
    open_and_destroy(number)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=500)
    parser.add_argument("--loops", type=int, default=20)
    parser.add_argument("--load", type=int, default=0, help="busy processes beside the launches")
    parser.add_argument("--torchrun", action="store_true")
    options = parser.parse_args()
    failed = 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "loop.py").write_text(LOOP)
        for _ in range(options.load):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        scripts = ((ROOT / "examples/migrate/before_ddp.py", options.launches), (folder / "loop.py", options.loops))
        for script, number in scripts:
            failed += campaign("paceline launch", script, number, folder)
            if options.torchrun:
                campaign("torchrun", script, number, folder)
    return int(failed > 0)


def campaign(launcher: str, script: Path, number: int, folder: Path) -> int:
    """Launch a script again and again; returns how many launches failed."""
    began, hung, wrong = time.perf_counter(), 0, 0
    for _ in range(number):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            status = _launch(launcher, script, Path(name))
        hung += status is None
        wrong += status not in (None, 0)
    seconds = time.perf_counter() - began
    print(
        f"{launcher:16} {script.name:14} {number:4d} launches in {seconds:4.0f} s: {hung} hung, {wrong} failed",
        flush=True,
    )
    return hung + wrong


def _launch(launcher: str, script: Path, folder: Path) -> int | None:
    """The exit status, or None after the limit."""
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends its ranks
            process.wait()
            return None
    with (folder / "output").open("wb") as output:
        launch = lambda: forked.command("launch", "-n", "2", str(script))  # noqa: E731
        process_id = forked.start(launch, folder, output.fileno(), output.fileno())
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process_id, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    print((folder / "output").read_text(), flush=True)
    os.killpg(process_id, 15)
    os.waitpid(process_id, 0)
    return None


if __name__ == "__main__":
    sys.exit(main())
