"""Runs the trials of a study: starts them on free places, follows them, and tells the study how they ended.

Whatever happened to an earlier process of the same sweep, the study and the run folders say what is left to do:

    running in the study      it was interrupted: it is started again, and resumes from its last checkpoint
    paused                    it waits at a rung of successive halving; perhaps a longer search continues it
    its last launch ended     its result is read from its run folder, and it is not started again

A launch whose launchers never started says nothing about its trial, which is started again, elsewhere if possible.
"""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from paceline import log
from paceline.diagnose.exits import EXIT_STATUSES
from paceline.errors import SearchError
from paceline.launcher.local.interrupts import noted
from paceline.run import ledger
from paceline.run import study_folder as study_files
from paceline.run.folder import RunFolder
from paceline.run.ledger import RunEnd, find_end
from paceline.run.lock import RunLock
from paceline.text import format_duration, plural
from paceline.tools.search import placement
from paceline.tools.search.placement import Pool, TrialProcess, TrialSlot
from paceline.tools.search.space import is_repeatable
from paceline.tools.search.study import Study
from paceline.tools.search.trial import Trial, next_promotion, rung_fraction

_POLL_SECONDS = 0.2
_READ_SECONDS = 1.0  # between two looks at the metrics of a running trial
_READ_SHARE = 20  # reading takes at most this fraction of the time
_STOP_SECONDS = 60.0  # for trials to save after Ctrl-C
_BUSY_SECONDS = 5.0  # until a trial whose run folder another machine still uses is started again
_HOPELESS = 3  # trials that fail before any other ends
_IN_USE = "[checkpoint.run-in-use]"
_NOT_STARTED = ("[launch.node-unavailable]", "[launch.node-failed]", "[launch.nodes-missing]")
_MOST_NOT_STARTED = 5  # launches in a row, before the sweep ends
_FIRST_REST, _MAX_REST = 1.0, 60.0  # seconds
# Failures that a second start may not repeat. A trial that ran out of memory or raised would do so again.
_ACCIDENTS = {EXIT_STATUSES[kind] for kind in ("lost-connection", "port-in-use", "timeout", "node-lost", "hang")}
_KINDS = {status: kind for kind, status in EXIT_STATUSES.items()}


class TrialBody(Protocol):
    """What a trial does, in a process of its own. Returns an exit status."""

    def body(self, trial: Trial, folder: RunFolder, slot: TrialSlot, fraction: float | None) -> int: ...


@dataclass
class _Running:
    trial: Trial
    slot: TrialSlot
    process: TrialProcess
    output_from: int = 0  # where what this launch printed begins
    seen: int = -1  # the last step whose value was reported
    next_read: float = 0.0
    is_pruned: bool = False


