"""Images per second of a ResNet-50 on one GPU: the Trainer and a hand-written loop, channels last, bf16, momentum.

    python benchmarks/resnet_throughput.py [--batch 512] [--rounds 3] [--compiled-only | --eager-only] [--from cpu]

Each loop trains its own copy of the model on the same batches, in one process. Rounds are interleaved, and in each one
only the last 15 of 20 steps count. Batches are on the GPU already, or, with `--from cpu`, in pinned memory, contiguous,
as a DataLoader yields them. `--model resnet20 --size 16 --batch 8 --device cpu --from cpu` runs anywhere, in fp32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

import paceline
from paceline.models.resnet import resnet20, resnet50

STEPS, WARM_UP = 20, 5
MODELS = {"resnet20": resnet20, "resnet50": resnet50}
Batch = tuple[Tensor, Tensor]


def batches(options: argparse.Namespace) -> list[Batch]:
    torch.manual_seed(1)
    shape, found = (options.batch, 3, options.size, options.size), []
    for _ in range(4):
        images = torch.randn(shape, device=options.device)
        labels = torch.randint(10, (options.batch,), device=options.device)
        if options.source == "gpu":
            images = images.to(memory_format=torch.channels_last)
        elif options.device == "cuda":
            images, labels = images.cpu().pin_memory(), labels.cpu().pin_memory()
        found.append((images, labels))
    return [found[step % len(found)] for step in range(STEPS)]


class Clock:
    """Times the steps after the warm-up; synchronizes with the GPU only at both ends."""

    def __init__(self, device: str) -> None:
        self.step, self.synchronize = 0, torch.cuda.synchronize if device == "cuda" else lambda: None

    def __call__(self, record: Any = None) -> None:
        self.step += 1
        if self.step in (WARM_UP, STEPS):
            self.synchronize()
            if self.step == WARM_UP:
                self.start = time.perf_counter()
            else:
                self.seconds = time.perf_counter() - self.start
                self.step = 0


class ByHand:
    """A loop as an expert writes it: channels last, fused, prefetched, without synchronization."""

    def __init__(self, model: nn.Module, options: argparse.Namespace, *, compiled: bool) -> None:
        self.model = model.to(options.device, memory_format=torch.channels_last)
        if compiled:
            self.model.compile()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, fused=True)
        self.clock, self.device = Clock(options.device), options.device

    def round(self, data: list[Batch]) -> float:
        if self.device == "cpu":
            for images, labels in data:
                self.step(images.to(memory_format=torch.channels_last), labels)
            return self.clock.seconds
        side, ahead = torch.cuda.Stream(), None
        for batch in [*data, None]:
            coming = None
            if batch is not None:
                with torch.cuda.stream(side):
                    images, labels = (part.cuda(non_blocking=True) for part in batch)
                    coming = images.to(memory_format=torch.channels_last), labels
            if ahead is not None:
                self.step(*ahead)
            torch.cuda.current_stream().wait_stream(side)
            ahead = coming
        return self.clock.seconds

    def step(self, images: Tensor, labels: Tensor) -> None:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = self.model(images, labels)["loss"]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.clock()


class ByTrainer:
    def __init__(self, model: nn.Module, options: argparse.Namespace, *, compiled: bool) -> None:
        self.clock = Clock(options.device)
        self.trainer = paceline.Trainer(
            model,
            {"name": "sgd", "lr": 0.1, "momentum": 0.9},
            loss_fn=lambda model, batch: model(*batch)["loss"],
            precision="bf16" if options.device == "cuda" else "fp32",
            channels_last=True,
            compile="model" if compiled else False,
            device=options.device,
            run=False,
            quiet=True,
            callbacks=[self.clock],
        )

    def round(self, data: list[Batch]) -> float:
        self.trainer.train(data, max_steps=self.trainer.step_count + STEPS)
        return self.clock.seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compiled-only", action="store_true")
    parser.add_argument("--eager-only", action="store_true")
    parser.add_argument("--from", dest="source", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--model", choices=list(MODELS), default="resnet50")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    loops: dict[str, Any] = {}
    for compiled in [False] * (not options.compiled_only) + [True] * (not options.eager_only):
        for name, kind in (("by hand", ByHand), ("paceline", ByTrainer)):
            torch.manual_seed(0)
            loops[f"{name}, {'compiled' if compiled else 'eager'}"] = kind(
                MODELS[options.model](), options, compiled=compiled
            )
    data = batches(options)
    for name, loop in loops.items():
        begun = time.perf_counter()
        loop.round(data)
        print(f"{name}: first round {time.perf_counter() - begun:.1f} s", flush=True)
    speeds: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(options.rounds):
        for name in list(loops) if number % 2 else reversed(loops):
            speeds[name].append(options.batch * (STEPS - WARM_UP) / loops[name].round(data))
    for name, values in speeds.items():
        base = speeds[name.replace("paceline", "by hand")]
        ratios = [ours / theirs for ours, theirs in zip(values, base, strict=True)]
        print(
            f"{name}: {statistics.median(values):,.0f} images/s ({min(values):,.0f} to {max(values):,.0f}), "
            f"{statistics.median(ratios):.3f} of by hand"
        )


if __name__ == "__main__":
    main()
