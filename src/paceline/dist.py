"""`paceline.dist`: rank, world size and collectives. The same calls work on one rank and on many.

With one rank no process group is needed. With several, the first collective initializes it if you have not. The first
calls in each process group check that operation, shape, dtype and root are the same on all ranks, and name the ranks
and lines that differ.

Collectives work in place and return None, as those of torch.distributed: the result is in the tensor that was passed.
Each must be called on every rank of its group.

Example:
    >>> import torch
    >>> from paceline import dist
    >>> total = torch.tensor([1.0])
    >>> dist.all_reduce(total)
    >>> total.item() == dist.world()
    True
"""

from __future__ import annotations

from paceline.data.predictions import all_gather_rows as all_gather_rows
from paceline.runtime.collectives import *  # noqa: F403


def __getattr__(name: str) -> object:
    from paceline.config.foreign_names import unknown_name

    raise unknown_name("dist", "paceline.dist", name)
