"""Out of memory, in words: what was asked, what was free, what the batch was, and what to change."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

from paceline.config.recipe import Config
from paceline.errors import TrainError

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?\w+)")


def is_out_of_memory(error: BaseException) -> bool:
    """torch has a class for GPUs; the CPU's allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def explain(
    error: BaseException, model: nn.Module, optimizer: torch.optim.Optimizer, config: Config, *, rank: int, ranks: int,
    micro_batch: int | None, groups: int, device: torch.device,
) -> TrainError:  # fmt: skip
    asked = _ASKED.search(str(error))
    where = f"rank {rank} ({device})"
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    held = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    states = sum(
        t.numel() * t.element_size()
        for s in optimizer.state.values()
        for t in s.values()
        if isinstance(t, torch.Tensor)
    )
    return TrainError(
        "out-of-memory",
        f"Out of memory on {where}: {_size(asked.group(1) if asked else None)} more was asked for; {_free(device)}.",
        why=f"the model holds {_gib(parameters)}, its gradients {_gib(held)}, the optimizer {_gib(states)}; "
        f"the rest are activations of a micro-batch of {micro_batch or 'unknown size'} samples",
        fix=_advice(config, micro_batch, groups, ranks, held, states),
    )


def _free(device: torch.device) -> str:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return f"{_gib(free)} of {_gib(total)} was free"
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free, total = (int(facts[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
    return f"{_gib(free)} of {_gib(total)} was free"


def _size(text: str | None) -> str:
    """torch says `20.00 GiB` for GPUs and bytes for the CPU."""
    if text is None:
        return "some"
    number = text.removesuffix("bytes").strip()
    return _gib(int(number)) if number.isdigit() else text


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"


def _advice(config: Config, micro_batch: int | None, groups: int, ranks: int, held: int, states: int) -> str:
    """What helps, most first, with the numbers worked out."""
    advice = []
    if micro_batch and micro_batch > 1:
        smaller = micro_batch // 2
        batch = config.batch or micro_batch * groups * ranks
        groups = -(-batch // (smaller * ranks))
        advice.append(f"micro_batch: {smaller} (accumulate {groups}; the same training with half the activations)")
    if config.precision in ("fp32", "fp64"):
        advice.append("precision: bf16 (activations at half the size)")
    if ranks > 1:
        saved = (held + states) * (ranks - 1) // ranks
        advice.append(f"sharding gradients and optimizer over the {ranks} ranks would free {_gib(saved)} on each")
    advice.append("recomputing activations (torch.utils.checkpoint) in the model's blocks")
    return "; ".join(advice)
