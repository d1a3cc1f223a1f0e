"""A dataset that is read as a stream: no length, no random access, and a shard of the files for each rank.

paceline launch -n 2 examples/cookbook/streaming.py

`sharded = True` says that each rank reads its own part. Parts may have different lengths: a rank whose part has ended
joins the remaining steps with weight zero, so nothing hangs and no sample is dropped. Without the attribute, every
rank reads the whole stream and keeps its slice of each batch, which needs no splitting but more reading.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

import paceline


class JsonLines(IterableDataset):
    sharded = True

    def __init__(self, folder):
        self.files = sorted(folder.glob("*.jsonl"))

    def __iter__(self):
        worker = get_worker_info()  # with `workers: N`, each process of a rank reads its part of the rank's files
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        readers = paceline.dist.world() * workers
        for file in self.files[paceline.dist.rank() * workers + number :: readers]:
            with file.open() as lines:
                for line in lines:
                    sample = json.loads(line)
                    yield torch.tensor(sample["x"]), torch.tensor([sample["y"]])


def write_files(folder, count=5):
    """As a preprocessing job would have left them: files of different lengths."""
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        points = torch.randn(40 + 16 * number, 4, generator=generator)
        rows = ({"x": point.tolist(), "y": point.sum().item()} for point in points)
        (folder / f"{number:05d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(
        "--folder", type=Path, default=Path("stream"), help="files of lines {x: [4 numbers], y: number}"
    )
    args = parser.parse_args()

    with paceline.dist.main_first():  # rank 0 prepares, the others wait
        if not args.folder.is_dir():
            args.folder.mkdir()
            write_files(args.folder)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 1))
    trainer = paceline.Trainer(model, {"lr": 1e-2}, criterion=nn.MSELoss(), batch=32, run=False)
    history = trainer.train(JsonLines(args.folder), epochs=args.epochs)
    if trainer.is_main_process:
        print(f"loss {history.losses[0]:.3f} -> {history.losses[-1]:.3f} in {trainer.step_count} steps")


if __name__ == "__main__":
    main()
