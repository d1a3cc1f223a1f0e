"""Two nodes whose link is cut and healed, and Ctrl-C twice while a rank of the other node blocks in a lock.

    python benchmarks/two_nodes.py [--rounds 20]          # as root, on Linux: it makes two network namespaces

Exit status 1 if a launcher ends with another verdict than it should, later than it says, or leaves a process behind.

The link of a training of four ranks is cut for 2 s, which TCP bridges: it ends as if nothing had happened. Cut for 9 s,
more than the 5 s after which a node without heartbeats is lost: the first node says that the second was lost, and the
second that it lost the coordinator, although the link is healed by then. In the other half of the rounds, a rank of the
second node blocks in a step and the person at the first one presses Ctrl-C twice.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import tiny  # noqa: F401  # once, before launchers are forked
from nodes import Job, Launcher, eventually, launchers
from paceline.launcher.cluster.coordinator import SILENCE_SECONDS
from paceline.launcher.local import agent as _agent  # noqa: F401
from system import namespaces
from system.namespaces import Machine

CUTS = {"cut for 9 s": 9.0, "cut for 2 s": 2.0}
LIMIT = 60.0  # seconds from the last thing that happened to the end of both launchers
SCRIPT = """
import os, sys, threading, time
from pathlib import Path
import tiny

rank, blocks = int(os.environ["RANK"]), sys.argv[1] == "block"

def act(*_):
    if trainer.step_count == 5:
        Path(f"reached-{rank}").touch()
        if blocks and rank == 3:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
    if not blocks:
        time.sleep(0.1)

trainer = tiny.classifier_trainer(run=None, quiet=False, save_every=4, log_every=1, checkpoint={"background": False})
trainer.model.register_forward_pre_hook(act)
trainer.train(tiny.blobs(160), max_steps=40)
Path(f"done-{rank}").touch()
"""


def started(folder: Path, job: Job, deed: str) -> tuple[Launcher, Launcher]:
    (folder / "script.py").write_text(SCRIPT)
    nodes = job.both(deed)
    eventually(lambda: all((folder / f"reached-{rank}").exists() for rank in range(4)))
    return nodes


def cut(nodes: tuple[Launcher, Launcher], machine: Machine, seconds: float) -> list[str]:
    """What is wrong."""
    first, second = nodes
    machine.cut_off()
    time.sleep(seconds)
    machine.heal()
    statuses = [each.end() for each in nodes]
    if seconds < SILENCE_SECONDS:
        return [] if statuses == [0, 0] else [f"{statuses} after a short cut"]
    wrong = [] if 0 not in statuses else [f"{statuses} after a long cut"]
    if "node 1 was lost" not in first.said:
        wrong.append("node 0 did not say that node 1 was lost")
    if "[launch.coordinator-lost]" not in second.said:
        wrong.append("node 1 did not say that it lost the coordinator")
    return wrong


def interrupt_twice(nodes: tuple[Launcher, Launcher]) -> list[str]:
    first, _ = nodes
    os.killpg(first.pid, signal.SIGINT)
    eventually(lambda: first.says("press Ctrl-C again"))
    os.killpg(first.pid, signal.SIGINT)
    statuses = [each.end() for each in nodes]
    return [] if statuses == [130, 130] else [f"{statuses} after Ctrl-C twice"]


def one_round(kind: str) -> tuple[list[str], float, list[str]]:
    """What is wrong, the seconds until both launchers ended, and what they said."""
    with tempfile.TemporaryDirectory() as name, namespaces.joined() as machines, launchers(Path(name)) as launch:
        folder, enter = Path(name), {node: machine.enter for node, machine in enumerate(machines)}
        job = Job(folder, launch, machines[0].address, enter=enter)
        nodes = started(folder, job, "block" if kind == "Ctrl-C twice" else "train")
        began = time.monotonic()
        try:
            wrong = interrupt_twice(nodes) if kind == "Ctrl-C twice" else cut(nodes, machines[1], CUTS[kind])
        except (AssertionError, TimeoutError) as error:  # it did not end, or left processes
            wrong = [str(error)]
        took = time.monotonic() - began
        return wrong + ([f"took {took:.0f} s"] if took > LIMIT else []), took, [each.said for each in nodes]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="of cuts, half of them short, and of Ctrl-C twice")
    options = parser.parse_args()
    seconds, wrongs = defaultdict[str, list[float]](list), 0
    for number in range(options.rounds):
        for kind in (list(CUTS)[number % 2], "Ctrl-C twice"):
            wrong, took, said = one_round(kind)
            seconds[kind].append(took)
            if wrong:
                wrongs += 1
                print(f"{kind}, round {number}: {'; '.join(wrong)}", *said, sep="\n--- \n", flush=True)
    for kind, each in seconds.items():
        print(f"{kind}: {len(each)} rounds, both launchers ended after {max(each):.1f} s at most")
    print(f"{wrongs} wrong of {sum(map(len, seconds.values()))}")
    return int(wrongs > 0)


if __name__ == "__main__":
    sys.exit(main())
