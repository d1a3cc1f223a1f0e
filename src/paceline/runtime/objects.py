"""Plain values between ranks, as JSON in byte tensors: nothing that is received can run code."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import torch
import torch.distributed as torch_dist

from paceline.errors import WorldError

Group = torch_dist.ProcessGroup | None

# gloo's own thread lets go of a tensor a moment after the call has returned. If it is the last to do so it needs
# Python, and a process that is about to end has none left: it would abort. So the last ones are held here; large ones
# belong to somebody who holds them.
_kept: deque[torch.Tensor] = deque(maxlen=32)
_LARGE = 1 << 16


def keep(*tensors: torch.Tensor) -> None:
    """Hold on to what was just sent or received."""
    _kept.extend([tensor for tensor in tensors if tensor.numel() < _LARGE])


# In place of a length: the source had nothing to send, and the others must not wait for it.
_FAILED = -1


def encode(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise WorldError(
            "not-json",
            f"A {type(value).__name__} can't travel between ranks: {error}.",
            why="objects travel as JSON, so that a message can never run code",
            fix="send numbers, strings, lists and dicts; tensors go through broadcast() and all_gather()",
        ) from None


def decode(data: bytes) -> Any:
    return json.loads(data)


def broadcast(value: Any, src: int, group: Group) -> Any:
    device = message_device(group)
    mine, problem = b"", None
    if torch_dist.get_rank() == src:
        try:
            mine = encode(value)
        except WorldError as error:
            problem = error
    size = torch.tensor([_FAILED if problem else len(mine)], device=device)
    torch_dist.broadcast(size, src, group=group)
    keep(size)
    if problem:
        raise problem
    if size.item() == _FAILED:
        raise WorldError("not-json", f"Rank {src}'s object can't travel between ranks; its own error says why.")
    data = as_tensor(mine, int(size.item()), device)
    torch_dist.broadcast(data, src, group=group)
    keep(data)
    return decode(bytes(data.cpu().numpy()))


def all_gather(value: Any, group: Group) -> list[Any]:
    device = message_device(group)
    mine = encode(value)  # an error here is every rank's own: the others then wait for this one, as for any that fails
    sizes = torch.zeros(torch_dist.get_world_size(group), dtype=torch.int64, device=device)
    sizes[torch_dist.get_rank(group)] = len(mine)
    torch_dist.all_reduce(sizes, group=group)
    longest = int(sizes.max().item())
    gathered = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in sizes]
    sent = as_tensor(mine, longest, device)
    torch_dist.all_gather(gathered, sent, group=group)
    keep(sizes, sent, *gathered)
    return [decode(bytes(data[:size].cpu().numpy())) for data, size in zip(gathered, sizes.tolist(), strict=True)]


def message_device(group: Group) -> torch.device:
    """Where a message has to lie for this group's backend."""
    if torch_dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def as_tensor(data: bytes, size: int, device: torch.device) -> torch.Tensor:
    """The bytes, filled up to `size`, on the device.

    A copy: gloo's own thread may be the last to let go of what it sends, and memory that belongs to a Python object can
    be freed by Python's threads only, which at the end of a process there are none of.
    """
    padded = bytearray(data.ljust(size, b"\0"))
    if not padded:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(padded, dtype=torch.uint8).clone().to(device)
