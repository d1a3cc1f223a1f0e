"""Plain DistributedDataParallel: torchrun --nproc-per-node 2 examples/migrate/before_ddp.py"""

import contextlib

import torch
import torch.distributed as dist
from task import EPOCHS, TRAIN, VAL, Classifier
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

ACCUMULATE = 2


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(f"cuda:{rank}" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Classifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    model = DistributedDataParallel(model)
    sampler = DistributedSampler(TRAIN)
    loader = DataLoader(TRAIN, batch_size=16, sampler=sampler)
    val_loader = DataLoader(VAL, batch_size=64, sampler=DistributedSampler(VAL, shuffle=False))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for number, batch in enumerate(loader):
            batch = {key: value.to(device) for key, value in batch.items()}
            last = (number + 1) % ACCUMULATE == 0
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.autocast(device.type, torch.bfloat16):
                    loss = model(**batch)["loss"] / ACCUMULATE
                loss.backward()
            if last:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()

        model.eval()
        counts = torch.zeros(2, device=device)
        with torch.no_grad():
            for batch in val_loader:
                batch = {key: value.to(device) for key, value in batch.items()}
                hits = model(**batch)["logits"].argmax(1) == batch["labels"]
                counts += torch.stack([hits.sum(), torch.tensor(len(hits), device=device)])
        dist.all_reduce(counts)
        accuracy = (counts[0] / counts[1]).item()
        if rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f} on {world} ranks")
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, "ddp.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
