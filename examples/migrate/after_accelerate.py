"""The same with a Trainer: paceline launch -n 2 examples/migrate/after_accelerate.py, or torchrun …"""

import torch
from task import EPOCHS, TRAIN, VAL, Classifier

import paceline


def main():
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = EPOCHS * len(TRAIN) // 64
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    trainer = paceline.Trainer(
        model,
        optimizer,
        scheduler=scheduler,
        scheduler_interval="step",
        metrics={"accuracy": lambda logits, labels: (logits.argmax(1) == labels).float()},
        batch=64,
        accumulate=2,
        precision="bf16",
        clip_norm=1.0,
        run="accelerate",
    )
    history = trainer.train(TRAIN, VAL, epochs=EPOCHS)
    if trainer.is_main_process:
        print(f"accuracy {history.evaluations[-1]['accuracy']:.3f} on {paceline.dist.world()} ranks")


if __name__ == "__main__":
    main()
