"""Tokens per second on one GPU: the Trainer and a hand-tuned loop, gpt 124M, bf16, compiled, 64 × 1024 tokens.

    python benchmarks/gpu_throughput.py [--rounds 7]

Each loop trains its own copy of the model, with the same fused AdamW, on the same batches, in one process. Rounds are
interleaved, and in each one only the last 20 of 25 steps count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import paceline
from paceline.models.gpt import GPT

SAMPLES, TOKENS, VOCABULARY = 64, 1024, 50304
STEPS, WARM_UP = 25, 5


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(layers=12, width=768, heads=12, vocabulary=VOCABULARY, context=TOKENS)


def batches() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    tokens = [torch.randint(VOCABULARY, (SAMPLES, TOKENS + 1)) for _ in range(STEPS)]
    return [{"inputs": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()} for rows in tokens]


class Clock:
    """Times the steps after the warm-up; synchronizes with the GPU only at both ends."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, record: Any = None) -> None:
        self.step += 1
        if self.step in (WARM_UP, STEPS):
            torch.cuda.synchronize()
            if self.step == WARM_UP:
                self.start = time.perf_counter()
            else:
                self.seconds = time.perf_counter() - self.start
                self.step = 0

    def tokens_per_second(self) -> float:
        return SAMPLES * TOKENS * (STEPS - WARM_UP) / self.seconds


class ByHand:
    """A loop as an expert writes it: compiled, fused, pinned, prefetched, without synchronization."""

    def __init__(self) -> None:
        self.model = model().cuda()
        self.model.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
        self.clock = Clock()

    def round(self, data: list[dict[str, torch.Tensor]]) -> float:
        side, ahead = torch.cuda.Stream(), None
        for batch in [*data, None]:
            coming = None
            if batch is not None:
                with torch.cuda.stream(side):
                    coming = {name: tensor.pin_memory().cuda(non_blocking=True) for name, tensor in batch.items()}
            if ahead is not None:
                self.step(ahead)
            torch.cuda.current_stream().wait_stream(side)
            ahead = coming
        return self.clock.tokens_per_second()

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(**batch)["loss"]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.clock()


class ByTrainer:
    def __init__(self, compiled: bool | str) -> None:
        self.clock = Clock()
        self.trainer = paceline.Trainer(
            model(),
            {"name": "adamw", "lr": 1e-4},
            precision="bf16",
            compile=compiled,
            device="cuda",
            run=False,
            quiet=True,
            callbacks=[self.clock],
        )

    def round(self, data: list[dict[str, torch.Tensor]]) -> float:
        self.trainer.train(data, max_steps=self.trainer.step_count + STEPS)
        return self.clock.tokens_per_second()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    data, loops = (
        batches(),
        {"by hand": ByHand(), "paceline": ByTrainer("model"), "paceline, by block": ByTrainer(True)},
    )
    for loop in loops.values():
        loop.round(data)  # compiles
    speeds: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds):
        for name in list(loops) if number % 2 else reversed(loops):
            speeds[name].append(loops[name].round(data))
    by_hand = statistics.median(speeds["by hand"])
    for name, values in speeds.items():
        middle = statistics.median(values)
        print(
            f"{name}: {middle:,.0f} tokens/s, {middle / by_hand:.4f} of by hand ({min(values):,.0f}–{max(values):,.0f})"
        )
    ratios = [ours / theirs for ours, theirs in zip(speeds["paceline"], speeds["by hand"], strict=True)]
    print(f"paired: {statistics.median(ratios):.4f}")


if __name__ == "__main__":
    main()
