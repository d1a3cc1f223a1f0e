"""Accelerate: torchrun --nproc-per-node 2 examples/migrate/before_accelerate.py, or accelerate launch …"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from task import EPOCHS, TRAIN, VAL, Classifier
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
    set_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TRAIN, batch_size=16, shuffle=True)
    val_loader = DataLoader(VAL, batch_size=64)
    steps = EPOCHS * len(TRAIN) // (16 * 2)  # prepared schedulers step once per process and optimizer step
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model, optimizer, loader, val_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, val_loader, scheduler
    )

    for epoch in range(EPOCHS):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        model.eval()
        hits = []
        with torch.no_grad():
            for batch in val_loader:
                predicted = model(**batch)["logits"].argmax(1)
                hits.append(accelerator.gather_for_metrics(predicted == batch["labels"]))
        accuracy = torch.cat(hits).float().mean().item()
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.3f} on {accelerator.num_processes} ranks")
    accelerator.save_state("accelerate-state")
    accelerator.end_training()


if __name__ == "__main__":
    main()
