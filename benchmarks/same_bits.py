"""Compare two commits bit by bit: one seed for each layout, in float64 and float32, on CPU ranks.

    PYTHONPATH=../before/src python benchmarks/same_bits.py --output before.json
    python benchmarks/same_bits.py --compare before.json

Trains a small model for a few steps under every layout in `CASES` and hashes the results: losses, gradient norms,
learning rates, evaluations, final weights and averaged weights. With `--compare` the exit status is 1 unless every hash
matches the one in that file, and the differences are listed. It uses only public names, so that one file runs on both
commits; hashes are comparable on one machine with one version of torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import paceline

STEPS, CLASSES = 6, 4
PRECISIONS = ("fp64", "fp32")


@dataclass(frozen=True)
class Case:
    """One training run: number of ranks, model and settings."""

    name: str
    ranks: int
    settings: dict[str, Any]
    model: str = "gpt"
    dropout: float = 0.0
    own_loop: bool = False


def _layout(**degrees: int) -> dict[str, Any]:
    return {"layout": degrees}


_DDP, _FSDP, _TP, _PP = ({"strategy": name} for name in ("ddp", "fsdp", "tp", "pp"))
_SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
DATA = (("single", 1), ("ddp", 2), ("fsdp", 2))
CASES = [
    Case("single", 1, {"strategy": "single"}),
    Case("split", 1, {"strategy": "split", "split": {"devices": ["cpu", "cpu"]}}),
    Case("split, microbatches", 1, {"strategy": "split", "split": {"devices": ["cpu", "cpu"], "microbatches": 3}}),
    Case("dp", 1, {"strategy": "dp"}),
    Case("ddp 2", 2, _DDP),
    Case("ddp 3", 3, _DDP),
    Case("fsdp 2", 2, _FSDP),
    Case("fsdp 3", 3, _FSDP),
    Case("hsdp 4", 4, {"strategy": "hsdp"}),
    Case("tp 2", 2, _TP),
    Case("tp 2, no sequence", 2, {**_TP, "tensor": {"sequence": False}}),
    Case("pp 2, gpipe", 2, {**_PP, "pipeline": {"schedule": "gpipe"}}),
    Case("pp 2, 1f1b", 2, {**_PP, "pipeline": {"schedule": "1f1b"}}),
    Case("shard × tensor", 4, _layout(shard=2, tensor=2)),
    Case("replicate × tensor", 4, _layout(replicate=2, tensor=2)),
    Case("pipeline × replicate", 4, _layout(pipeline=2, replicate=2)),
    Case("pipeline × shard", 4, _layout(pipeline=2, shard=2)),
    Case("replicate × shard", 4, _layout(replicate=2, shard=2)),
    *(
        Case(f"{start['strategy']} {ranks}, {name}", ranks, {**start, **settings})
        for name, settings in {
            "recompute": {"recompute": "full"},
            "recompute selective": {"recompute": "selective"},
            "accumulate": {"accumulate": 3},
        }.items()
        for ranks, start in ((1, {"strategy": "single"}), (2, _DDP), (2, _FSDP), (2, _TP), (2, _PP))
    ),
    *(
        Case(f"{name} {ranks}, batchnorm, sync {sync}", ranks, {"strategy": name, "sync_batchnorm": sync}, "batchnorm")
        for name, ranks in DATA
        for sync in (True, False)
    ),
    *(Case(f"{name} {ranks}, dropout", ranks, {"strategy": name}, dropout=0.1) for name, ranks in DATA),
    *(Case(f"{name} {ranks}, noise", ranks, {"strategy": name}, "noisy") for name, ranks in DATA),
    Case("ddp 2, sgd, plateau", 2, {**_DDP, "optimizer": _SGD, "schedule": {"name": "plateau", "patience": 0}}),
    Case("ddp 2, own loop", 2, {**_DDP, "accumulate": 2}, "batchnorm", own_loop=True),
    Case("fsdp 2, own loop", 2, {**_FSDP, "accumulate": 2}, "batchnorm", own_loop=True),
]  # fmt: skip


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sample i counts up from i; one of its tokens is random in every epoch."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = (index * 5 + torch.arange(9) * (1 + index % 3)) % 64
        window[int(torch.randint(9, ()))] = index % 64
        return {"inputs": window[:-1], "targets": window[1:]}


class Noisy(nn.Module):
    """Its noise is that of the global batch, so it agrees between layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        logits: torch.Tensor = self.last(hidden + 0.1 * paceline.noise(hidden))
        return logits


