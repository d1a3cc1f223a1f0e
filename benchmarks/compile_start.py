"""Seconds of the first step of a compiled model: without a cache, and in a new process with the cache of the first.

    python benchmarks/compile_start.py [--device cpu] [--rounds 3] [gpt resnet mlp]

Also the number of graphs compiled in two epochs that end with a short batch, and in an evaluation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from typing import Any


def first_step(name: str, device: str) -> dict[str, float]:
    import torch
    from torch import nn
    from torch._dynamo.utils import counters
    from torch.utils.data import TensorDataset

    import paceline
    from paceline.models.gpt import GPT
    from paceline.models.resnet import resnet20

    torch.manual_seed(0)
    model: nn.Module
    criterion: nn.Module | None = None
    data: Any
    if name == "gpt":
        model = GPT(layers=4, width=64, heads=4, vocabulary=64, context=32)
        tokens = torch.randint(64, (22, 33))
        data = [{"inputs": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()} for rows in tokens.split(8)]
    elif name == "resnet":
        model, criterion = resnet20(), nn.CrossEntropyLoss()
        data = TensorDataset(torch.randn(22, 3, 16, 16), torch.randint(10, (22,)))
    else:
        model, criterion = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)), nn.CrossEntropyLoss()
        data = TensorDataset(torch.randn(22, 8), torch.randint(4, (22,)))
    marks: list[float] = []
    trainer = paceline.Trainer(
        model, {"name": "adamw", "lr": 1e-3}, criterion=criterion, compile="model", batch=8, device=device, run=False,
        quiet=True, callbacks=[lambda record: marks.append(time.perf_counter())],
    )  # fmt: skip
    begun = time.perf_counter()
    trainer.train(data, epochs=2)
    trained = counters["stats"]["unique_graphs"]
    trainer.evaluate(data)
    return {
        "first step": marks[0] - begun,
        "slowest other step": max(after - before for before, after in pairwise(marks)),
        "graphs in training": trained,
        "graphs in evaluation": counters["stats"]["unique_graphs"] - trained,
    }


def in_a_new_process(name: str, device: str, cache: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", "--device", device, name]
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=["gpt", "resnet", "mlp"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(first_step(options.models[0], options.device)))
        return
    for name in options.models:
        pairs = []
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as cache:
                pairs.append([in_a_new_process(name, options.device, cache) for _ in range(2)])
        cold, warm = (statistics.median(pair[number]["first step"] for pair in pairs) for number in (0, 1))
        ratio = statistics.median(pair[1]["first step"] / pair[0]["first step"] for pair in pairs)
        last = pairs[-1][1]
        print(
            f"{name}: first step {cold:.1f} s, again {warm:.1f} s ({ratio:.2f}); slowest other step "
            f"{last['slowest other step']:.2f} s; graphs: {last['graphs in training']:g} in training, "
            f"{last['graphs in evaluation']:g} in an evaluation"
        )


if __name__ == "__main__":
    main()
