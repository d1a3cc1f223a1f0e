"""Sends plain values between ranks, as JSON in byte tensors: a received message can't run code."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

import torch
import torch.distributed as torch_dist

from paceline.errors import WorldError

Group = torch_dist.ProcessGroup | None

# gloo's thread frees a tensor shortly after the call has returned. If it holds the last reference it needs the
# interpreter, and aborts if that is shutting down. So recent tensors are kept here; large ones have an owner elsewhere.
_kept: deque[torch.Tensor] = deque(maxlen=32)
_LARGE = 1 << 16
_FAILED = -1  # sent instead of a length: the source failed, so the other ranks must not wait for its value


def keep(*tensors: torch.Tensor) -> None:
    """Keep references to tensors that were just sent or received."""
    _kept.extend([tensor for tensor in tensors if tensor.numel() < _LARGE])


def encode(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise WorldError(
            "not-json",
            f"A {type(value).__name__} can't be sent to other ranks: {error}.",
            why="objects are sent as JSON, so that a message can't run code",
            fix="send numbers, strings, lists and dicts; for tensors use broadcast() and all_gather()",
        ) from None


decode = json.loads


def broadcast(value: Any, src: int, group: Group) -> Any:
    device = message_device(group)
    encoded, problem = b"", None
    if torch_dist.get_rank() == src:
        try:
            encoded = encode(value)
        except WorldError as error:
            problem = error
    size = torch.tensor([_FAILED if problem else len(encoded)], device=device)
    torch_dist.broadcast(size, src, group=group)
    keep(size)
    if problem:
        raise problem
    if size.item() == _FAILED:
        raise WorldError("not-json", f"The object of rank {src} can't be sent; see the error of that rank.")
    data = as_tensor(encoded, int(size.item()), device)
    torch_dist.broadcast(data, src, group=group)
    keep(data)
    return decode(bytes(data.cpu().numpy()))


def all_gather(value: Any, group: Group) -> list[Any]:
    device = message_device(group)
    encoded = encode(value)
    sizes = torch.zeros(torch_dist.get_world_size(group), dtype=torch.int64, device=device)
    sizes[torch_dist.get_rank(group)] = len(encoded)
    torch_dist.all_reduce(sizes, group=group)
    longest = int(sizes.max().item())
    gathered = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in sizes]
    sent = as_tensor(encoded, longest, device)
    torch_dist.all_gather(gathered, sent, group=group)
    keep(sizes, sent, *gathered)
    return [decode(bytes(data[:size].cpu().numpy())) for data, size in zip(gathered, sizes.tolist(), strict=True)]


def message_device(group: Group) -> torch.device:
    """The device on which the backend of this group expects messages."""
    if torch_dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def as_tensor(data: bytes, size: int, device: torch.device) -> torch.Tensor:
    """The bytes, zero-padded to `size`. A copy, because gloo's thread can't free memory that a Python object owns while
    the interpreter shuts down."""
    padded = bytearray(data.ljust(max(size, 1), b"\0"))  # frombuffer rejects an empty buffer
    return torch.frombuffer(padded, dtype=torch.uint8)[:size].clone().to(device)
