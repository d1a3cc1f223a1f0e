"""A real all-reduce between two ranks of this machine, on the backend that training would use."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.doctor.finding import Finding

_RANKS = 2
_SECONDS = 20.0
_OF_A_JOB = re.compile(r"(?:PET|SLURM|OMPI|PMI|TORCHELASTIC|LOCAL|GROUP|ROLE|MASTER)_\w+|(?:NODE_)?RANK|WORLD_SIZE")


def check(device: str | int | None, backend: str | None, gpus: int) -> Finding:
    """With fewer than two GPUs the ranks use the CPU: NCCL does not support two ranks on one GPU."""
    import paceline
    from paceline.doctor.all_reduce_check import AllReduceResult, all_reduce, judge_all_reduce
    from paceline.errors import PacelineError

    where = None if device != "cpu" and gpus >= _RANKS else "cpu"

    def rank() -> dict[str, object]:
        return all_reduce(where, backend if where is None else None, _SECONDS).to_json()

    try:
        with _without_job():
            result = paceline.launch(rank, ranks=_RANKS)
    except PacelineError as error:
        return Finding("all-reduce", "fail", error.what, error.why, error.fix)
    return judge_all_reduce([""], [AllReduceResult(**result)], of=f"{_RANKS} ranks")


@contextmanager
def _without_job() -> Iterator[None]:
    """Hide the variables of a job that this machine is part of, such as those in a pod: its ranks must not be met."""
    names = [name for name in os.environ if _OF_A_JOB.fullmatch(name)]
    hidden = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(hidden)
