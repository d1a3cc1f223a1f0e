"""A real all-reduce between the nodes, on the backend that training would use."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from paceline.doctor.finding import Finding
from paceline.doctor.links import format_ms
from paceline.errors import PacelineError

SECONDS = 60.0  # for everything; the first use of a GPU takes some of them
_CONNECT_SECONDS = 20.0
_SMALL, _LARGE = 1, 4 << 20  # numbers of 4 bytes


@dataclass(frozen=True)
class AllReduceResult:
    """On one node. `error`: why there are no times."""

    backend: str = ""
    small: float = 0.0  # seconds for one number
    large: float = 0.0  # for 16 MiB
    error: str = ""
    took: float = 0.0  # seconds until the error
    is_stuck: bool = False  # whether it still waits, in a thread

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def all_reduce(device: str | int | None, backend: str | None, seconds: float = SECONDS) -> AllReduceResult:
    """Collective: must be called on every rank. NCCL may block for half an hour: it runs in a thread, with a limit."""
    done: list[AllReduceResult] = []
    thread = threading.Thread(target=lambda: done.append(_run(device, backend)), daemon=True)
    thread.start()
    thread.join(seconds)
    return (
        done[0] if done else AllReduceResult(error=f"it did not end within {seconds:g} s", took=seconds, is_stuck=True)
    )


def _run(device: str | int | None, backend: str | None) -> AllReduceResult:
    import torch
    import torch.distributed as torch_dist

    from paceline.runtime import process_group

    def timed(numbers: int, calls: int) -> float:
        seconds = []
        for _ in range(calls):
            tensor = torch.ones(numbers, device=world.device)
            began = perf_counter()
            torch_dist.all_reduce(tensor)
            total = float(tensor[-1])  # waits for a GPU
            seconds.append(perf_counter() - began)
            if total != world.size:
                raise RuntimeError(f"wrong sum: {total:g} instead of {world.size}")
        return min(seconds[1:])  # the first one connects

    started = perf_counter()
    try:
        world = process_group.init_world(device=device, backend=backend, timeout=_CONNECT_SECONDS)
        if world.size == 1:
            process_group.init_single(world.device)
        process_group.shorten_timeout(SECONDS)
        result = AllReduceResult(torch_dist.get_backend(), timed(_SMALL, 5), timed(_LARGE, 2))
        process_group.destroy()
    except Exception as error:
        text = error.what if isinstance(error, PacelineError) else str(error) or type(error).__name__
        return AllReduceResult(error=text, took=perf_counter() - started)
    return result


def judge_all_reduce(names: list[str], results: list[AllReduceResult], *, of: str = "") -> Finding:
    """From the results of all nodes; `of`: what took part, if not these."""
    failed = [(result.took, name, result.error) for name, result in zip(names, results, strict=True) if result.error]
    if failed:
        _, name, error = min(failed)  # the others fail later, because they wait for this one
        fix = "run again with NCCL_DEBUG=INFO (TORCH_DISTRIBUTED_DEBUG=DETAIL for gloo), and check --interface"
        first = f"An all-reduce of {of} fails" if of else f"An all-reduce fails first on {name}"
        return Finding("all-reduce", "fail", f"{first}: {error}", "", fix, "" if of else name)
    small, large = (max(getattr(each, size) for each in results) for size in ("small", "large"))
    times = f"{format_ms(small)} for one number, {format_ms(large)} for 16 MiB"
    return Finding("all-reduce", "ok", f"{of or f'{len(names)} nodes'}, {results[0].backend}: {times}")
