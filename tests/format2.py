"""The training that made contract/fixture, a checkpoint of format 2 that every later version must load.

    python tests/format2.py      makes it again, with what is expected of whoever loads it

Two ranks shard the weights (fsdp) and train in float32 with AdamW, an average of the weights, dropout, a plateau
schedule, the best evaluation, early stopping and a callback with a state. The checkpoint is that of step 6; what is
expected are its tensors, and the losses and rates of the four steps behind it. Only public names are used.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

FOLDER = Path(__file__).parent / "contract" / "fixture"
CHECKPOINT = FOLDER / "step-000006"
SAVED, STEPS = 6, 10
DTYPES = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "U8": "u1"}
LAYOUTS = {"single": 1, "fsdp": 2}
METADATA = {"note": "made for a test", "worst": float("inf"), "mean": torch.tensor([0.5, 0.25])}


class Counts:
    """A callback with a state: how many records it saw, and a tensor."""

    def __init__(self) -> None:
        self.seen, self.sum = 0, torch.zeros(2)

    def on_log(self, record: dict[str, Any]) -> None:
        self.seen += 1
        self.sum += torch.tensor([1.0, float(record["step"])])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "sum": self.sum.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.sum = state["seen"], state["sum"]


def data(samples: int, first: int) -> TensorDataset:
    inputs = torch.randn(samples, 8, generator=torch.Generator().manual_seed(first))
    return TensorDataset(inputs, (inputs[:, 0] + inputs[:, 1] > 0).long())


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        # BatchNorm has buffers, one of them an integer.
        first = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1)]
        return nn.Sequential(*first, nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))


def trainer(strategy: str, counts: Counts | None = None, **settings: Any) -> paceline.Trainer:
    return paceline.Trainer(
        model(),
        {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1},
        criterion=nn.CrossEntropyLoss(),
        callbacks=[counts or Counts()],
        strategy=strategy,
        batch=12,
        clip_norm=1.0,
        ema=0.9,
        schedule={"name": "plateau", "patience": 0, "threshold": 0.2, "factor": 0.7},
        save_best="loss",
        early_stop={"patience": 50, "min_delta": 0.5},
        eval_every=2,
        log_every=1,
        seed=3,
        dropout="per-rank",  # masks by sample are younger than this checkpoint
        device="cpu",
        quiet=True,
        **{"run": False, **settings},
    )


def train(on: paceline.Trainer, until: int = STEPS) -> dict[str, list[float]]:
    history = on.train(data(50, first=5), data(13, first=6), max_steps=until)
    records = [record for record in history.steps if record["step"] > SAVED]
    return {
        "losses": [record["loss"] for record in records],
        "rates": [record["lr"] for record in records],
        "evaluations": [record["loss"] for record in history.evaluations if record["step"] > SAVED],
    }


def hashes(checkpoint: Path) -> dict[str, str]:
    """Of every tensor as a whole: the same however it was sharded. Read as docs/reference/checkpoint.md describes."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    files = {name: (checkpoint / name).read_bytes() for name in manifest["files"]}
    found = {}
    for name, entry in manifest["tensors"].items():
        whole = np.empty(entry["shape"], DTYPES[entry["dtype"]])
        for chunk in entry["chunks"]:
            count = prod(chunk["sizes"])
            part = np.frombuffer(files[chunk["file"]], whole.dtype, count, chunk["at"]).reshape(chunk["sizes"])
            box = zip(chunk["offsets"], chunk["sizes"], strict=True)
            whole[tuple(slice(start, start + size) for start, size in box)] = part
        found[name] = hashlib.sha256(whole.tobytes()).hexdigest()
    return found


def _save(folder: str) -> None:
    first = trainer("fsdp")
    train(first, SAVED)
    first.save_checkpoint(folder, metadata=METADATA)


def _continue(strategy: str) -> dict[str, list[float]]:
    second = trainer(strategy)
    second.load_checkpoint(CHECKPOINT)
    return train(second)


def main() -> int:
    paceline.Trainer  # noqa: B018  # imports torch once, before ranks are forked
    shutil.rmtree(CHECKPOINT, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / CHECKPOINT.name
        paceline.launch(_save, ranks=2, folder=str(folder))
        shutil.copytree(folder, CHECKPOINT)
    expected = {
        "tensors": hashes(CHECKPOINT),
        **{strategy: paceline.launch(_continue, ranks=ranks, strategy=strategy) for strategy, ranks in LAYOUTS.items()},
    }
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
