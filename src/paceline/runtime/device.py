"""The device of a rank.

Only `device_count()` is used to look for GPUs: `is_available()` initializes CUDA, which does not survive a fork.
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


def choose_device(wanted: str | int | torch.device | None, rank_info: RankInfo) -> torch.device:
    """The device for an index, a string or a torch.device. By default the GPU of this local rank, else the CPU."""
    count = torch.cuda.device_count()
    if wanted is None:
        return torch.device("cuda", rank_info.local_rank % count) if count else torch.device("cpu")
    if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 0:
        # DDP scripts pass `device=rank`; on a machine without GPUs that means the CPU.
        return _existing(torch.device("cuda", wanted), count) if count else torch.device("cpu")
    try:
        device = torch.device(wanted)
        if device.type not in _TRAINABLE:
            raise RuntimeError
    except (RuntimeError, TypeError):
        raise WorldError("bad-device", f"Invalid device: {wanted!r}.") from None
    if device.type == "cuda":
        index = device.index if device.index is not None else rank_info.local_rank
        return _existing(torch.device("cuda", index), count)
    return device


def _existing(device: torch.device, count: int) -> torch.device:
    if device.index >= count:
        here = f"this machine has {', '.join(gpu_names()) or 'no GPU'}"
        fix = 'use device="cpu" or fewer ranks, or check CUDA_VISIBLE_DEVICES'
        if not torch.backends.cuda.is_built():
            here = f"this torch ({torch.__version__}) was built without CUDA"
            fix = "install a CUDA build, or use the CPU"
        raise WorldError("no-such-gpu", f"Device {device} does not exist; {here}.", fix=fix)
    return device


def memory_of(device: torch.device, local_ranks: int) -> int:
    """Bytes available to each of `local_ranks` ranks on a machine. Initializes CUDA."""
    if device.type == "cuda":
        ranks_per_gpu = -(-local_ranks // torch.cuda.device_count())
        return int(torch.cuda.get_device_properties(device).total_memory) // ranks_per_gpu
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    text = limit.read_text().strip() if limit.exists() else "max"
    return (total if text == "max" else min(total, int(text))) // local_ranks


def activate(device: torch.device) -> None:
    """Make it the current device. Call before the process group is initialized: NCCL uses the current device."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