def points(samples: int, seed: int) -> TensorDataset:
    inputs = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long())


def model_of(case: Case) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        if case.model == "gpt":
            sizes = {"layers": 4, "width": 16, "heads": 4, "vocabulary": 64, "context": 8}
            return paceline.get_model("gpt")(**sizes, dropout=case.dropout)
        if case.model == "noisy":
            return Noisy()
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))


def train(case: Case, precision: str) -> str:
    """A hash of the training run, or the code of the error that rejected it."""
    settings = {
        "batch": 12, "clip_norm": 1.0, "ema": 0.9, "log_every": 1, "eval_every": 2, "seed": 3, "device": "cpu",
        "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1},
        "schedule": {"name": "cosine", "warmup": 2, "steps": STEPS},
        "precision": precision, "run": False, "quiet": True, **case.settings,
    }  # fmt: skip
    is_text = case.model == "gpt"
    try:
        criterion = None if is_text else nn.CrossEntropyLoss()
        trainer = paceline.Trainer(model_of(case), criterion=criterion, **settings)
        data, val = (Tokens(50), Tokens(13)) if is_text else (points(56, 1), points(13, 2))
        told = _own_loop(trainer, data) if case.own_loop else _train(trainer, data, val)
    except paceline.errors.PacelineError as error:
        return error.code
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    _add_weights(digest, trainer.state_dict())
    with trainer.ema_weights():
        _add_weights(digest, trainer.state_dict())
    return digest.hexdigest()


def _train(trainer: paceline.Trainer, data: Any, val: Any) -> list[Any]:
    history = trainer.train(data, val, max_steps=STEPS)
    kept = ("step", "epoch", "loss", "lr", "grad_norm", "ema_loss")
    return [{key: repr(record.get(key)) for key in kept} for record in (*history.steps, *history.evaluations)]


def _own_loop(trainer: paceline.Trainer, data: Any) -> list[Any]:
    losses: list[Any] = []
    loader = trainer.loader(data)
    while trainer.step_count < STEPS:
        for batch in loader:  # an epoch
            loss, stepped = trainer.training_step(batch)
            losses.append([repr(float(loss)), stepped])
    return losses


def _add_weights(digest: Any, weights: dict[str, torch.Tensor]) -> None:
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())


def _on_ranks(cases: list[tuple[int, str]]) -> list[str]:
    return [train(CASES[number], precision) for number, precision in cases]


def run() -> dict[str, str]:
    """Cases on the same number of ranks share a process group."""
    found = {}
    for ranks in sorted({case.ranks for case in CASES}):
        same = [(n, precision) for n, case in enumerate(CASES) if case.ranks == ranks for precision in PRECISIONS]
        for (number, precision), result in zip(same, paceline.launch(_on_ranks, ranks=ranks, cases=same), strict=True):
            found[f"{CASES[number].name}, {precision}"] = result
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the hashes to this file; default: standard output")
    parser.add_argument("--compare", type=Path, help="compare with the hashes in this file")
    options = parser.parse_args()
    paceline.Trainer  # noqa: B018  # import torch once, before ranks are forked
    print(f"paceline: {Path(paceline.__file__).parent}; torch {torch.__version__}", file=sys.stderr)
    found = run()
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    if options.output:
        options.output.write_text(text)
    elif not options.compare:
        print(text, end="")
    if not options.compare:
        return 0
    before = json.loads(options.compare.read_text())
    names = [*before, *(name for name in found if name not in before)]
    different = [name for name in names if before.get(name) != found.get(name)]
    for name in different:
        print(f"{name}: {before.get(name, 'absent')} before, {found.get(name, 'absent')} now")
    print(f"{len(names) - len(different)} of {len(names)} runs are bitwise identical")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
