"""Memory of a rank while a large model is built under fsdp, and afterwards.

    python benchmarks/fsdp_memory.py [--gigabytes 2] [--ranks 4]

A gpt of that size in float32 is built from a recipe. The unique memory (USS) of a rank may never grow by more than its
shards and the largest block, plus 20 %: a thread samples it every five milliseconds.
"""

from __future__ import annotations

import argparse
import sys
import threading
from typing import Any

import psutil
import torch

import paceline

GIB = 2**30
WIDTH, VOCABULARY, CONTEXT = 1024, 8192, 128


class Peak:
    """Peak unique memory of this process while the context is open."""

    def __enter__(self) -> Peak:
        self._process = psutil.Process()
        self.before = self.highest = self._own()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.highest = max(self.highest, self._own())

    def _look(self) -> None:
        while not self._done.wait(0.005):
            self.highest = max(self.highest, self._own())

    def _own(self) -> int:
        return int(self._process.memory_full_info().uss)


def recipe(gigabytes: float) -> dict[str, Any]:
    of_block = (12 * WIDTH**2 + 13 * WIDTH) * 4
    layers = max(1, round((gigabytes * GIB - (VOCABULARY + CONTEXT) * WIDTH * 4) / of_block))
    model = {"name": "gpt", "layers": layers, "width": WIDTH, "heads": 8, "vocabulary": VOCABULARY, "context": CONTEXT}
    return {
        "model": model,
        "data": {"name": "stdlib-text"},
        "optimizer": {"name": "sgd", "lr": 0.01},
        "strategy": "fsdp",
        "run": False,
        "quiet": True,
    }


def build(settings: dict[str, Any]) -> list[list[float]]:
    """By rank: [peak growth, growth after construction, bytes of parameters, of the model, of the largest block]."""
    torch.set_num_threads(1)
    with Peak() as peak:
        trainer = paceline.Trainer.from_config(paceline.Config.from_dict(settings))
    parameters = list(trainer.model.parameters())
    held = sum(parameter.to_local().untyped_storage().nbytes() for parameter in parameters)
    whole = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    block = sum(parameter.numel() * parameter.element_size() for parameter in trainer.model.blocks[0].parameters())
    largest = max(block, max(parameter.numel() * parameter.element_size() for parameter in parameters))
    own = [peak.highest - peak.before, peak._own() - peak.before, held, whole, largest]
    everyone: list[list[float]] = paceline.dist.all_gather_object([float(value) for value in own])
    return everyone


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    import paceline.train.trainer  # import once, before ranks are forked

    ranks = paceline.launch(build, ranks=options.ranks, settings=recipe(options.gigabytes))
    print("| rank | peak growth | growth after construction | shards | full model | bound | |")
    print("|---" * 7 + "|")
    fits = True
    for rank, (highest, after, held, whole, largest) in enumerate(ranks):
        bound = 1.2 * (whole / options.ranks + largest)
        fits &= highest <= bound
        cells = [f"{value / GIB:.3f} GiB" for value in (highest, after, held, whole, bound)]
        print(f"| {rank} | {' | '.join(cells)} | {'ok' if highest <= bound else 'too much'} |")
    sys.exit(not fits)


if __name__ == "__main__":
    main()
