"""Where a rank that does not wait for others stands, what keeps it there, its usual causes, and what to do.

is in read_image() at data.py:88, inside trainer.train() at train.py:12, reading a batch
is waiting for its DataLoader worker (pid 71), which is stopped by a signal, in read_image() at data.py:88
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from paceline.diagnose.exits import MISMATCH_FIX
from paceline.diagnose.hang.evidence import ProcessState, RankEvidence, WorkerEvidence
from paceline.diagnose.hang.stack_place import StackPlace, place_of_stack
from paceline.diagnose.hang.waits import holds_gil

PlaceKind = Literal[
    "stopped", "disk", "gil", "debugger", "worker", "data", "saving", "evaluating", "trainer", "code", "unknown"
]
_STATES = {"stopped": "is stopped by a signal (SIGSTOP)", "disk": "is blocked on disk I/O", "exited": "has exited"}
_WORST: tuple[ProcessState, ...] = ("exited", "stopped", "disk", "running")
_PHASES = {
    "start": "at its start",
    "rendezvous": "joining the process group",
    "load": "loading the model and the checkpoint",
    "first step": "in its first step",
    "training": "in training",
    "saving": "saving a checkpoint",
    "evaluating": "evaluating",
}


class RankPlace(NamedTuple):
    text: str  # begins with a verb: "is in read_image() at data.py:88, reading a batch"
    kind: PlaceKind
    stopped_pid: int = 0  # of the process that a signal has stopped


def place_of_rank(evidence: RankEvidence) -> RankPlace:
    place = place_of_stack(evidence.stack)
    at = at_line(place)
    if evidence.state == "stopped":
        return RankPlace(_STATES["stopped"] + after(at), "stopped", evidence.pid)
    if evidence.state == "disk":
        return RankPlace(_STATES["disk"] + after(at), "disk")
    if place.activity == "debugger":
        return RankPlace(f"is in a debugger{after(at)}", "debugger")
    if holds_gil(evidence, place):
        thread = at_line(place_of_stack(evidence.gil_holder))
        return RankPlace(
            f"is kept by a thread that holds the GIL, {thread}" if thread else f"is holding the GIL{after(at)}", "gil"
        )
    if place.from_worker and evidence.workers:
        return _in_worker(evidence)
    if not at:
        return _without_line(evidence)
    if place.from_worker:
        return RankPlace(f"is waiting for a DataLoader worker, {at}", "worker")
    if place.activity == "data":
        return RankPlace(f"is {at}, reading a batch", "data")
    return _in_code(evidence, place, at)


def line_of(evidence: RankEvidence) -> str:
    """The innermost line of the user's code: in a worker, if the rank waits for one, or in a thread that holds the
    GIL."""
    place = place_of_stack(evidence.stack)
    worker = _stuck_worker(evidence) if place.from_worker else None
    inside = place_of_stack(worker.stack if worker else evidence.gil_holder)
    return inside.line or place.line


def _in_worker(evidence: RankEvidence) -> RankPlace:
    worker = _stuck_worker(evidence)
    if worker is None:
        return RankPlace("is waiting for a DataLoader worker", "worker")
    at = at_line(place_of_stack(worker.stack))
    does = _STATES[worker.state] + after(at) if worker.state in _STATES else f"is {at or 'running'}"
    text = f"is waiting for its DataLoader worker (pid {worker.pid}), which {does}"
    kind: PlaceKind = {"stopped": "stopped", "disk": "disk"}.get(worker.state, "worker")  # type: ignore[assignment]
    return RankPlace(text, kind, worker.pid if worker.state == "stopped" else 0)


def _stuck_worker(evidence: RankEvidence) -> WorkerEvidence | None:
    """The worker that has most to tell: others may wait for their next index."""
    told = [each for each in evidence.workers if each.state != "running" or place_of_stack(each.stack).line]
    return min(told, key=lambda each: _WORST.index(each.state), default=None)


def _without_line(evidence: RankEvidence) -> RankPlace:
    why = f" (could not be read: {evidence.missing})" if evidence.missing else ""
    kind: PlaceKind = {"saving": "saving", "evaluating": "evaluating"}.get(evidence.phase, "unknown")  # type: ignore
    return RankPlace(f"is {_PHASES.get(evidence.phase, 'running')}{why}", kind)


def _in_code(evidence: RankEvidence, place: StackPlace, at: str) -> RankPlace:
    if evidence.phase == "saving":
        return RankPlace(f"is {at}, saving a checkpoint", "saving")
    if evidence.phase == "evaluating":
        known = "evaluate()" in at
        return RankPlace(f"is {at}" if known else f"is {at}, evaluating", "evaluating")
    return RankPlace(f"is {at}", "trainer" if place.line.startswith("trainer.") else "code")


def at_line(place: StackPlace) -> str:
    """ "in read_image() at data.py:88, inside trainer.train() at train.py:12" """
    if not place.line:
        return ""
    inside = f", inside {place.caller}" if place.caller else ""
    return f"{'in' if '()' in place.line else 'at'} {place.line}{inside}"


def after(at: str) -> str:
    return f", {at}" if at else ""


class Advice(NamedTuple):
    causes: str
    fix: str

    def __str__(self) -> str:
        return f"usual causes: {self.causes}\nwhat to do: {self.fix}"


_ON_ONE_RANK = "a call inside `if trainer.is_main_process:` or `if rank == 0:`"
LEFT = Advice(
    "a return or break that only some ranks reach, data of different length on each rank, or an error that was caught",
    "make every rank run the same number of steps and collectives",
)
EXIT = Advice(
    "a lock that is never released, a thread that is not a daemon, an exit handler, or a destructor of native code",
    "look at that line; py-spy dump --native --pid {pid} shows native code as well",
)
UNSEEN = Advice(
    "the machine or its network is down, or its launcher was stopped",
    "check that machine, and the network to it; if it is gone, end this run and start it again",
)
MISMATCH = Advice(
    f"{_ON_ONE_RANK}, a step or branch that only some ranks take, or shapes that depend on the data", MISMATCH_FIX
)
ORDER = Advice(
    f"{_ON_ONE_RANK}, or collectives of two groups in another order on some ranks",
    "make the same calls in the same order on every rank; PACELINE_DEBUG=1 names the calls of every rank",
)
NETWORK = Advice(
    "a cut or very slow link, a firewall that drops packets, or a wrong MTU or network interface",
    "check the network between the nodes (ping -M do -s 8972, ip -s link); NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME "
    "choose the interface",
)
LOCAL_NETWORK = Advice(
    "a very slow collective, a GPU or its driver that does not answer, or calls that differ between ranks",
    "wait if it is only slow; check nvidia-smi and dmesg; PACELINE_DEBUG=1 compares the calls of every rank",
)
AT_PLACE: Mapping[PlaceKind, Advice] = MappingProxyType(
    {
        "stopped": Advice(
            "Ctrl-Z in its terminal, a debugger, a scheduler that suspended it, or kill -STOP",
            "resume it with `kill -CONT {pid}`",
        ),
        "disk": Advice(
            "a file server that does not answer, a failing disk or a frozen file system",
            "check dmesg, and df on that file system; the process continues when the disk answers, and can't be killed "
            "before",
        ),
        "gil": Advice(
            "native code that computes, or waits for a lock, without releasing the GIL",
            "look at the call at that line: release the GIL in it, or run it in another process",
        ),
        "debugger": Advice("a breakpoint on one rank", "continue it there, or remove the breakpoint"),
        "worker": Advice(
            "a dataset that waits for a file, the network, or a lock that was held when the worker was forked",
            "look at that line; workers=0 runs it in the rank itself; if the data is only slow, raise timeout",
        ),
        "data": Advice(
            "a dataset that waits for a lock, a file or the network, or a sample that takes very long",
            "look at that line; if the data is only slow, raise timeout or use more workers",
        ),
        "saving": Advice(
            "slow or full storage, or a save that only some ranks make",
            "check the storage of the run folder; call trainer.save() on every rank",
        ),
        "evaluating": Advice(
            f"{_ON_ONE_RANK}, or an evaluation that takes longer on one rank",
            "call trainer.evaluate() on every rank; print the result on rank 0 only",
        ),
        "trainer": Advice(
            f"{_ON_ONE_RANK}, or a callback that runs on one rank only", "call the methods of the Trainer on every rank"
        ),
        "code": Advice(
            "code that only some ranks run or that takes longer on one of them, a lock, or an endless loop",
            "look at that line; long work on one rank belongs before or after training, or into another process",
        ),
        "unknown": Advice(
            "code that only some ranks run, a lock, or native code that does not return",
            "look at the log of that rank; py-spy dump --pid {pid} shows where it is",
        ),
    }
)
