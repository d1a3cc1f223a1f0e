"""The number of ranks per node, with the reason. An explicit number is never changed."""

from __future__ import annotations

from paceline.errors import LaunchError


def choose_ranks(asked: int | None, *, device: str | int | None, on_cpu: int) -> tuple[int, str]:
    """The number of ranks and the reason. `on_cpu` is the default without GPUs."""
    gpus = _gpus(device)
    if asked is not None:
        if not isinstance(asked, int) or isinstance(asked, bool) or asked < 1:
            raise LaunchError("bad-number", f"Invalid number of ranks: {asked!r}.", fix="use a positive integer")
        if gpus and asked > len(gpus):
            raise LaunchError(
                "more-ranks-than-gpus",
                f"{asked} ranks requested, but this machine has {len(gpus)} GPUs: {', '.join(gpus)}.",
                why="ranks on the same GPU would compete for its memory and compute, which NCCL does not support",
                fix=f"request at most {len(gpus)} ranks, or CPU ranks: device: cpu in a recipe, --cpu for a script, "
                "CUDA_VISIBLE_DEVICES= in the environment elsewhere",
            )
        return asked, "requested"
    if gpus:
        return len(gpus), f"all GPUs: {', '.join(gpus)}"
    where = "device: cpu" if str(device) == "cpu" else "no GPU"
    return on_cpu, where


def _gpus(device: str | int | None) -> list[str]:
    """The GPUs that ranks may use; none if the CPU was requested. Does not initialize CUDA."""
    if str(device) == "cpu":
        return []
    from paceline.runtime.device import gpu_names

    return gpu_names()
