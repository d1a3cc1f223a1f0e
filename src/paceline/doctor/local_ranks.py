"""A real all-reduce between two ranks of this machine, on the backend that training would use."""

from __future__ import annotations

from dataclasses import replace

from paceline.doctor.finding import Finding

_RANKS = 2
_SECONDS = 20.0


def check(device: str | int | None, backend: str | None, gpus: int) -> Finding:
    """With fewer than two GPUs the ranks use the CPU: NCCL does not support two ranks on one GPU."""
    import paceline
    from paceline.doctor.all_reduce_check import AllReduceResult, all_reduce, judge_all_reduce
    from paceline.errors import PacelineError

    where = None if device != "cpu" and gpus >= _RANKS else "cpu"

    def rank() -> list[dict[str, object]]:
        from paceline.runtime import collectives

        own = all_reduce(where, backend if where is None else None, _SECONDS).to_json()
        return [own] if collectives.rank() == 0 else []

    try:
        results = [AllReduceResult(**each) for each in paceline.launch(rank, ranks=_RANKS)]
    except PacelineError as error:
        results = [AllReduceResult(error=error.what)]
    found = judge_all_reduce(["rank 0"], results)
    return replace(found, what=found.what.replace("1 nodes", f"{_RANKS} ranks"), host="")
