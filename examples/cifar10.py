"""CIFAR-10 with a ResNet-20: mixed precision, an average of the weights, checkpoints and resuming.

python examples/cifar10.py --epochs 2                                     # one process
python examples/cifar10.py --distributed --epochs 2                       # one rank per GPU, or two on CPUs
python examples/cifar10.py --distributed --world-size 4 --use-amp --use-ema
paceline launch -n 4 examples/cifar10.py --use-amp                        # or torchrun --nproc-per-node 4 …
python examples/cifar10.py --save-dir runs/cifar10 --resume               # continue, on any number of ranks

The images are read from DATA/cifar-10-batches-bin, the "binary version" of CIFAR-10's home page. Without them, the
script trains on generated images of four shapes instead. The accuracy that it reaches on CIFAR-10 has not been
measured: the data are not on the machines on which this example was written and is tested.
"""

import argparse
import os
from pathlib import Path

import torch

import paceline


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--distributed", action="store_true", help="start ranks, unless a launcher has done so")
    parser.add_argument("--world-size", type=int, help="number of ranks; default: one per GPU, or two on CPUs")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=128, help="samples per step, over all ranks")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate for a batch of 128; scaled with the batch")
    parser.add_argument("--use-amp", action="store_true", help="compute in bfloat16")
    parser.add_argument("--use-ema", action="store_true", help="also evaluate an average of the weights")
    parser.add_argument(
        "--save-dir", type=Path, default=Path("runs/cifar10"), help="folder of the run, its metrics and checkpoints"
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in --save-dir")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder that contains cifar-10-batches-bin")
    parser.add_argument("--samples", type=int, default=4096, help="number of generated images")
    return parser.parse_args()


def load_data(folder, samples):
    """The two datasets, the number of classes, and what they are."""
    if (folder / "cifar-10-batches-bin").is_dir():
        return *paceline.get_data("cifar10", folder=str(folder)), 10, "CIFAR-10"
    return *paceline.get_data("shapes", length=samples, val_length=max(samples // 8, 1)), 4, "generated shapes"


def train(args):
    train_data, val_data, classes, kind = load_data(args.data, args.samples)
    torch.manual_seed(0)
    model = paceline.get_model("resnet20")(classes=classes)
    trainer = paceline.Trainer(
        model,
        # The linear scaling rule, with a warm-up of 5 epochs. Biases and norms have no weight decay.
        {
            "name": "sgd",
            "lr": args.lr,
            "lr_rule": "linear",
            "reference_batch": 128,
            "momentum": 0.9,
            "weight_decay": 1e-4,
        },
        schedule={"name": "cosine", "warmup": min(5, args.epochs // 4), "unit": "epochs"},
        metrics=["accuracy"],
        batch=args.batch_size,
        precision="bf16" if args.use_amp else "fp32",
        ema=0.999 if args.use_ema else None,
        save_best="accuracy",
        run=args.save_dir.absolute(),
        resume="auto" if args.resume else None,  # the newest run of --save-dir, from its newest intact checkpoint
    )
    history = trainer.train(train_data, val_data, epochs=args.epochs)
    if trainer.is_main_process and history.steps:
        print(f"loss {history.losses[0]:.3f} -> {history.losses[-1]:.3f}; run folder {history.run}")
        last = history.evaluations[-1]
        print(
            f"evaluation on {kind}:",
            {name: round(last[name], 3) for name in last if name.endswith(("loss", "accuracy"))},
        )
    return trainer.step_count


if __name__ == "__main__":
    arguments = parse_arguments()
    if arguments.distributed and "RANK" not in os.environ:
        paceline.launch(train, ranks=arguments.world_size or torch.cuda.device_count() or 2, args=arguments)
    else:
        train(arguments)
