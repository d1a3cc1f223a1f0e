"""A real all-reduce between two ranks of this machine, on the backend that training would use."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from paceline.doctor.finding import Finding
from paceline.text import plural

_RANKS = 2
_SECONDS = 20.0
_OF_A_JOB = re.compile(r"(?:PET|SLURM|OMPI|PMI|TORCHELASTIC|LOCAL|GROUP|ROLE|MASTER)_\w+|(?:NODE_)?RANK|WORLD_SIZE")


def check(device: str | int | None, backend: str | None, gpus: int) -> Finding:
    """With a single GPU there is one rank, because NCCL does not support two on one; without any, two on the CPU."""
    import paceline
    from paceline.doctor.all_reduce_check import AllReduceResult, all_reduce, judge_all_reduce
    from paceline.errors import PacelineError

    where = None if device != "cpu" and gpus else "cpu"
    ranks = min(_RANKS, gpus) if where is None else _RANKS

    def rank() -> dict[str, object]:
        return all_reduce(where, backend if where is None else None, _SECONDS).to_json()

    try:
        with _environment({} if where is None else {"CUDA_VISIBLE_DEVICES": ""}):
            result = paceline.launch(rank, ranks=ranks)
    except PacelineError as error:
        return Finding("all-reduce", "fail", error.what, error.why, error.fix)
    return judge_all_reduce([""], [AllReduceResult(**result)], of=plural(ranks, "rank"))


@contextmanager
def _environment(changed: Mapping[str, str]) -> Iterator[None]:
    """Without the variables of a job that this machine is in, such as those of a pod: its ranks must not be met."""
    before = dict(os.environ)
    for name in filter(_OF_A_JOB.fullmatch, before):
        del os.environ[name]
    os.environ.update(changed)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
