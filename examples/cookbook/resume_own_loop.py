"""Save and resume a loop of your own, at any step and on another number of ranks.

paceline launch -n 2 examples/cookbook/resume_own_loop.py --stop-after 10
paceline launch -n 3 examples/cookbook/resume_own_loop.py                    # continues at step 10

The position in the data is part of a checkpoint: `trainer.loader` yields the rest of the epoch, each sample once.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("own-loop-checkpoint"))
    parser.add_argument("--stop-after", type=int, help="end after this step, as if the job had run out of time")
    args = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    trainer = paceline.Trainer(
        model,
        optimizer,
        criterion=nn.MSELoss(),
        scheduler=scheduler,  # stepped by the Trainer and saved with it
        scheduler_interval="step",
        batch=32,
        run=False,
    )

    best = float("inf")
    if args.folder.exists():  # weights, optimizer, scheduler, step, epoch, position in the data, random state
        best = trainer.load_checkpoint(args.folder)["best"]

    first = trainer.step_count
    for _ in range(trainer.epoch, args.epochs):
        for batch in trainer.loader(data):
            loss, stepped = trainer.training_step(batch)
            total = torch.tensor([loss.item() * len(batch[0]), len(batch[0])], device=loss.device)
            paceline.dist.all_reduce(total)
            best = min(best, (total[0] / total[1]).item())
            if stepped and trainer.step_count == args.stop_after:
                trainer.save_checkpoint(args.folder, metadata={"best": best}, overwrite=True)
                if trainer.is_main_process:
                    print(f"step {first} -> {trainer.step_count}: saved; best loss {best:.4f}")
                return
    result = trainer.evaluate(data)
    if trainer.is_main_process:
        print(f"step {first} -> {trainer.step_count}: loss {result['loss']:.6f}, best {best:.4f}")


if __name__ == "__main__":
    main()
