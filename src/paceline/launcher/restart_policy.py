"""What to do when ranks have failed: start them again, or end.

Restarts are for accidents: a machine that went, a card that failed, memory that was short for once. What can't be one
is not tried again: a recipe that is wrong, nodes that differ, or a step that has killed the run three times over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.diagnose.cause import Cause, RankExit, find_cause

CRASH_LOOP = 77  # the exit status
_SAME_STEP = 3
_LONGEST_DELAY = 60.0
# Kinds and families of errors that the next start would meet again.
_LASTING_KINDS = ("version-mismatch", "port-in-use")
_LASTING_ERRORS = ("config", "layout", "model")


@dataclass(frozen=True)
class Restart:
    """The ranks are to be started again after `delay` seconds."""

    cause: Cause
    delay: float
    suspect: int | None = None  # a step that failed twice: its samples are to be written down


@dataclass(frozen=True)
class GiveUp:
    cause: Cause


class Supervisor:
    """Remembers the failures of a job. One for all nodes."""

    def __init__(self, max_restarts: int) -> None:
        self.restarts = 0
        self._max = max_restarts
        self._steps: list[int | None] = []  # in which the failures were

    def judge(
        self,
        ends: Sequence[RankExit],
        *,
        oom_killed: Collection[int] = (),
        lost_nodes: Mapping[int, str] | None = None,
        several_nodes: bool = False,
        suspects: Mapping[int, Sequence[int]] | None = None,
    ) -> Restart | GiveUp:
        """`suspects`: the samples, by rank, of the step that failed twice before."""
        cause = find_cause(ends, oom_killed=oom_killed, lost_nodes=lost_nodes or {}, several_nodes=several_nodes)
        blamed = next((end for end in ends if end.rank == cause.rank), None)
        step = blamed.step if blamed else max((end.step for end in ends if end.step is not None), default=None)
        self._steps.append(step)
        if self._same_steps() >= _SAME_STEP:
            return GiveUp(_crash_loop(cause, step, (suspects or {}).get(-1 if cause.rank is None else cause.rank)))
        if self.restarts >= self._max or _lasts(cause, blamed):
            return GiveUp(cause)
        self.restarts += 1
        return Restart(cause, self._delay(), step if self._same_steps() == _SAME_STEP - 1 else None)

    def _same_steps(self) -> int:
        """How many of the last failures were in one and the same step."""
        last = self._steps[-1]
        count = 0
        for step in reversed(self._steps):
            if step != last or step is None:
                break
            count += 1
        return count

    def _delay(self) -> float:
        """None where training got on since the last failure; else twice as long each time."""
        idle = 0
        for earlier, later in zip(self._steps[-2::-1], self._steps[:0:-1], strict=False):
            if later is not None and (earlier is None or later > earlier):
                break
            idle += 1
        return 0.0 if idle == 0 else min(2.0 ** (idle - 1), _LONGEST_DELAY)


def _lasts(cause: Cause, blamed: RankExit | None) -> bool:
    error = blamed.record.error if blamed is not None and blamed.record is not None else None
    return cause.kind in _LASTING_KINDS or (error is not None and error["family"] in _LASTING_ERRORS)


def _crash_loop(cause: Cause, step: int | None, samples: Sequence[int] | None) -> Cause:
    named = "" if not samples else f"; its samples there were {', '.join(map(str, samples))}"
    return replace(
        cause,
        what=f"{cause.what}\nstep {step} has now failed {_SAME_STEP} times in a row, so it is not tried again{named}",
        status=CRASH_LOOP,
        fix=f"look at {'these' if samples else 'its'} samples, and at what the step does with them; then resume",
    )
