"""Interruption of a run on two nodes after a kill: `paceline launch` and torchrun, interleaved.

    python benchmarks/recovery.py [--rounds 5] [--without-peers]

Exit status 1 if a run of paceline does not finish, or not with the loss of an uninterrupted one.

Both run the same training script, with the same checkpoints (one in every step), two ranks on each of two nodes on
loopback. One rank of either node, or the launcher of the node that does not host the store, is killed with SIGKILL; a
killed launcher is restarted immediately, as a scheduler would. Measured are the time from the kill to the end of the
next new step, the longest time without a new step after that (ranks may outlive their launcher and be stopped later),
and whether the run ends with the loss of an uninterrupted one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

SCRIPT = """
import json, os, sys, time
import torch, paceline
from torch.utils.data import TensorDataset

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
inputs = torch.randn(512, 32)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))

class Tell:
    def on_log(self, record):
        if os.environ["RANK"] == "0":
            with open("steps", "a") as file:
                file.write(json.dumps({"time": time.time(), "step": record["step"], "loss": record["loss"]}) + "\\n")
        time.sleep(0.02)

with open(f"pid-{os.environ['RANK']}", "w") as file:
    file.write(str(os.getpid()))
trainer = paceline.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.01), criterion=torch.nn.MSELoss(), batch=32, log_every=1,
    save_every=1, callbacks=[Tell()], quiet=True, device="cpu", run="run", resume="auto",
)
trainer.train(data, max_steps=int(sys.argv[1]))
"""
KILLS = ("rank 0 (node 0)", "rank 3 (node 1)", "launcher of node 1")
KILL_AT = 20
STEPS = {"launcher of node 1": 300}  # torchrun notices a lost launcher after about 15 s
FEW_STEPS = 80
DEADLINE = 120.0
# By default torchrun 2.13 keeps one store for all restarts, and restarted gloo ranks find the addresses of dead ones in
# it: no run on two nodes recovered. With this, ranks get a new store at each start.
TORCHRUN_ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass
class Run:
    system: str
    folder: Path
    port: int
    last: int = FEW_STEPS

    def start(self, node: int) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PACELINE_TOKEN": "benchmark", **TORCHRUN_ENVIRONMENT}
        log = (self.folder / f"node-{node}.log").open("ab")
        return subprocess.Popen(
            [sys.executable, *self._command(node)], cwd=self.folder, env=environment, stdout=log, stderr=log
        )

    def _command(self, node: int) -> list[str]:
        if self.system == "paceline":
            place = ["--nodes", "2", "--node-rank", str(node), "--master", f"127.0.0.1:{self.port}"]
            return ["-m", "paceline", "launch", *place, "--max-restarts", "3", "-n", "2", "train.py", str(self.last)]
        place = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}"]
        host = ["--rdzv-conf", f"is_host={1 - node}"]
        return [
            "-m",
            "torch.distributed.run",
            *place,
            *host,
            "--max-restarts",
            "3",
            "--nproc-per-node",
            "2",
            "train.py",
            str(self.last),
        ]

    def steps(self) -> list[dict[str, float]]:
        path = self.folder / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]


def free_port() -> int:
    """A free port whose successor, the port of the store, is also free."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            try:
                second.bind(("127.0.0.1", first.getsockname()[1] + 1))
            except OSError:
                continue
            return int(first.getsockname()[1])


@dataclass
class Recovered:
    next_step: float  # seconds from the kill
    interruption: float  # the longest time between two new steps after that
    loss: float
    ended: str


def recover(system: str, kill: str | None, last: int) -> Recovered:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(system, Path(folder), free_port(), last)
        (run.folder / "train.py").write_text(SCRIPT)
        launchers = [run.start(0), run.start(1)]
        try:
            killed_at = _kill(run, kill, launchers) if kill else time.time()
            ended = _wait(launchers)
        finally:
            _end(run, launchers)
        steps = run.steps()
        done = max((each["step"] for each in steps if each["time"] < killed_at), default=0)
        times, reached = [0.0], done
        for each in steps:
            if each["step"] > reached:
                reached = int(each["step"])
                times.append(each["time"] - killed_at)
        loss = next((each["loss"] for each in reversed(steps) if each["step"] == last), float("nan"))
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return Recovered(times[1] if len(times) > 1 else float("nan"), max(gaps, default=float("nan")), loss, ended)


def _kill(run: Run, kill: str, launchers: list[subprocess.Popen[bytes]]) -> float:
    end = time.monotonic() + DEADLINE
    while not (steps := run.steps()) or steps[-1]["step"] < KILL_AT:
        if time.monotonic() > end:
            return time.time()
        time.sleep(0.002)
    pid = launchers[1].pid if kill.startswith("launcher") else int((run.folder / f"pid-{kill.split()[1]}").read_text())
    os.kill(pid, signal.SIGKILL)
    now = time.time()
    if kill.startswith("launcher"):
        launchers[1].wait()
        launchers[1] = run.start(1)
    return now


def _wait(launchers: Sequence[subprocess.Popen[bytes]]) -> str:
    end = time.monotonic() + DEADLINE
    for launcher in launchers:
        try:
            launcher.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"not over after {DEADLINE:g} s"
    statuses = [launcher.returncode for launcher in launchers]
    return "good" if statuses == [0, 0] else f"exit statuses {statuses}"


def _end(run: Run, launchers: Sequence[subprocess.Popen[bytes]]) -> None:
    for launcher in launchers:
        launcher.kill()
        launcher.wait()
    for path in run.folder.glob("pid-*"):  # torchrun leaves the ranks of a killed launcher behind
        try:
            os.kill(int(path.read_text()), signal.SIGKILL)
        except (ProcessLookupError, ValueError):
            continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without-peers", action="store_true")
    options = parser.parse_args()
    systems = ("paceline",) if options.without_peers else ("paceline", "torchrun")
    good = True
    unbroken = {last: recover("paceline", None, last).loss for last in (FEW_STEPS, *STEPS.values())}
    print(
        "| killed | | seconds to the next step: median, all | longest interruption: median, all | last loss | ended |"
    )
    print("|---|---|---|---|---|---|")
    for kill in KILLS:
        last = STEPS.get(kill, FEW_STEPS)
        found: dict[str, list[Recovered]] = {system: [] for system in systems}
        for _ in range(options.rounds):
            for system in systems:
                found[system].append(recover(system, kill, last))
        for system, runs in found.items():
            same = "same" if all(abs(each.loss - unbroken[last]) < 1e-6 for each in runs) else "other"
            ends = ", ".join(sorted({each.ended for each in runs}))
            nexts, gaps = _told([each.next_step for each in runs]), _told([each.interruption for each in runs])
            print(f"| {kill} | {system} | {nexts} | {gaps} | {same} | {ends} |", flush=True)
            good &= system != "paceline" or (same, ends) == ("same", "good")
    sys.exit(not good)


def _told(seconds: Sequence[float]) -> str:
    return f"**{statistics.median(seconds):.2f}** ({' '.join(f'{each:.2f}' for each in sorted(seconds))})"


if __name__ == "__main__":
    main()
