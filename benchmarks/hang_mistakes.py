"""The table of "Mistakes that hang" in docs/reliability.md: what people read, and after how many seconds.

    python benchmarks/hang_mistakes.py [--only WORD] [--torchrun]

Each script makes one mistake, of those that guides to distributed training warn of. The seconds are from the end of the
last step of any rank until the first line about it. With `--torchrun`, plain scripts run under torchrun too, where the
timeout of 30 minutes is set to 20 s.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import tiny  # noqa: F401  # once, before launchers are forked
from nodes import launchers
from paceline.launcher.local import agent as _agent  # noqa: F401

DEADLINE = 60.0
TIMEOUT = 20  # seconds of a collective under torchrun

_PLAIN = """
import datetime, os, time, torch, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=int(os.environ.get("TIMEOUT", 1800))))
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(inputs):
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    Path(f"last-{rank}").write_text(repr(time.monotonic()))
"""
_TRAINER = """
import time, torch, paceline
from pathlib import Path
from torch import nn
from torch.utils.data import TensorDataset
torch.manual_seed(0)
inputs = torch.randn(160, 8)
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
def note(record):
    Path(f"last-{paceline.dist.rank()}").write_text(repr(time.monotonic()))
trainer = paceline.Trainer(nn.Linear(8, 2), criterion=nn.CrossEntropyLoss(), batch=16, run=False, callbacks=[note])
"""


@dataclass(frozen=True)
class Mistake:
    name: str
    script: str
    is_plain: bool = True


ALL = (
    Mistake(
        "`if trainer.is_main_process: trainer.evaluate(data)` in one's own loop",
        _TRAINER
        + """
for epoch in range(3):
    for batch in trainer.loader(data):
        trainer.training_step(batch)
    if trainer.is_main_process:
        trainer.evaluate(data)
""",
        is_plain=False,
    ),
    Mistake(
        "`if trainer.is_main_process: trainer.evaluate(data)` after training",
        _TRAINER
        + """
trainer.train(data, epochs=2)
if trainer.is_main_process:
    trainer.evaluate(data)
""",
        is_plain=False,
    ),
    Mistake(
        "`if trainer.is_main_process: trainer.evaluate(data)` in a callback",
        _TRAINER
        + """
def evaluate(record):
    if record.step == 12 and trainer.is_main_process:
        trainer.evaluate(data)
trainer = paceline.Trainer(
    nn.Linear(8, 2), criterion=nn.CrossEntropyLoss(), batch=16, run=False, callbacks=[note, evaluate]
)
trainer.train(data, epochs=4)
""",
        is_plain=False,
    ),
    Mistake(
        "ranks have different numbers of batches (plain DDP)",
        _PLAIN
        + """
for batch in torch.randn(20 + 4 * rank, 4, 8):
    step(batch)
    time.sleep(0.02)
dist.barrier()
""",
    ),
    Mistake(
        "a rank does not reach a synchronization point: `if rank == 0: dist.barrier()`",
        _PLAIN
        + """
for number, batch in enumerate(torch.randn(40, 4, 8)):
    step(batch)
    time.sleep(0.02)
    if number == 20 and rank == 0:
        dist.barrier()
""",
    ),
    Mistake(
        "collectives under a condition that differs between ranks",
        _PLAIN
        + """
for number, batch in enumerate(torch.randn(40, 4, 8)):
    step(batch)
    time.sleep(0.02)
    loss = torch.tensor(float(number + rank))
    if loss > 20:
        dist.all_gather([torch.zeros(()) for _ in range(world)], loss)
""",
    ),
    Mistake(
        "rank 0 prepares the data alone, others wait in a barrier that it enters later",
        _PLAIN
        + """
for batch in torch.randn(20, 4, 8):
    step(batch)
    time.sleep(0.02)
if rank == 0:
    time.sleep(10_000)
dist.barrier()
""",
    ),
)


def begin_of(folder: Path) -> float | None:
    """When the last step of any rank ended."""
    times = []
    for path in folder.glob("last-*"):
        text = path.read_text()
        times += [float(text)] if text else []
    return max(times, default=None)


def with_paceline(mistake: Mistake, folder: Path) -> tuple[float | None, str]:
    """Seconds until it says something, and that."""
    (folder / "train.py").write_text(mistake.script.lstrip())
    with launchers(folder) as launch:
        started = launch("launch", "-n", "2", "--cpu", "train.py")
        deadline, found = time.monotonic() + DEADLINE, ""
        while time.monotonic() < deadline and not (found := _found(folder, started.said)) and started.status is None:
            time.sleep(0.05)
        seen, begin = time.monotonic(), begin_of(folder)
        if started.status is not None and not found:
            found = _found(folder, started.said) or started.said[-1500:]
    return (None if begin is None or not found else seen - begin), found


def _found(folder: Path, said: str) -> str:
    """The report of a hang, or of a failure once it is whole."""
    if found := re.search(r"^\[\w+\.[\w-]+\] .*?^ *fix: .*?$", said, re.MULTILINE | re.DOTALL):
        return found.group()
    return next((json.loads(path.read_text())["text"] for path in folder.glob("runs/*/logs/hang.json")), "")


def with_torchrun(mistake: Mistake, folder: Path) -> tuple[float | None, str]:
    (folder / "train.py").write_text(mistake.script.lstrip())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    with ExitStack() as stack:
        said = stack.enter_context((folder / "said").open("wb"))
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, "TIMEOUT": str(TIMEOUT)}, stdout=said, stderr=said
        )  # fmt: skip
        stack.callback(process.kill)
        try:
            process.wait(4 * DEADLINE)
            begin = begin_of(folder)
            seconds = None if begin is None else time.monotonic() - begin
        except subprocess.TimeoutExpired:
            seconds = None
    text = (folder / "said").read_text(errors="replace")
    errors = re.findall(r"^\[rank\d+\]: \w+Error.*$", text, re.MULTILINE)
    root = re.search(r"Root Cause.*?rank\s*: (\d+)", text, re.DOTALL)
    return seconds, "\n".join([*errors[:2], *([f"root cause: rank {root[1]}"] if root else [])]) or "nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--torchrun", action="store_true")
    options = parser.parse_args()
    for mistake in ALL:
        if options.only in mistake.name:
            for way in (with_paceline, with_torchrun) if options.torchrun and mistake.is_plain else (with_paceline,):
                with tempfile.TemporaryDirectory(prefix="paceline-mistake-", ignore_cleanup_errors=True) as folder:
                    seconds, says = way(mistake, Path(folder))
                after = "never" if seconds is None else f"{seconds:.1f} s"
                print(f"## {mistake.name}\n{way.__name__}, after {after}:\n{says}\n", flush=True)


if __name__ == "__main__":
    main()
