"""A typical DDP script whose training loop is replaced by the Trainer. The script keeps its own process group.

torchrun --nproc-per-node 2 examples/from_a_ddp_script.py
paceline launch -n 2 examples/from_a_ddp_script.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(240, 4)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    # A DistributedSampler selects the samples of each rank, so the global batch is 16 × the number of ranks. With a
    # plain DataLoader, or with the dataset itself, it would not depend on the number of ranks.
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))

    model = nn.Linear(4, 2)
    trainer = paceline.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), criterion=nn.CrossEntropyLoss())
    history = trainer.train(loader, epochs=3)
    print(f"rank {dist.get_rank()}: loss {history.losses[0]:.3f} -> {history.losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
