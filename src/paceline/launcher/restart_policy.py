"""What to do after ranks have failed: restart them, or give up.

Restarts are for transient failures: a lost machine, a failed GPU, a shortage of memory. Failures that the next start
would repeat are not retried: an invalid recipe, nodes that differ, or a step that has failed three times in a row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.config.launch import OnHang
from paceline.diagnose.cause import Cause, find_cause, hang_cause
from paceline.diagnose.exits import RankExit
from paceline.diagnose.hang.evidence import Hang

CRASH_LOOP = 77  # exit status
_CRASH_LOOP_FAILURES = 3  # in the same step
_MAX_DELAY = 60.0
# Kinds of failure, and families of errors, that the next start would repeat.
_PERMANENT_KINDS = ("version-mismatch", "port-in-use")
_PERMANENT_ERRORS = ("config", "layout", "model")


@dataclass(frozen=True)
class Restart:
    """Start the ranks again after `delay` seconds."""

    cause: Cause
    delay: float
    suspect: int | None = None  # a step that failed twice: ranks record its samples


@dataclass(frozen=True)
class GiveUp:
    """End the job."""

    cause: Cause


class Supervisor:
    """Decides after each failure of a job; there is one for all nodes."""

    def __init__(self, max_restarts: int, on_hang: OnHang = "report") -> None:
        self.restarts = 0
        self._max_restarts, self._on_hang = max_restarts, on_hang
        self._failed_steps: list[int | None] = []

    def decide(
        self,
        exits: Sequence[RankExit],
        *,
        oom_killed: Collection[int] = (),
        lost_nodes: Mapping[int, str] | None = None,
        several_nodes: bool = False,
        suspects: Mapping[int, Sequence[int]] | None = None,
        hang: Hang | None = None,
    ) -> Restart | GiveUp:
        """`suspects`: by rank, the recorded samples of the step that failed twice. `hang`: for which the ranks were
        stopped."""
        cause = find_cause(exits, oom_killed=oom_killed, lost_nodes=lost_nodes, several_nodes=several_nodes)
        if hang is not None and not lost_nodes:
            cause = hang_cause(hang, exits)
        blamed = next((each for each in exits if each.rank == cause.rank), None)
        step = blamed.step if blamed else max((each.step for each in exits if each.step is not None), default=None)
        self._failed_steps.append(step)
        if self._failures_in_step() >= _CRASH_LOOP_FAILURES:
            return GiveUp(_crash_loop(cause, step, (suspects or {}).get(-1 if cause.rank is None else cause.rank)))
        if not self.is_restart_left or _is_permanent(cause, blamed) or (hang is not None and self._on_hang == "stop"):
            return GiveUp(cause)
        self.restarts += 1
        is_suspect = self._failures_in_step() == _CRASH_LOOP_FAILURES - 1
        return Restart(cause, self._delay(), step if is_suspect else None)

    @property
    def is_restart_left(self) -> bool:
        return self.restarts < self._max_restarts

    def _failures_in_step(self) -> int:
        """How many of the latest failures occurred in the same step."""
        last = self._failed_steps[-1]
        count = 0
        for step in reversed(self._failed_steps):
            if step != last or step is None:
                break
            count += 1
        return count

    def _delay(self) -> float:
        """Zero if training progressed since the last failure; otherwise it doubles with each failure."""
        stalled = 0
        for earlier, later in zip(self._failed_steps[-2::-1], self._failed_steps[:0:-1], strict=False):
            if later is not None and (earlier is None or later > earlier):
                break
            stalled += 1
        return 0.0 if stalled == 0 else min(2.0 ** (stalled - 1), _MAX_DELAY)


def _is_permanent(cause: Cause, blamed: RankExit | None) -> bool:
    error = blamed.record.error if blamed is not None and blamed.record is not None else None
    return cause.kind in _PERMANENT_KINDS or (error is not None and error["family"] in _PERMANENT_ERRORS)


def _crash_loop(cause: Cause, step: int | None, samples: Sequence[int] | None) -> Cause:
    listed = f"; its samples were {', '.join(map(str, samples))}" if samples else ""
    return replace(
        cause,
        what=f"{cause.what}\nstep {step} failed {_CRASH_LOOP_FAILURES} times in a row, so it is not retried{listed}",
        status=CRASH_LOOP,
        fix=f"check {'these' if samples else 'its'} samples and what the step does with them, then resume",
    )
