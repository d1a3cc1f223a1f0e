"""Lightning, which starts the second process itself: python examples/migrate/before_lightning.py"""

import lightning
import torch
from task import EPOCHS, TRAIN, VAL, Classifier
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Classifier()

    def training_step(self, batch, index):
        loss = self.model(**batch)["loss"]
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        hits = self.model(**batch)["logits"].argmax(1) == batch["labels"]
        self.log("accuracy", hits.float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def main():
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        devices=2,
        accelerator="cpu",
        strategy="ddp",
        accumulate_grad_batches=2,
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(monitor="accuracy", mode="max", dirpath="lightning")],
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(Module(), DataLoader(TRAIN, batch_size=16, shuffle=True), DataLoader(VAL, batch_size=64))
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.3f} on {trainer.world_size} ranks")


if __name__ == "__main__":
    main()
