"""A script that starts its own processes, as many guides show: python examples/migrate/before_spawn.py"""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from task import EPOCHS, TRAIN, Classifier
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def train(rank, world_size):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = os.environ.get("MASTER_PORT", "29500")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(TRAIN, num_replicas=world_size, rank=rank)
    loader = DataLoader(TRAIN, batch_size=64 // world_size, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch)["loss"]
            loss.backward()
            optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"loss {mean.item() / world_size:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, args=(2,), nprocs=2, join=True)
