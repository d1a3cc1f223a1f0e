"""Cost of a checkpoint: delay of the next optimizer step, bandwidth, and fraction of time spent on hashing.

    python benchmarks/checkpoint_cost.py
    python benchmarks/checkpoint_cost.py --device cuda --megabytes 3000 --width 4096 --rows 4096 --spacing 40 \\
        --only stall

One training run alternates between three kinds of saves, a few steps apart: a scheduled save of paceline,
`dcp.async_save` and `torch.save`. The stall is how much longer the step after a save took, measured between the ends of
two optimizer steps, than the median step without a save. Before each save, a step that is not counted waits for the
writes of the previous one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as torch_dist
import torch.distributed.checkpoint as dcp
from torch import nn

import paceline
from paceline.checkpoint import reader
from paceline.checkpoint.local_store import locate
from paceline.checkpoint.planner import LocalShard
from paceline.checkpoint.reader import open_checkpoint, read_tensors
from paceline.checkpoint.shard_file import BlockHasher
from paceline.checkpoint.state import targets_below
from paceline.checkpoint.writer import Description, Writer


def model_of(megabytes: int, width: int) -> nn.Module:
    """Layers of width × width; with Adam's two moments a parameter takes 12 bytes."""
    layers = max(1, round(megabytes * 1e6 / 12 / (width * (width + 1))))
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


class Batches:
    """Repeats one batch on its device: reading data is not measured."""

    def __init__(self, batch: torch.Tensor) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield self._batch, self._batch


