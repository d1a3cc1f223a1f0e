"""Cost of a step with `graph: true` on a GPU, compared with the Trainer without it and with a hand-written loop.

    python benchmarks/graph_cost.py [--rounds 5] [--steps 200] [--models tiny gpt] [--batches pageable pinned gpu]
    python benchmarks/graph_cost.py --minutes 10        trains a GPT, and prints the memory in use from time to time

Batches are in pageable memory, in pinned memory or on the GPU. All cases are interleaved in one process, the clock
synchronizes with the GPU at both ends of a round, and all must end with the same weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from gpu_step import PLACES, Timed
from overhead import LR, interleaved, tiny_batches, tiny_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paceline
from paceline.models.gpt import GPT

VOCABULARY, CONTEXT = 8192, 256


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = GPT(layers=6, width=256, heads=4, vocabulary=VOCABULARY, context=CONTEXT)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.gpt(tokens)
        return logits.flatten(0, 1)


def gpt_batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    tokens = [torch.randint(VOCABULARY, (8, CONTEXT + 1)) for _ in range(16)]
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets.flatten())


MODELS: dict[str, tuple[Any, Any]] = {"tiny": (tiny_model, tiny_batches), "gpt": (LanguageModel, gpt_batches)}
LOOPS = ("raw", "Trainer", "Trainer, graph")


def ready(name: str, place: str, device: torch.device) -> list[Any]:
    move = {"pageable": lambda tensor: tensor, "pinned": Tensor.pin_memory, "gpu": lambda tensor: tensor.to(device)}
    return [tuple(map(move[place], pair)) for pair in MODELS[name][1]()]


def train(name: str, loop: str, batches: Any, device: torch.device) -> Tensor:
    """Train on all batches, and return the final weights."""
    model = MODELS[name][0]().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    if loop == "raw":
        for pair in batches:
            inputs, targets = [tensor.to(device, non_blocking=True) for tensor in pair]
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()
    else:
        settings: dict[str, Any] = {"criterion": loss, "device": device, "log_every": 100, "run": False, "quiet": True}
        trainer = paceline.Trainer(model, optimizer, graph=loop == "Trainer, graph", **settings)
        trainer.train(batches, epochs=1)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def microseconds(name: str, loop: str, different: list[Any], steps: int, device: torch.device) -> float:
    train(name, loop, batches := Timed(different, steps), device)
    return batches.seconds / steps * 1e6


def times_of(name: str, place: str, rounds: int, steps: int, device: torch.device) -> dict[str, list[float]]:
    """µs per step by loop and round."""
    different = ready(name, place, device)
    return interleaved({loop: partial(microseconds, name, loop, different, steps, device) for loop in LOOPS}, rounds)


def measure(name: str, place: str, rounds: int, steps: int, device: torch.device) -> None:
    weights = [train(name, loop, Timed(ready(name, place, device), 20), device) for loop in LOOPS]
    same = ", ".join(str(torch.equal(weights[0], other)) for other in weights[1:])
    times = times_of(name, place, rounds, steps, device)
    raw = statistics.median(times["raw"])
    for loop, taken in times.items():
        median, case = statistics.median(taken), f"{name}, {place}, {loop}"
        print(f"{case:30} median {median:8.1f} us  best {min(taken):8.1f} us  {median / raw:.3f} x raw")
    print(f"weights equal to raw's: {same}", flush=True)


def train_long(minutes: float, device: torch.device) -> None:
    different, began = ready("gpt", "gpu", device), time.monotonic()
    interval = min(60.0, 12 * minutes)

    def batches() -> Iterator[Any]:
        step, shown = 0, 0
        while time.monotonic() < began + 60 * minutes:
            if time.monotonic() >= began + shown * interval:
                shown += 1
                allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
                print(
                    f"step {step:7}: {allocated / 2**20:.2f} MiB allocated, {reserved / 2**20:.0f} reserved", flush=True
                )
            yield different[step % len(different)]
            step += 1

    train("gpt", "Trainer, graph", batches(), device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--minutes", type=float)
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    if options.minutes:
        train_long(options.minutes, device)
        return
    for name in options.models:
        for place in options.batches:
            measure(name, place, options.rounds, options.steps, device)


if __name__ == "__main__":
    main()
