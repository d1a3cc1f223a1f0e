"""What compression itself costs: the time that it adds to a backward, beside torch's own hooks.

    python benchmarks/compression_cost.py [--rounds 15] [--ranks 1]

Gradients are those of a gpt and a resnet18, in DDP's default buckets, on one thread. On one rank nothing is sent, so
what remains is computation and the overhead of messages; with --ranks 2 they are sent over loopback. Every hook runs
once per round, and what a hook that does nothing takes is subtracted. `ratio` is the median over rounds of ours divided
by torch's, for the time on the clock and for that of the processor, which other programs on the machine disturb less.
With more ranks there is one bucket: on gloo, torch's PowerSGD mixes up the messages of several.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from overhead import interleaved
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.config.sections import SyncSection
from paceline.models.gpt import GPT
from paceline.models.resnet import resnet18
from paceline.parallel.sync.compression import build_compression
from paceline.parallel.sync.exchange import Exchange

RANKS = (1, 2, 4)  # of PowerSGD
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": partial(GPT, layers=6, width=384, heads=6, vocabulary=4096, context=256),
    "resnet18": resnet18,
}
NOTHING = "nothing"
Hook = Callable[[DistributedDataParallel, nn.Module], None]


class ChosenGradients(nn.Module):
    """Has the parameters of a model, and a backward that costs little."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.gradients = [torch.randn_like(parameter) for parameter in model.parameters()]

    def forward(self) -> Tensor:
        pairs = zip(self.model.parameters(), self.gradients, strict=True)
        return torch.stack([torch.dot(p.view(-1), g.view(-1)) for p, g in pairs]).sum()


def nothing(ddp: DistributedDataParallel, model: nn.Module) -> None:
    def hook(state: object, bucket: Any) -> Future[Tensor]:
        future = Future[Tensor]()
        future.set_result(bucket.buffer())
        return future

    hook.__annotations__.clear()  # DDP compares them with types
    ddp.register_comm_hook(None, hook)


def ours(ddp: DistributedDataParallel, model: nn.Module, **settings: Any) -> None:
    compression = build_compression(SyncSection(**settings), Exchange(dist.new_group()))
    compression.begin({parameter: name for name, parameter in model.named_parameters()})
    ddp.register_comm_hook(compression, lambda compression, bucket: compression.reduce(bucket))


def torch_fp16(ddp: DistributedDataParallel, model: nn.Module) -> None:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


def torch_powersgd(ddp: DistributedDataParallel, model: nn.Module, rank: int) -> None:
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=2
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


HOOKS: dict[str, Hook] = {
    NOTHING: nothing,
    "fp16": partial(ours, compress="fp16"),
    "torch fp16": torch_fp16,
    "int8": partial(ours, compress="int8"),
    **{f"powersgd {rank}": partial(ours, compress="powersgd", rank=rank) for rank in RANKS},
    **{f"torch powersgd {rank}": partial(torch_powersgd, rank=rank) for rank in RANKS},
}


def measure(rounds: int) -> dict[str, dict[str, list[list[float]]]]:
    """On every rank: ms of a backward on the clock and of the processor, by model and hook."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    for name, make in MODELS.items():
        backwards: dict[str, Callable[[], list[float]]] = {}
        for hook, register in HOOKS.items():
            model = make()
            bucket = {} if dist.get_world_size() == 1 else {"bucket_cap_mb": 1000}
            ddp = DistributedDataParallel(ChosenGradients(model), gradient_as_bucket_view=True, **bucket)
            register(ddp, model)
            backwards[hook] = partial(timed, ddp)
        for backward in [*backwards.values()] * 3:  # buckets are rebuilt, and torch's PowerSGD starts late
            backward()
        results[name] = interleaved(backwards, rounds)
    dist.destroy_process_group()
    return results


def timed(ddp: DistributedDataParallel) -> list[float]:
    loss = ddp()
    if dist.get_world_size() > 1:
        dist.barrier()
    clocks = time.perf_counter, time.process_time
    began = [clock() for clock in clocks]
    loss.backward()
    return [1e3 * (clock() - start) for clock, start in zip(clocks, began, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    results = paceline.launch(measure, ranks=arguments.ranks, rounds=arguments.rounds)
    print(f"{arguments.rounds} rounds, interleaved; ranks: {arguments.ranks}; {os.cpu_count()} cores; ", end="")
    print(f"load {os.getloadavg()[0]:.1f}\n")
    print("| model | method | ms | torch's, ms | ratio | CPU ms | torch's, CPU ms | ratio |")
    print("|---" * 8 + "|")
    for model, times in results.items():
        for hook in [hook for hook in HOOKS if hook != NOTHING and not hook.startswith("torch")]:
            cells = [cell for clock in range(2) for cell in compared(times, hook, clock)]
            print(f"| {model} | {hook} | {' | '.join(cells)} |")


def compared(times: dict[str, list[list[float]]], hook: str, clock: int) -> list[str]:
    def added(name: str) -> list[float]:
        pairs = zip(times[name], times[NOTHING], strict=True)
        return [max(mine[clock] - least[clock], 1e-3) for mine, least in pairs]

    mine = added(hook)
    if f"torch {hook}" not in times:
        return [f"{statistics.median(mine):.1f}", "–", "–"]
    theirs = added(f"torch {hook}")
    ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
    return [f"{statistics.median(mine):.1f}", f"{statistics.median(theirs):.1f}", f"{ratio:.2f}"]


if __name__ == "__main__":
    main()
