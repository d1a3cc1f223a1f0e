"""The position of samples in a run, which randomness per sample is derived from."""

from __future__ import annotations

from typing import Protocol


class Samples(Protocol):
    """The position of samples in the global batch: a micro-batch of a loader, for example."""

    samples: int  # on this rank; 0 for a placeholder batch
    start: int  # of the first one in its step
    step_samples: int  # in the step, on all ranks
    step: int
