"""The usual causes of each kind of hang, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from paceline.diagnose.exits import MISMATCH_FIX
from paceline.diagnose.rank_place import PlaceKind


class Advice(NamedTuple):
    causes: str
    fix: str

    def __str__(self) -> str:
        return f"usual causes: {self.causes}\nwhat to do: {self.fix}"


_ON_ONE_RANK = "a call inside `if trainer.is_main_process:` or `if rank == 0:`"
LEFT = Advice(
    "a return or break that only some ranks reach, data of different length on each rank, or an error that was caught",
    "make every rank run the same number of steps and collectives",
)
EXIT = Advice(
    "a lock that is never released, a thread that is not a daemon, an exit handler, or a destructor of native code",
    "look at that line; py-spy dump --native --pid {pid} shows native code as well",
)
UNSEEN = Advice(
    "the machine or its network is down, or its launcher was stopped",
    "check that machine, and the network to it; if it is gone, end this run and start it again",
)
MISMATCH = Advice(
    f"{_ON_ONE_RANK}, a step or branch that only some ranks take, or shapes that depend on the data", MISMATCH_FIX
)
ORDER = Advice(
    f"{_ON_ONE_RANK}, or collectives of two groups in another order on some ranks",
    "make the same calls in the same order on every rank; PACELINE_DEBUG=1 names the calls of every rank",
)
NETWORK = Advice(
    "a cut or very slow link, a firewall that drops packets, or a wrong MTU or network interface",
    "check the network between the nodes (ping -M do -s 8972, ip -s link); NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME "
    "choose the interface",
)
LOCAL_NETWORK = Advice(
    "a very slow collective, a GPU or its driver that does not answer, or calls that differ between ranks",
    "wait if it is only slow; check nvidia-smi and dmesg; PACELINE_DEBUG=1 compares the calls of every rank",
)
AT_PLACE: Mapping[PlaceKind, Advice] = MappingProxyType(
    {
        "stopped": Advice(
            "Ctrl-Z in its terminal, a debugger, a scheduler that suspended it, or kill -STOP",
            "resume it with `kill -CONT {pid}`",
        ),
        "disk": Advice(
            "a file server that does not answer, a failing disk or a frozen file system",
            "check dmesg, and df on that file system; the process continues when the disk answers, and can't be killed "
            "before",
        ),
        "gil": Advice(
            "native code that computes, or waits for a lock, without releasing the GIL",
            "look at the call at that line: release the GIL in it, or run it in another process",
        ),
        "debugger": Advice("a breakpoint on one rank", "continue it there, or remove the breakpoint"),
        "worker": Advice(
            "a dataset that waits for a file, the network, or a lock that was held when the worker was forked",
            "look at that line; workers=0 runs it in the rank itself; if the data is only slow, raise timeout",
        ),
        "data": Advice(
            "a dataset that waits for a lock, a file or the network, or a sample that takes very long",
            "look at that line; if the data is only slow, raise timeout or use more workers",
        ),
        "saving": Advice(
            "slow or full storage, or a save that only some ranks make",
            "check the storage of the run folder; call trainer.save() on every rank",
        ),
        "evaluating": Advice(
            f"{_ON_ONE_RANK}, or an evaluation that takes longer on one rank",
            "call trainer.evaluate() on every rank; print the result on rank 0 only",
        ),
        "trainer": Advice(
            f"{_ON_ONE_RANK}, or a callback that runs on one rank only",
            "call the methods of the Trainer on every rank",
        ),
        "code": Advice(
            "code that only some ranks run or that takes longer on one of them, a lock, or an endless loop",
            "look at that line; long work on one rank belongs before or after training, or into another process",
        ),
        "unknown": Advice(
            "code that only some ranks run, a lock, or native code that does not return",
            "look at the log of that rank; py-spy dump --pid {pid} shows where it is",
        ),
    }
)
