"""A small training in which a rank comes to a standstill: `hanging.py PLAN`, on every rank of a world. PLAN is the JSON
of a `hangs.Plan`.

With `plain` it is a script that an expert writes and that knows nothing of paceline. What is true is written down:
`fault-RANK` by the rank that causes it, just before; `waits-RANK` by a thread of each rank, from then on: the lines of
this file on the stack of its main thread, and the collectives that it has entered and not left.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PLAN: dict[str, Any] = json.loads(sys.argv[1])
KIND, STEP, RANK = PLAN["kind"], PLAN["step"], int(os.environ["RANK"])
IS_VICTIM = RANK in PLAN["victims"]
BATCH, SAMPLES, FOREVER = 16, 1600, 10_000
OPERATIONS = PLAN["operations"]  # of the user's code: what is skipped, added or reordered
TENSOR_PLAN = {f"{block}.{name}": kind for block in range(4) for name, kind in (("up", "column"), ("down", "row"))}


FILE = __file__


class Now:
    step = 1  # in progress
    is_over = False


def tell_fault(function: str, first: int, last: int) -> None:
    """What comes now, in these lines."""
    words = {"rank": RANK, "step": Now.step, "function": function, "lines": [first, last], "time": time.monotonic()}
    Path(f"fault-{RANK}.new").write_text(json.dumps(words))
    Path(f"fault-{RANK}.new").replace(f"fault-{RANK}")


def next_line(lines: int = 1) -> None:
    caller = sys._getframe(1)
    tell_fault(caller.f_code.co_name, caller.f_lineno + 1, caller.f_lineno + lines)


# The ways


def sleep() -> None:
    next_line()
    time.sleep(FOREVER)


def run_in_circles() -> None:
    number = 0
    next_line(2)
    while True:
        number += 1


def hold_the_gil() -> None:
    function = ctypes.PyDLL(None).sleep
    next_line()
    function(FOREVER)


def stop() -> None:
    next_line()
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_locks() -> None:
    """Two threads take two locks in different orders."""
    first, second, taken = threading.Lock(), threading.Lock(), threading.Event()

    def other_thread() -> None:
        with second:
            taken.set()
            first.acquire()

    with first:
        threading.Thread(target=other_thread, daemon=True).start()
        taken.wait()
        next_line()
        second.acquire()


def write_to_a_frozen_disk() -> None:
    descriptor = os.open(f"{PLAN['disk']}/file", os.O_WRONLY | os.O_CREAT)
    subprocess.run(["fsfreeze", "--freeze", PLAN["disk"]], check=True)
    next_line()
    os.write(descriptor, bytes(4096))


def cut_the_network() -> None:
    """All goes on, but nothing arrives."""
    interface = next(path.name for path in Path("/sys/class/net").iterdir() if path.name != "lo")
    tell_fault("", 0, 0)
    subprocess.run(["ip", "link", "set", PLAN["interface"] or interface, "down"], check=True)


WAYS = {
    "sleep": sleep,
    "busy": run_in_circles,
    "gil": hold_the_gil,
    "sigstop": stop,
    "lock": wait_for_locks,
    "disk": write_to_a_frozen_disk,
    "nobody-waits": sleep,
    "network": cut_the_network,
}


def stand_still_if_due(site: str) -> None:
    if IS_VICTIM and Now.step == STEP and PLAN["site"] == site and not Now.is_over:
        Now.is_over = True
        WAYS[KIND]()


# The user's collectives


def call(operation: str) -> None:
    tensor = torch.ones(3)
    if operation == "all_gather":
        torch_dist.all_gather([torch.empty(3) for _ in range(torch_dist.get_world_size())], tensor)
    elif operation == "all_to_all":
        world = torch_dist.get_world_size()
        torch_dist.all_to_all_single(torch.empty(world), torch.ones(world))
    elif operation == "barrier":
        torch_dist.barrier()


def skip_a_collective() -> None:
    if IS_VICTIM:
        tell_fault("", 0, 0)
        return
    call(OPERATIONS[0])


def add_a_collective() -> None:
    if IS_VICTIM:
        tell_fault("", 0, 0)
        call(OPERATIONS[0])


def reorder_collectives() -> None:
    if IS_VICTIM:
        tell_fault("", 0, 0)
    for operation in reversed(OPERATIONS) if IS_VICTIM else OPERATIONS:
        call(operation)


OWN_COLLECTIVES = {"skipped": skip_a_collective, "extra": add_a_collective, "reordered": reorder_collectives}


class AfterStep:
    """What the user's code does after each step."""

    def on_step(self, record: Any) -> None:
        if not IS_VICTIM or KIND != "left":
            Path(f"last-{RANK}").write_text(repr(time.monotonic()))
        if record.step == max(1, STEP - 4):  # data workers are ahead
            threading.Thread(target=keep_telling_where, daemon=True).start()
        stand_still_if_due("callback")
        if record.step == STEP - 1 and KIND in OWN_COLLECTIVES:
            OWN_COLLECTIVES[KIND]()
        time.sleep(PLAN["pause"])
        Now.step = record.step + 1


