"""Which device a rank computes on.

GPUs are counted by `device_count()` only: `is_available()` opens the driver, after which a process can't be forked.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from paceline.errors import WorldError
from paceline.runtime.environment import RankInfo

_TRAINABLE = ("cpu", "cuda", "mps")


def gpu_names() -> list[str]:
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def choose_device(wanted: str | int | torch.device | None, place: RankInfo) -> torch.device:
    """A rank number, a string, a torch.device, or nothing: then this rank's GPU where there is one, else the CPU."""
    count = torch.cuda.device_count()
    if wanted is None:
        return torch.device("cuda", place.local_rank % count) if count else torch.device("cpu")
    if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 0:
        # `device=rank` is what DDP scripts write; without GPUs it can only mean "my place", which is the CPU.
        return _existing(torch.device("cuda", wanted), count) if count else torch.device("cpu")
    try:
        device = torch.device(wanted)
        if device.type not in _TRAINABLE:
            raise RuntimeError
    except (RuntimeError, TypeError):
        raise WorldError(
            "bad-device",
            f"{wanted!r} is no device to train on.",
            fix="give a rank number, a string such as 'cpu' or 'cuda:0', or a torch.device",
        ) from None
    if device.type == "cuda":
        index = device.index if device.index is not None else place.local_rank
        return _existing(torch.device("cuda", index), count)
    return device


def _existing(device: torch.device, count: int) -> torch.device:
    if device.index >= count:
        raise WorldError(
            "no-such-gpu",
            f"{device} was asked for, but this machine shows {_gpus(count)}.",
            fix="use device: cpu, fewer ranks, or check CUDA_VISIBLE_DEVICES",
        )
    return device


def _gpus(count: int) -> str:
    return ", ".join(gpu_names()) if count else "no GPU"


def memory_of(device: torch.device, local_ranks: int) -> int:
    """Bytes that one of `local_ranks` ranks on a machine can have. Opens the GPU's driver."""
    if device.type == "cuda":
        sharing = -(-local_ranks // torch.cuda.device_count())
        return int(torch.cuda.get_device_properties(device).total_memory) // sharing
    return _machine_memory() // local_ranks


def _machine_memory() -> int:
    """The machine's, or what its container may use of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return total if text == "max" else min(total, int(text))


def activate(device: torch.device) -> None:
    """Make it this process's device. Before the process group opens: NCCL binds to the device it finds."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
