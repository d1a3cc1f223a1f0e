"""The number of steps in each epoch, which a sampler may change in `set_epoch` (a curriculum)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

from paceline.data.epoch_reader import announce_epoch

# Epochs compared to find out whether the length changes. A curriculum grows early, or is complete at the last of them.
_COMPARED = (1, 2, 3, 5, 10, 30, 100, 1000)


class Place(NamedTuple):
    """A step of the run, as a position in an epoch."""

    epoch: int
    skip: int  # steps of that epoch before it


class EpochLengths:
    """`count` returns the steps of the epoch that `source` was told last; None if unknown."""

    def __init__(self, source: Any, count: Callable[[], int | None]) -> None:
        self._source, self._count = source, count
        self._known: list[int] = []

    @cached_property
    def _vary(self) -> bool:
        if not any(hasattr(owner, "set_epoch") for owner in (self._source, getattr(self._source, "sampler", None))):
            return False
        first = self._of(0)
        try:
            return any(self._of(epoch) != first for epoch in _COMPARED)
        except Exception:  # the user's set_epoch may reject epochs beyond its plan
            return False

    @cached_property
    def per_epoch(self) -> int | None:
        """Steps in every epoch; None if unknown, or if they change with the epoch."""
        return None if self._vary else self._count()

    def _of(self, epoch: int) -> int | None:
        announce_epoch(self._source, epoch)
        return self._count()

    def _at(self, epoch: int) -> int:
        while len(self._known) <= epoch:
            self._known.append(self._of(len(self._known)) or 0)
        return self._known[epoch]

    def of(self, epoch: int) -> int | None:
        """Steps in one epoch; None if unknown."""
        return self._at(epoch) if self._vary else self.per_epoch

    def before(self, epoch: int | None) -> int | None:
        """Steps in all epochs before this one; None if unknown."""
        if epoch is None:
            return None
        if self._vary:
            return sum(self._at(past) for past in range(epoch))
        return None if self.per_epoch is None else epoch * self.per_epoch

    def locate(self, step: int) -> Place | None:
        """The position of a step; None if unknown."""
        if not self._vary:
            return Place(*divmod(step, self.per_epoch)) if self.per_epoch else None
        epoch = 0
        while step >= self._at(epoch):
            if self._at(epoch) == 0:  # an empty epoch is an error when it is read
                break
            step, epoch = step - self._at(epoch), epoch + 1
        return Place(epoch, step)


class LaterLengths(EpochLengths):
    """The lengths of epochs of data that a run began to read after others."""

    def __init__(self, own: EpochLengths, begins: Place) -> None:
        self._own, self._begins = own, begins

    @property
    def per_epoch(self) -> int | None:
        return self._own.per_epoch

    def of(self, epoch: int) -> int | None:
        return self._own.of(epoch - self._begins.epoch)

    def before(self, epoch: int | None) -> int | None:
        steps = None if epoch is None else self._own.before(max(0, epoch - self._begins.epoch))
        return None if steps is None else self._begins.skip + steps

    def locate(self, step: int) -> Place | None:
        place = self._own.locate(step - self._begins.skip)
        return None if place is None else Place(place.epoch + self._begins.epoch, place.skip)


UNKNOWN = EpochLengths(None, lambda: None)
