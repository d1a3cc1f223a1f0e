"""`deterministic: everywhere`: the same bits on 1, 2, 3, 4, 6 and 12 ranks, and what it costs.

    python benchmarks/bits_on_ranks.py [--steps 50] [--ranks 1,2,3,4,6,12]
    python benchmarks/bits_on_ranks.py --price [--rounds 15]

Trains each model in `MODELS` with three sizes of micro-batches on each number of ranks, and compares hashes of losses,
gradient norms and final weights with those of the first run. As a control, runs without `everywhere` on the first three
numbers of ranks must differ. The exit status is 1 otherwise. GPT-2 is that of transformers as it comes, with dropout.

The price is the time of a step relative to ddp without it, on 1 and 2 ranks: the median over interleaved rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from torch import nn
from torch.utils.data import Dataset

import paceline

BATCH, CONTEXT, VOCABULARY = 32, 32, 256
MICRO_BATCHES = (3, 8, 32)  # a slice has up to three samples
PRICED = {"mlp": 20, "gpt": 6, "GPT-2": 6}  # steps in a round


@dataclass(frozen=True)
class Case:
    name: str
    precision: str


MODELS = (Case("mlp", "fp32"), Case("gpt", "fp32"), Case("gpt", "bf16"), Case("GPT-2", "fp32"))


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Random images of four classes, or tokens that count up. The last batch of an epoch is shorter than a slice."""

    draws_randomness = False

    def __init__(self, name: str, length: int = 5 * BATCH + 7) -> None:
        self.name, self.length = name, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.name == "mlp":
            generator = torch.Generator().manual_seed(index)
            return {"inputs": torch.randn(64, generator=generator), "targets": torch.tensor(index % 4)}
        tokens = (index * 7 + torch.arange(CONTEXT + 1) * (1 + index % 5)) % VOCABULARY
        if self.name == "gpt":
            return {"inputs": tokens[:-1], "targets": tokens[1:]}
        labels = tokens[:-1].clone()
        labels[CONTEXT - index % 9 :] = -100  # padding: the weight of a slice depends on the data
        return {"input_ids": tokens[:-1], "labels": labels}


def model_of(name: str, size: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        if name == "mlp":
            return paceline.get_model("mlp")(inputs=64, width=16 * size)
        if name == "gpt":
            sizes = {"layers": 2, "width": 16 * size, "heads": 2, "vocabulary": VOCABULARY, "context": CONTEXT}
            return paceline.get_model("gpt")(**sizes, dropout=0.1)
        from transformers import GPT2Config, GPT2LMHeadModel
        from transformers.utils import logging

        logging.set_verbosity_error()
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=16 * size, n_layer=2, n_head=2)
        )


def trainer_of(case: Case, size: int = 2, **settings: Any) -> paceline.Trainer:
    return paceline.Trainer(
        model_of(case.name, size), {"name": "adamw", "lr": 3e-3}, batch=BATCH, precision=case.precision, clip_norm=1.0,
        strategy="ddp", run=False, quiet=True, seed=3, device="cpu", **settings,
    )  # fmt: skip


def digest_of(case: Case, steps: int, **settings: Any) -> str:
    trainer = trainer_of(case, **settings)
    history = trainer.train(Samples(case.name), max_steps=steps)
    told = [[repr(record["loss"]), repr(record["grad_norm"])] for record in history.steps]
    digest = hashlib.sha256(json.dumps(told).encode())
    for name, tensor in sorted(trainer.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def digests(steps: int, everywhere: bool) -> dict[str, list[str]]:
    """On every rank: of the runs of each model."""
    runs = [{"deterministic": "everywhere", "micro_batch": micro} for micro in MICRO_BATCHES]
    return {
        f"{case.name}, {case.precision}": [
            digest_of(case, steps, **settings) for settings in (runs if everywhere else [{"deterministic": True}])
        ]
        for case in MODELS
    }


def compare(numbers: Sequence[int], steps: int) -> bool:
    began = time.perf_counter()
    found = [paceline.launch(digests, ranks=number, steps=steps, everywhere=True) for number in numbers]
    controls = [paceline.launch(digests, ranks=number, steps=steps, everywhere=False) for number in numbers[:3]]
    shown = ", ".join(map(str, numbers))
    print(f"{steps} steps on {shown} ranks with micro_batch {', '.join(map(str, MICRO_BATCHES))}: losses, gradient")
    print(f"norms and weights, {time.perf_counter() - began:.0f} s\n")
    print("| model | runs | different results | without `everywhere` |\n|---|---|---|---|")
    holds = True
    for name in found[0]:
        runs = [digest for world in found for digest in world[name]]
        others = [digest for world in controls for digest in world[name]]
        holds &= len(set(runs)) == 1 < len(set(others))
        print(f"| {name} | {len(runs)} | {len(set(runs))} | {len(set(others))} of {len(others)} |")
    return holds


def times(rounds: int) -> dict[str, dict[str, list[float]]]:
    """On every rank: seconds per step, in interleaved rounds."""
    found = {}
    for name, steps in PRICED.items():
        case, kinds = Case(name, "fp32"), {"ddp": False, "everywhere": "everywhere"}
        trainers = {kind: trainer_of(case, 16, deterministic=setting) for kind, setting in kinds.items()}
        measured: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(rounds + 1):
            for kind, trainer in trainers.items():
                torch.use_deterministic_algorithms(kind == "everywhere")  # it is global
                began = time.perf_counter()
                trainer.train(Samples(name, 8 * BATCH), max_steps=(number + 1) * steps)
                if number:  # the first round warms up
                    measured[kind].append((time.perf_counter() - began) / steps)
        found[name] = measured
    return found


def price(rounds: int) -> None:
    print(f"{rounds} rounds, interleaved, on {os.cpu_count()} cores; load {os.getloadavg()[0]:.1f}\n")
    print("| model, batch 32 | ranks | ddp, ms a step | everywhere, ms a step | ratio |\n|---|---|---|---|---|")
    for number in (1, 2):
        for name, measured in paceline.launch(times, ranks=number, rounds=rounds).items():
            plain, sliced = (statistics.median(measured[kind]) for kind in ("ddp", "everywhere"))
            pairs = zip(measured["ddp"], measured["everywhere"], strict=True)
            ratio = statistics.median(second / first for first, second in pairs)
            print(f"| {name} | {number} | {plain * 1e3:.1f} | {sliced * 1e3:.1f} | {ratio:.2f} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ranks", default="1,2,3,4,6,12")
    parser.add_argument("--price", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()

    if options.price:
        price(options.rounds)
        return 0
    return 0 if compare([int(number) for number in options.ranks.split(",")], options.steps) else 1


if __name__ == "__main__":
    sys.exit(main())
