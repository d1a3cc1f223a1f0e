"""Two ranks on two machines with a slow link between them: network namespaces, joined by a veth pair, each of which
limits what it sends with a token bucket (`tc tbf`).

    with two_machines() as pair:
        result = on_both(pair, function)     # rank 0's; gloo is initialized

Inside of a rank, `limit_rate` sets the rate of its machine and `sent_bytes` reads the counter of its interface.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from system import namespaces
from system.namespaces import Machine

Pair = tuple[Machine, Machine]
PORT = 29600  # no other process is in these namespaces
# A bucket that fills in two milliseconds: with one, the link is slower than its rate; a large one would let the small
# messages of a compressed step pass for free.
FILL_SECONDS = 0.002
LARGE, SMALL = 8 << 20, 8  # bytes of the all-reduces that measure the link
_here: Machine | None = None  # of this rank


@contextmanager
def two_machines() -> Iterator[Pair]:
    """Unlimited until a rank sets a rate. Ctrl-C and SIGTERM remove them too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with namespaces.joined() as pair:
            yield pair
    finally:
        signal.signal(signal.SIGTERM, before)


def limit_rate(megabits: int | None) -> None:
    """What this machine sends from now on; None: no limit."""
    assert _here is not None
    device = ("dev", _here.interface, "root")
    subprocess.run(("tc", "qdisc", "del", *device), capture_output=True)  # there may be none
    if megabits is not None:
        burst = int(megabits * 1e6 / 8 * FILL_SECONDS)
        shape = ("rate", f"{megabits}mbit", "burst", f"{burst}b", "latency", "400ms")  # long enough to drop nothing
        subprocess.run(("tc", "qdisc", "add", *device, "tbf", *shape), check=True)


def sent_bytes() -> int:
    """Sent by this machine's interface since it exists, headers included."""
    assert _here is not None
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if _here.interface in line)
    return int(line.partition(":")[2].split()[8])


def measure_link(megabits: int) -> dict[str, float]:
    """Seconds of the smallest all-reduce, and bytes per second of the interface during a large one."""
    limit_rate(megabits)
    latency = statistics.median(_all_reduce(SMALL)[0] for _ in range(30))
    _all_reduce(LARGE)
    seconds, sent = zip(*(_all_reduce(LARGE) for _ in range(2)), strict=True)
    return {"latency": latency, "rate": sum(sent) / sum(seconds), "goodput": LARGE * len(seconds) / sum(seconds)}


def _all_reduce(size: int) -> tuple[float, int]:
    """Seconds, and bytes that were sent."""
    tensor = torch.ones(size // 4)
    dist.barrier()
    sent, started = sent_bytes(), time.perf_counter()
    dist.all_reduce(tensor)
    return time.perf_counter() - started, sent_bytes() - sent


def on_both(pair: Pair, function: Callable[[], Any], *, joined: bool = True, seconds: float = 1800) -> Any:
    """Call it on two ranks, one on each machine, and return what rank 0 returned. Without `joined`, each is alone."""
    context = multiprocessing.get_context("fork")
    ends, ranks = [], []
    try:
        for rank, machine in enumerate(pair):
            ours, theirs = context.Pipe(duplex=False)
            ranks.append(context.Process(target=_rank, args=(rank, machine, pair[0], function, joined, theirs)))
            ranks[-1].start()
            theirs.close()
            ends.append(ours)
        results: dict[int, Any] = {}
        until = time.monotonic() + seconds
        while len(results) < len(ends):
            open_ends = [end for place, end in enumerate(ends) if place not in results]
            for end in wait(open_ends, max(0.0, until - time.monotonic())) or _timed_out(seconds):
                assert isinstance(end, Connection)
                number = ends.index(end)
                try:
                    failed, value = end.recv()
                except EOFError:
                    failed, value = True, f"rank {number} died"
                if failed:
                    raise RuntimeError(value)
                results[number] = value
        return results[0]
    finally:
        for process in ranks:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()


def _timed_out(seconds: float) -> Any:
    raise TimeoutError(f"the ranks did not finish within {seconds:.0f} s")


def _rank(rank: int, here: Machine, first: Machine, function: Callable[[], Any], joined: bool, end: Connection) -> None:
    global _here
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    _here = here
    here.enter()
    os.environ["GLOO_SOCKET_IFNAME"] = here.interface
    try:
        if joined:
            dist.init_process_group("gloo", init_method=f"tcp://{first.address}:{PORT}", rank=rank, world_size=2)
        value = function()
        if joined:
            dist.barrier()
        end.send((False, value))
    except BaseException:
        end.send((True, traceback.format_exc()))
    finally:
        sys.stdout.flush()
        os._exit(0)  # without destructors: the other rank may have failed