@dataclass
class Sweep:
    """One process that works on a study."""

    study: Study
    pool: Pool
    trials: TrialBody
    waits: list[float] = field(default_factory=list)  # seconds for which a place was free while a trial was left
    _running: dict[int, _Running] = field(default_factory=dict)
    _interrupted: list[int] = field(default_factory=list)  # trials to start again
    _signals: list[int] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _freed: list[float] = field(default_factory=list)
    _not_before: dict[int, float] = field(default_factory=dict)  # by trial
    _is_told_spent: bool = False
    _not_started: int = 0  # launches in a row
    _resting: list[tuple[float, TrialSlot]] = field(default_factory=list)  # each with its end

    def run(self) -> int:
        """Work until the search is over. Returns the exit status."""
        lock = RunLock(RunFolder(self.study.folder.path))
        lock.take()
        try:
            # The last one is SLURM's warning.
            with noted(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2) as self._signals:
                self._announce()
                self._interrupted = [each.number for each in self.study.trials() if each.state == "running"]
                while not self._signals:
                    self._follow()
                    has_more = self._start_trials()
                    if not self._running and not has_more:
                        return 0
                    self._wait()
                return self._stop()
        finally:
            for each in self._running.values():
                each.process.send(signal.SIGKILL if len(self._signals) > 1 else signal.SIGTERM)
            lock.release()

    def _announce(self) -> None:
        study, section = self.study, self.study.section
        known = study.trials()
        done = sum(each.has_ended for each in known)
        again = f", {done} of which have ended" if known else ""
        places = f"up to {self.pool.parallel} at a time, {plural(self.pool.ranks, 'rank')} each"
        log.info(f"sweep: {plural(study.size, 'trial')}{again}, {places}; study: {study.folder.short}")
        if not is_repeatable(section.sampler) and self.pool.parallel > 1:
            log.info(f"{section.sampler} learns from results: parameters depend on the order in which trials end")

    def _wait(self) -> None:
        """Until a trial ends, for a moment."""
        descriptors = []
        with suppress(AttributeError, OSError):  # not Linux
            descriptors = [os.pidfd_open(each.process.pid) for each in self._running.values()]
        try:
            select.select(descriptors, [], [], _POLL_SECONDS)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _follow(self) -> None:
        for number, running in list(self._running.items()):
            status = running.process.poll()
            self._read_values(running, at_once=status is not None)
            if status is not None:
                del self._running[number]
                said = self._output(running.trial, running.output_from)
                if status == 2 and not self._signals and any(code in said for code in _NOT_STARTED):
                    self._postpone(running, said)
                    continue
                self.pool.give_back(running.slot)
                self._freed.append(time.monotonic())
                self._not_started = 0
                self._ended(running, status)

    def _postpone(self, running: _Running, said: str) -> None:
        before, self._not_started = self._not_started, self._not_started + 1
        self.pool.rest(running.slot)
        self._resting.append((time.monotonic() + min(_FIRST_REST * 2.0**before, _MAX_REST), running.slot))
        self._interrupted.append(running.trial.number)
        line = next(each for each in said.splitlines() if each.startswith(_NOT_STARTED))
        log.info(f"trial {running.trial.number} was not started on {running.slot}: {line}; starting it again")
        if self._not_started >= _MOST_NOT_STARTED and not self._running:
            raise SearchError("no-launch", f"The last {self._not_started} launches of trials did not start: {line}")

    def _read_values(self, running: _Running, *, at_once: bool) -> None:
        now, number = time.monotonic(), running.trial.number
        if now < running.next_read and not at_once:
            return
        section = self.study.section
        folder = self.study.folder.trial(number)
        for step, value in study_files.values(folder, section.metric, has_ended=at_once):
            if step > running.seen:
                self.study.report(number, step, value)
                running.seen = step
        running.next_read = now + max(_READ_SECONDS, _READ_SHARE * (time.monotonic() - now))
        if not running.is_pruned and not at_once and self.study.should_prune(number):
            running.is_pruned = True
            running.process.send(signal.SIGTERM)

    def _ended(self, running: _Running, status: int) -> None:
        number, folder = running.trial.number, self.study.folder.trial(running.trial.number)
        trial = self.study.trials()[number]
        seconds = trial.seconds + time.monotonic() - running.process.began
        self.study.update(number, steps=study_files.steps_of(folder), seconds=seconds)
        if running.is_pruned:
            self._tell(trial, "pruned")
        elif status == 0:
            self._reached(trial)
        elif self._signals:
            return  # it was stopped together with this process
        elif status == 2 and _IN_USE in self._output(trial, running.output_from)[-2000:]:
            self._not_before[number] = time.monotonic() + _BUSY_SECONDS
            self._interrupted.append(number)
        elif (status in _ACCIDENTS or status > 128) and trial.accidents < self.study.section.retries:
            log.info(f"trial {number}: {self._verdict(trial, status)}; starting it again")
            self.study.update(number, accidents=trial.accidents + 1)
            self._interrupted.append(number)
        else:
            self.study.update(number, verdict=self._verdict(trial, status))
            self._tell(trial, "failed")

    def _reached(self, trial: Trial) -> None:
        """A launch of the trial has ended well: at a rung, or at the end."""
        section, folder = self.study.section, self.study.folder.trial(trial.number)
        found = study_files.values(folder, section.metric)
        value = found[-1][1] if found else math.nan
        if not math.isfinite(value):
            problem = f"its last {section.metric} is not finite" if found else f"it reported no {section.metric!r}"
            self.study.update(trial.number, verdict=problem)
            self._tell(trial, "failed")
            return
        self.study.update(trial.number, steps=study_files.steps_of(folder))
        if self._fraction(trial.rung) is None:
            self._tell(trial, "complete", value)
            return
        self.study.update(trial.number, rung_values={**trial.rung_values, trial.rung: value}, paused=True)
        log.info(f"trial {trial.number}: {section.metric} {value:.6g} at rung {trial.rung + 1} of {section.rungs}")

    def _tell(self, trial: Trial, state: str, value: float | None = None) -> None:
        before = self.study.best
        last = trial.value if value is None else value
        self.study.tell(trial.number, last if state != "failed" else None, state=state)  # type: ignore[arg-type]
        ended = self.study.trials()[trial.number]
        told = f"{self.study.section.metric} {ended.value:.6g}" if ended.value is not None else ""
        best = self.study.best
        mark = " (best so far)" if best is not None and best.number == trial.number and best != before else ""
        why = f": {ended.verdict}" if state == "failed" else ""
        words = [each for each in (state, told, f"{ended.steps} steps", format_duration(ended.seconds)) if each]
        log.info(f"trial {trial.number}: {', '.join(words)}{mark}{why}")

    def _verdict(self, trial: Trial, status: int) -> str:
        """Why a trial failed, in a line."""
        folder = self.study.folder.trial(trial.number)
        kind = _KINDS.get(status, f"signal {status - 128}" if status > 128 else f"exit status {status}")
        end = find_end(ledger.events(folder)) or RunEnd("failed")
        place = "" if end.rank is None else f" on rank {end.rank}"
        place += f" in step {end.step}" if end.step else ""
        said = (end.text or self._output(trial)).splitlines()[-1:]
        line = f"{end.exception}: {end.message}".splitlines()[0] if end.exception else "".join(said)
        return f"{end.cause or kind}{place}" + (f": {line[:200]}" if line else "")

    def _output(self, trial: Trial, start: int = 0) -> str:
        """What the launches of a trial have printed, or those of them that began there."""
        with suppress(OSError):
            return self.study.folder.trial_output(trial.number).read_bytes()[start:].decode(errors="replace").strip()
        return ""

    def _start_trials(self) -> bool:
        """Start trials while there are places. Returns whether more are left to start."""
        for end, resting in list(self._resting):
            if time.monotonic() >= end:
                self._resting.remove((end, resting))
                self.pool.wake(resting)
        while self._not_started < _MOST_NOT_STARTED or not self._running:
            trial = self._next()
            if trial is None:
                return bool(self._interrupted)
            slot = self.pool.take()
            if slot is None:
                return True
            self._start(trial, slot)
        return True

    def _next(self) -> Trial | None:
        """The trial to start next: one that was interrupted, one that is promoted, or a new one."""
        known = self.study.trials()
        for number in self._interrupted:
            trial = known[number]
            if study_files.completed_launches(self.study.folder.trial(number)) > trial.completed_before:
                self._interrupted.remove(number)  # only this process had not learned of its end
                self._reached(trial)
                return self._next()
            is_due = time.monotonic() >= self._not_before.get(number, 0.0)
            if is_due and placement.is_free(self.study.folder.trial_lock(number)):
                return trial
        section = self.study.section
        if self._is_spent(known) or self._is_hopeless(known):
            return None
        is_full = len(known) >= self.study.size
        is_limited = section.minutes is not None or section.steps is not None
        if section.pruner == "asha" and (is_full or is_limited):
            waits = [each for each in known if each.state == "running" and each.rung == 0]
            promoted = next_promotion(
                known, section.rungs, section.eta, minimizes=self.study.minimizes, is_last=is_full and not waits,
                high_first=is_limited,
            )  # fmt: skip
            if promoted is not None:
                return promoted
        if is_full or not self.pool.has_room:
            return None
        return self.study.ask()

    def _is_spent(self, known: list[Trial]) -> bool:
        section = self.study.section
        late = section.minutes is not None and time.monotonic() - self._began > 60 * section.minutes
        steps = sum(each.steps for each in known)
        if not late and (section.steps is None or steps < section.steps):
            return False
        if not self._is_told_spent:
            self._is_told_spent = True
            log.info(f"no trial is started any more: sweep.{'minutes' if late else 'steps'} is spent ({steps} steps)")
        return True

    def _is_hopeless(self, known: list[Trial]) -> bool:
        """Whether nothing but failures came of the first trials."""
        ended = [each for each in known if each.has_ended or each.rung_values]
        return len(ended) >= _HOPELESS and all(each.state == "failed" for each in ended)

    def _start(self, trial: Trial, slot: TrialSlot) -> None:
        number, folder = trial.number, self.study.folder.trial(trial.number)
        if number in self._interrupted:
            self._interrupted.remove(number)
        rung = trial.rung + 1 if trial.state == "paused" else trial.rung
        self.study.update(
            number, paused=False, rung=rung, attempts=trial.attempts + 1, slot=str(slot),
            completed_before=study_files.completed_launches(folder),
        )  # fmt: skip
        fraction = self._fraction(rung)
        output = self.study.folder.trial_output(number)
        output_from = output.stat().st_size if output.exists() else 0
        process = placement.start(
            lambda: self.trials.body(trial, folder, slot, fraction),
            output=output,
            lock=self.study.folder.trial_lock(number),
            env=slot.node_env,
        )
        if self._freed:
            self.waits.append(time.monotonic() - self._freed.pop(0))
        self._running[number] = _Running(trial, slot, process, output_from, seen=max(trial.values, default=-1))
        again = "resumed: " if trial.attempts else ""
        log.info(f"trial {number}: {again}{format_params(trial.params)}")

    def _fraction(self, rung: int) -> float | None:
        section = self.study.section
        return rung_fraction(rung, section.rungs, section.eta) if section.pruner == "asha" else None

    def _stop(self) -> int:
        """After a signal: trials save, and continue when the same command runs again."""
        log.info("\nstopping: trials save a checkpoint; the same command continues. Press Ctrl-C again to kill them")
        for running in self._running.values():
            running.process.send(signal.SIGTERM)
        end = time.monotonic() + _STOP_SECONDS
        while self._running and len(self._signals) < 2 and time.monotonic() < end:
            self._wait()
            self._follow()
        return 128 + self._signals[0]


def format_params(params: Mapping[str, object]) -> str:
    texts = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in params.items()}
    return " ".join(f"{key}={text}" for key, text in texts.items())
