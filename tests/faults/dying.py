"""A small training that dies as it is told: `dying.py WAY RANK MOMENT`, on every rank of a world.

RANK is the one that dies; MOMENT is `start` (before the ranks meet), `step` (after the third) or `save` (while the
checkpoint of the fourth is written). It runs under any launcher.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

import paceline
from paceline.checkpoint.local_store import Filesystem
from paceline.runtime import process_group

WAY, VICTIM, MOMENT = sys.argv[1:]
IS_VICTIM = os.environ["RANK"] == VICTIM
STEP, SAVE, STEPS = 3, 4, 8
PATIENCE = 60.0  # seconds that a rank is waited for
IMPATIENCE = 2.0  # the same, where one is not to come


def raise_exception() -> None:
    raise ValueError("the injected reason")


def run_out_of_gpu_memory() -> None:
    """torch's own exception and words: it can't happen by itself where there is no GPU."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 12.31 GiB free.")


def run_out_of_memory() -> None:
    """In a cgroup with little memory, so that the kernel kills this process and nobody else."""
    Path(os.environ["SMALL_CGROUP"], "cgroup.procs").write_text(str(os.getpid()))
    print(len(bytearray(os.urandom(1 << 20) * 512)))


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def lose_the_network() -> None:
    """Every connection breaks, and this rank does not notice."""
    for path in list(Path("/proc/self/fd").iterdir()):
        try:
            connection = socket.socket(fileno=os.dup(int(path.name)))
        except OSError:
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                _shut_down(connection)
    hang()


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.getpeername()
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is not connected


def open_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        TCPStore("127.0.0.1", taken.getsockname()[1], is_master=True)


def hang() -> None:
    """It ends when it is told to: the Trainer's answer to SIGTERM, a save, would have to wait for this."""
    ctypes.CDLL(None).signal(signal.SIGTERM, signal.SIG_DFL)  # Python's own may be called on the main thread only
    while True:
        signal.pause()


def run_another_version() -> None:
    paceline.__version__ = "0.0.1"


def leave() -> None:
    os._exit(0)


WAYS: dict[str, Callable[[], None]] = {
    "exception": raise_exception,
    "gpu-memory": run_out_of_gpu_memory,
    "oom-killer": run_out_of_memory,
    "SIGKILL": be_killed,
    "SIGSEGV": crash,
    "lost-connection": lose_the_network,
    "port-in-use": open_a_taken_port,
    "timeout": hang,
    "version-mismatch": run_another_version,
    "early-exit": leave,
}


class Dying:
    """A callback. Its state goes into checkpoints, so what it raises is raised in a save; other deaths come while
    the save writes."""

    def on_step(self, record: Any) -> None:
        if WAY == "timeout" and record.step == STEP:
            process_group.shorten_timeout(IMPATIENCE)
        if IS_VICTIM and MOMENT == "step" and record.step == STEP:
            WAYS[WAY]()
        if IS_VICTIM and MOMENT == "save" and record.step == SAVE and WAY != "exception":
            Filesystem.sync = lambda self, descriptor: WAYS[WAY]()  # type: ignore[method-assign]

    def state_dict(self) -> dict[str, Any]:
        if IS_VICTIM and MOMENT == "save" and WAY == "exception":
            WAYS[WAY]()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def main() -> None:
    if IS_VICTIM and MOMENT == "start":
        WAYS[WAY]()
    inputs = torch.randn(48, 8, generator=torch.Generator().manual_seed(3))
    timeout = IMPATIENCE if (WAY, MOMENT) == ("timeout", "start") else PATIENCE
    trainer = paceline.Trainer(
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)),
        {"name": "sgd", "lr": 0.1}, criterion=torch.nn.CrossEntropyLoss(), batch=24, timeout=timeout, quiet=True,
        save_every=SAVE, checkpoint={"background": False}, callbacks=[Dying()],
    )  # fmt: skip
    trainer.train(torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).long()), max_steps=STEPS)


if __name__ == "__main__":
    main()
