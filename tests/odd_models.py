"""Small models that are hard to shard: odd widths, a parameter of one element, shared and frozen weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 7  # which neither 2, 3 nor 4 ranks divide


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.relu(self.mix(self.norm(inputs)))


class Net(nn.Module):
    """Blocks of odd width, a parameter of one element (most ranks hold none of it), and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, 2)
        self.register_buffer("kept", torch.full((3,), 0.5))
        self.register_buffer("rebuilt", torch.full((WIDTH,), 2.0), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.hidden(inputs))

    def hidden(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden * self.gain * self.rebuilt * self.kept[0]


def frozen() -> Net:
    net = Net()
    net.blocks[1].mix.weight.requires_grad_(False)
    net.first.bias.requires_grad_(False)
    return net


def shared_by_blocks() -> Net:
    net = Net()
    net.blocks[2].mix.weight = net.blocks[0].mix.weight
    return net


class Branches(Net):
    """Each sample's sign decides which of two layers it goes through; one layer is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.hidden(inputs)
        rows = []
        for row, sign in zip(hidden, inputs[:, 0] > 0, strict=True):
            rows.append(self.up(row) if sign else self.down(row))
        return self.head(torch.stack(rows))
