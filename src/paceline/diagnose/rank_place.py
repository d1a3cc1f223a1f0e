"""Where a rank that does not wait for others stands, and what keeps it there.

is in read_image() at data.py:88, inside trainer.train() at train.py:12, reading a batch
is waiting for its DataLoader worker (pid 71), which is stopped by a signal, in read_image() at data.py:88
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from paceline.diagnose.evidence import ProcessState, RankEvidence, WorkerEvidence
from paceline.diagnose.place import StackPlace, place_of_stack
from paceline.diagnose.waits import holds_gil

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


def rank_place(evidence: RankEvidence) -> RankPlace:
    place = place_of_stack(evidence.stack)
    at = _at(place)
    if evidence.state == "stopped":
        return RankPlace(_STATES["stopped"] + _after(at), "stopped", evidence.pid)
    if evidence.state == "disk":
        return RankPlace(_STATES["disk"] + _after(at), "disk")
    if place.activity == "debugger":
        return RankPlace(f"is in a debugger{_after(at)}", "debugger")
    if holds_gil(evidence, place):
        thread = _at(place_of_stack(evidence.gil_holder))
        return RankPlace(
            f"is kept by a thread that holds the GIL, {thread}" if thread else f"is holding the GIL{_after(at)}", "gil"
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
    at = _at(place_of_stack(worker.stack))
    does = _STATES[worker.state] + _after(at) if worker.state in _STATES else f"is {at or 'running'}"
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


def _at(place: StackPlace) -> str:
    """ "in read_image() at data.py:88, inside trainer.train() at train.py:12" """
    if not place.line:
        return ""
    inside = f", inside {place.caller}" if place.caller else ""
    return f"{'in' if '()' in place.line else 'at'} {place.line}{inside}"


def _after(at: str) -> str:
    return f", {at}" if at else ""
