"""The same with a Trainer: paceline launch -n 2 examples/migrate/after_lightning.py, or torchrun …"""

import torch
from task import EPOCHS, TRAIN, VAL, Classifier

import paceline


def main():
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    trainer = paceline.Trainer(
        model,
        optimizer,
        scheduler=scheduler,
        metrics={"accuracy": lambda logits, labels: (logits.argmax(1) == labels).float()},
        batch=64,
        accumulate=2,
        precision="bf16",
        clip_norm=1.0,
        save_best="accuracy",
        run="lightning",
    )
    history = trainer.train(TRAIN, VAL, epochs=EPOCHS)
    if trainer.is_main_process:
        print(f"accuracy {history.evaluations[-1]['accuracy']:.3f} on {paceline.dist.world()} ranks")


if __name__ == "__main__":
    main()