class Saves:
    """Starts one kind of save in turn, and records the time after every optimizer step."""

    def __init__(self, folder: Path, device: torch.device, spacing: int) -> None:
        self.folder, self.device, self.spacing = folder, device, spacing
        self.kinds: dict[str, Callable[[int], None]] = {"dcp.async_save": self.by_dcp, "torch.save": self.by_torch}
        self.times: list[float] = []
        self.trainer: paceline.Trainer
        self.future: Any = None
        self.kind_at: dict[int, str] = {}
        self.while_writing: list[int] = []  # steps during which paceline wrote

    def on_step(self, record: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        turn, place = divmod(record.step, self.spacing)
        if not self.trainer._saver.is_idle:
            self.while_writing.append(record.step)
        if place == self.spacing - 2:
            self.wait()
        if place == 0:
            kind = ("paceline", *self.kinds)[turn % 3]
            self.kind_at[record.step] = kind
            if kind in self.kinds:
                self.kinds[kind](record.step)

    def wait(self) -> None:
        """Block until all writes have finished."""
        if self.future is not None:
            self.future.result()
            shutil.rmtree(self.folder / "dcp", ignore_errors=True)
            self.future = None
        while not self.trainer._saver.is_idle:
            time.sleep(0.01)
        os.sync()

    def state(self) -> dict[str, Any]:
        return {"model": self.trainer.model.state_dict(), "optimizer": self.trainer.optimizer.state_dict()}

    def by_dcp(self, step: int) -> None:
        self.future = dcp.async_save(self.state(), checkpoint_id=str(self.folder / "dcp"))

    def by_torch(self, step: int) -> None:
        torch.save(self.state(), self.folder / "torch.pt")

    def stalls(self) -> tuple[float, dict[str, list[float]], list[float]]:
        """The median step, the stalls of each kind, and the step times while paceline wrote."""
        took = [b - a for a, b in zip(self.times, self.times[1:], strict=False)]  # of steps 2, 3, …
        plain = [took[n] for n in range(len(took)) if (n + 2) % self.spacing == self.spacing - 3]
        usual = median(plain[1:])
        stalls: dict[str, list[float]] = {}
        for step, kind in self.kind_at.items():
            if step >= 3 * self.spacing and step - 1 < len(took):  # the first save of each kind plans and allocates
                stalls.setdefault(kind, []).append(took[step - 1] - usual)
        first = [step for step in self.while_writing if step > 4 * self.spacing and step % self.spacing > 2]
        beside = [took[step - 2] for step in first]
        return usual, stalls, beside


def stall(megabytes: int, rounds: int, device: torch.device, width: int, spacing: int, rows: int, folder: Path) -> None:
    saves = Saves(folder, device, spacing)
    model = model_of(megabytes, width)
    trainer = paceline.Trainer(
        model, {"name": "adamw", "lr": 1e-4}, criterion=nn.MSELoss(), batch=rows, run=str(folder / "run"), quiet=True,
        save_every=3 * spacing, save_last=False, keep=1, callbacks=[saves], device=device, log_every=10_000,
    )  # fmt: skip
    saves.trainer = trainer
    trainer.train(Batches(torch.randn(rows, width, device=device)), max_steps=3 * spacing * (rounds + 1) + 4)
    usual, found, beside = saves.stalls()
    size = sum(t.numel() * t.element_size() for t in model.parameters()) * 3
    print(f"{size / 1e6:.0f} MB of state on {device}, {rounds} saves of each kind; a step takes {usual * 1e3:.1f} ms")
    ours = median(found["paceline"])
    for kind, values in found.items():
        spread = f"{min(values) * 1e3:.1f} to {max(values) * 1e3:.1f}"
        ratio = "" if kind == "paceline" else f"  paceline's is {max(ours, 0) / median(values):.3f} of it"
        print(f"  stall of {kind:15} {median(values) * 1e3:8.1f} ms (from {spread}){ratio}")
    if beside:
        print(f"  {len(beside)} steps while paceline wrote: {median(beside) / usual:.3f} of the median step")


class Watched(BlockHasher):
    """The hashing of the last load."""

    last: BlockHasher

    def __init__(self) -> None:
        super().__init__()
        Watched.last = self


def bandwidth(megabytes: int, rounds: int, folder: Path) -> None:
    """Compare a save with a plain write and fsync of as many bytes; measure hashing in it and in a cold load."""
    tensors = {f"model/{n}": LocalShard(torch.randn(1024, 1024)) for n in range(megabytes // 4)}
    payload = memoryview(torch.randn(megabytes // 4 * 1024 * 1024).view(torch.uint8).numpy()).cast("B")
    saves: list[float] = []
    plain: list[float] = []
    hashing: list[float] = []
    loads: list[float] = []
    digesting: list[float] = []
    writer = Writer()
    reader.BlockHasher = Watched  # type: ignore[misc]
    for number in range(rounds + 1):
        os.sync()
        began = time.perf_counter()
        made = writer.begin(locate(folder / f"step-{number}"), tensors, Description(number, 0, False)).result()
        saves.append(time.perf_counter() - began)
        hashing.append(made.seconds["hash"] / saves[-1])
        os.sync()
        plain.append(_plain_write(folder / "plain", payload))
        os.sync()
        _forget(folder / made.at.name)
        began = time.perf_counter()
        checkpoint = open_checkpoint(made.at)
        read_tensors(checkpoint, targets_below(checkpoint.manifest, "model"))
        loads.append(time.perf_counter() - began)
        digesting.append(Watched.last.busy / loads[-1])
        shutil.rmtree(folder / made.at.name)
    pairs = [p / s for s, p in zip(saves[1:], plain[1:], strict=True)]
    times = f"a save {median(saves[1:]):.3f} s, a plain write and fsync {median(plain[1:]):.3f} s"
    print(f"{megabytes} MB, {rounds} rounds: {times}")
    print(
        f"  bandwidth of a save: {median(pairs):.2f} of the plain write's (from {min(pairs):.2f} to {max(pairs):.2f})"
    )
    print(f"  hashing on its own thread: {median(hashing[1:]):.1%} of the time of a save")
    share = median(digesting[1:])
    print(f"  hashing on its own thread: {share:.1%} of the time of a cold load ({median(loads[1:]):.3f} s)")


def _plain_write(path: Path, payload: memoryview) -> float:
    began = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    rest = payload
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.fsync(descriptor)
    os.close(descriptor)
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


def _forget(folder: Path) -> None:
    """Evict a file from the page cache, so that the next read comes from the disk."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=32, help="samples per step, which determines the step time")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--spacing", type=int, default=8, help="steps between saves")
    parser.add_argument("--only", choices=["stall", "bandwidth"])
    parser.add_argument("--folder", help="folder on the disk to measure; default: a temporary folder")
    options = parser.parse_args()
    torch_dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)  # required by dcp
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.only != "bandwidth":
            device, sizes = torch.device(options.device), (options.width, options.spacing, options.rows)
            stall(options.megabytes, options.rounds, device, *sizes, Path(folder))
        if options.only != "stall":
            bandwidth(options.megabytes, options.rounds, Path(folder))
    torch_dist.destroy_process_group()


if __name__ == "__main__":
    main()
