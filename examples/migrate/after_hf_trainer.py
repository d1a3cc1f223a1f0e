"""The same with paceline: paceline launch -n 2 examples/migrate/after_hf_trainer.py, or torchrun …"""

import torch
from task import EPOCHS, TRAIN, VAL, Classifier

import paceline


def main():
    torch.manual_seed(0)
    trainer = paceline.Trainer(
        Classifier(),
        {"name": "adamw", "lr": 1e-2, "weight_decay": 0.01},
        schedule={"name": "linear", "warmup": 12},
        metrics={"accuracy": lambda logits, labels: (logits.argmax(-1) == labels).float()},
        batch=64,
        accumulate=2,
        precision="bf16",
        clip_norm=1.0,
        save_best="accuracy",
        run="hf-trainer",
    )
    history = trainer.train(TRAIN, VAL, epochs=EPOCHS)
    if trainer.is_main_process:
        print(f"accuracy {history.evaluations[-1]['accuracy']:.3f} on {paceline.dist.world()} ranks")


if __name__ == "__main__":
    main()
