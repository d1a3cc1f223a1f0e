"""What befalls two machines in training: their link is cut and healed, and Ctrl-C is pressed twice while a rank of the
other one hangs in a lock. Each returns what is wrong: a verdict, the time to it, or something left behind.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nodes import Job, Launcher, eventually, launchers
from system import namespaces

# All ranks train; in step 12, the last one may take a lock that it has, in Python or in C, where no handler of a signal
# runs, with the GIL or without.
SCRIPT = """
import ctypes, os, sys, threading, time
from pathlib import Path
import tiny

rank, world, lock = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]
trainer = tiny.classifier_trainer(run=None, quiet=False, log_every=1)

def hang():
    Path("hangs").touch()
    if lock == "python":
        mine = threading.Lock()
        mine.acquire()
        mine.acquire()
    mutex = ctypes.create_string_buffer(64)
    held = ctypes.PyDLL(None) if lock == "gil" else ctypes.CDLL(None)
    held.pthread_mutex_lock(mutex)
    held.pthread_mutex_lock(mutex)

def act(*_):
    step = trainer.step_count + 1
    if step == 12 and lock != "none" and rank == world - 1:
        hang()
    if lock == "none" and step > 8:
        Path(f"steps-{rank}").write_text(str(step))
        while not Path("cut").exists() and step > 12:
            time.sleep(0.01)  # the link is cut while all ranks train
        time.sleep(0.02)

trainer.model.register_forward_pre_hook(act)
trainer.train(tiny.blobs(160), max_steps=30)
"""
LOCKS = ("python", "c", "gil")
SILENCE = 5.0  # without a heartbeat, after which a node is lost, as the message says
KILLED = 20.0  # for both to end after ranks were killed: not the 40 s in which others give up on a node
LIMIT = 40.0  # for both sides to end: the silence, the time for ranks to exit, and that for what they leave behind


@contextmanager
def joined(folder: Path) -> Iterator[tuple[Job, namespaces.Machine]]:
    """A job on two machines, and the second of them."""
    with namespaces.joined() as machines, launchers(folder) as launch:
        enter = {number: each.enter for number, each in enumerate(machines)}
        yield Job(folder, launch, machines[0].address, enter=enter), machines[1]


def cut_and_heal(job: Job, machine: namespaces.Machine, seconds: float) -> list[str]:
    """The link is down for so long. Shorter than the silence, it is not noticed; longer, both sides end."""
    first, second = _start(job, "none")
    eventually(lambda: all((job.folder / f"steps-{rank}").exists() for rank in range(4)))
    machine.cut_off()
    cut = time.monotonic()
    (job.folder / "cut").touch()
    with suppress(TimeoutError):
        eventually(lambda: False, seconds)
    machine.heal()
    wrong = _end(first, second)
    took = time.monotonic() - cut
    statuses = (first.status, second.status)
    if seconds < SILENCE - 2:
        wrong += [f"a cut of {seconds} s ended with {statuses}"] * (statuses != (0, 0))
    elif statuses == (0, 0):  # a heartbeat came in time
        wrong += [f"a cut of {seconds} s was not noticed"] * (seconds > SILENCE + 2)
    else:
        wrong += [f"statuses {statuses}"] * (0 in statuses or statuses[1] != 78)
        wrong += ["node 1 is not said to be lost"] * ("node 1 was lost" not in first.said)
        wrong += ["the coordinator is not said to be lost"] * ("[launch.coordinator-lost]" not in second.said)
    wrong += [f"took {took:.1f} s"] * (took > seconds + LIMIT)
    return _explained(wrong, first, second)


def interrupt_twice(job: Job, lock: str, node: int = 0) -> list[str]:
    """Ctrl-C twice on a node, while the last rank of the second one hangs."""
    both = _start(job, lock)
    eventually((job.folder / "hangs").exists)
    pressed = both[node]
    pressed.send(signal.SIGINT)
    eventually(lambda: pressed.says("press Ctrl-C again to kill them"))
    pressed.send(signal.SIGINT)
    again = time.monotonic()
    wrong = _end(*both)
    took = time.monotonic() - again
    statuses = tuple(each.status for each in both)
    wrong += [f"statuses {statuses}"] * (statuses != (130, 130))
    wrong += [f"took {took:.1f} s"] * (took > KILLED)
    return _explained(wrong, *both)


def _start(job: Job, lock: str) -> tuple[Launcher, Launcher]:
    (job.folder / "script.py").write_text(SCRIPT)
    return job.node(0, lock), job.node(1, lock)


def _end(*both: Launcher) -> list[str]:
    """Wait for the end of both, and name what is left."""
    wrong = []
    for each in both:
        try:
            each.end()
        except AssertionError as error:
            wrong.append(str(error).partition(":")[0])
    return wrong


def _explained(wrong: list[str], *both: Launcher) -> list[str]:
    return [*wrong, *(f"node {number} said:\n{each.said}" for number, each in enumerate(both))] if wrong else []
