"""The cost of dropout by sample: a step of gpt with dropout 0.1, relative to torch's dropout.

    python benchmarks/dropout_cost.py [--rounds 7] [--without-compile] [--elementwise]

`elementwise` is dropout outside of attention; `attention` adds that of attention, which keeps its fused kernel on a GPU
unless dropout is `exact`. Trainers run in one process, rounds are interleaved, and in each one the last steps count.
Ratios are medians over rounds of paired times. Without a GPU, a smaller model runs on one CPU thread.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from overhead import interleaved

import paceline
from paceline.models.gpt import GPT

STEPS, WARM_UP = 25, 5


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    samples: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.layers} × {self.width}, {self.samples} × {self.tokens} tokens"


ON_GPU = (Size(12, 768, 12, 16, 1024), Size(12, 768, 12, 4, 256))
ON_CPU = (Size(4, 256, 8, 8, 128),)


def model(size: Size, *, attention: bool) -> GPT:
    torch.manual_seed(0)
    made = GPT(size.layers, size.width, size.heads, vocabulary=1024, context=size.tokens, dropout=0.1)
    if not attention:
        for block in made.blocks:
            block.attention.dropout = 0.0  # type: ignore[union-attr]
    return made


def batches(size: Size) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    tokens = [torch.randint(1024, (size.samples, size.tokens + 1)) for _ in range(STEPS)]
    return [{"inputs": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()} for rows in tokens]


class Clock:
    """Times the steps after the warm-up; synchronizes with the GPU only at both ends."""

    def __init__(self, cuda: bool) -> None:
        self.cuda, self.steps = cuda, 0

    def on_step(self, record: Any) -> None:
        self.steps += 1
        if self.steps % STEPS in (WARM_UP, 0):
            if self.cuda:
                torch.cuda.synchronize()
            now = time.perf_counter()
            if self.steps % STEPS:
                self.start = now
            else:
                self.seconds = (now - self.start) / (STEPS - WARM_UP)


class Loop:
    def __init__(self, size: Size, dropout: str, *, attention: bool, compiled: bool, cuda: bool) -> None:
        self.data, self.clock = batches(size), Clock(cuda)
        self.trainer = paceline.Trainer(
            model(size, attention=attention),
            callbacks=[self.clock],
            dropout=dropout,
            compile=compiled,
            precision="bf16" if cuda else "fp32",
            run=False,
            quiet=True,
            log_every=1000,
        )
        self.rounds = 0

    def round(self) -> float:
        self.rounds += 1
        self.trainer.train(self.data, max_steps=self.rounds * STEPS)
        return self.clock.seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--without-compile", action="store_true")
    parser.add_argument("--elementwise", action="store_true", help="only dropout outside of attention")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    print("| model | dropout | mode | per rank, ms | by sample | exact |\n|---|---|---|---|---|---|")
    for size in ON_GPU if cuda else ON_CPU:
        for attention in (False,) if options.elementwise else (False, True):
            for compiled in (False,) if options.without_compile else (False, True):
                kinds = ["per-rank", "by-sample", *(["exact"] if attention and cuda else [])]
                loops = {
                    kind: Loop(size, kind, attention=attention, compiled=compiled, cuda=cuda).round for kind in kinds
                }
                times = interleaved(loops, options.rounds)
                ratios = [
                    statistics.median(own / base for own, base in zip(times[kind], times["per-rank"], strict=True))
                    for kind in kinds[1:]
                ]
                cells = [f"{ratio:.3f}" for ratio in ratios] + ["-"] * (2 - len(ratios))
                what, mode = "attention" if attention else "elementwise", "compiled" if compiled else "eager"
                base = statistics.median(times["per-rank"]) * 1e3
                print(f"| {size} | {what} | {mode} | {base:.1f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