def keep_telling_where() -> None:
    while True:
        time.sleep(0.4)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        lines = []
        while frame is not None:
            if frame.f_code.co_filename == FILE:
                lines.append(frame.f_lineno)
            frame = frame.f_back
        trace = pickle.loads(torch._C._distributed_c10d._dump_fr_trace(True, False, True))  # noqa: S301
        waits = [
            {"name": entry["profiling_name"], "number": entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]}
            for entry in trace.get("entries", ())
            if not entry["retired"]
        ]
        Path(f"waits-{RANK}.new").write_text(json.dumps({"lines": lines, "operations": waits}))
        Path(f"waits-{RANK}.new").replace(f"waits-{RANK}")


# The training


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(inputs, 16), nn.Linear(16, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        stand_still_if_due("forward")
        hidden: Tensor = torch.tanh(self.up(inputs))
        return self.down(hidden)  # type: ignore[no-any-return]


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(Block(8, 16), Block(16, 16), Block(16, 16), Block(16, 2))


class Samples(Dataset[tuple[Tensor, Tensor]]):
    draws_randomness = False

    def __init__(self) -> None:
        self.inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(3))
        self.read, self.rank = 0, os.getpid()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if os.getpid() != self.rank and KIND == "worker":
            self.read_in_worker()
        stand_still_if_due("data")
        return self.inputs[index], (self.inputs[index, 0] > 0).long()

    def read_in_worker(self) -> None:
        """A worker does not know the step, but how many samples it has read."""
        self.read += 1
        if IS_VICTIM and self.read == STEP * BATCH // PLAN["data_ranks"]:
            WAYS[PLAN["way"]]()


def train_with_paceline() -> None:
    import paceline

    trainer = paceline.Trainer(
        network(), {"name": "sgd", "lr": 0.1}, criterion=nn.CrossEntropyLoss(), strategy=PLAN["layout"], batch=BATCH,
        workers=PLAN["workers"], callbacks=[AfterStep()], run="hanging",
        **({"tensor": {"plan": TENSOR_PLAN}} if PLAN["layout"] == "tp" else {}),
    )  # fmt: skip
    if KIND == "left":
        own_loop(trainer)
    else:
        trainer.train(Samples(), epochs=100)


class Record:
    def __init__(self, step: int) -> None:
        self.step = step


def own_loop(trainer: Any) -> None:
    """Ends on one rank before it ends on others."""
    for batch in repeated(trainer.loader(Samples())):
        trainer.training_step(batch)
        if IS_VICTIM and trainer.step_count == STEP - 1:
            break
    leave()


def repeated(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def leave() -> None:
    """Something of the user's keeps the process, and its connections: a thread that is not a daemon."""
    threading.Thread(target=time.sleep, args=(FOREVER,)).start()
    next_line()
    sys.exit(0)


def train_plainly() -> None:
    torch_dist.init_process_group("gloo", timeout=timedelta(seconds=PLAN["timeout"]))
    torch.set_num_threads(1)
    model, data, after = network(), Samples(), AfterStep()
    if PLAN["layout"] == "ddp":
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        for block in model:
            fully_shard(block)
        fully_shard(model)
        wrapped = model
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    size = BATCH // torch_dist.get_world_size()
    loader = DataLoader(data, size, sampler=DistributedSampler(data), num_workers=PLAN["workers"])
    for step, (inputs, targets) in enumerate(repeated(loader), start=1):
        nn.functional.cross_entropy(wrapped(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        after.on_step(Record(step))
        if KIND == "left" and IS_VICTIM and step == STEP - 1:
            leave()


if __name__ == "__main__":
    if PLAN["plain"]:
        train_plainly()
    else:
        train_with_paceline()
