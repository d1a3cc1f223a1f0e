"""The number of ranks per node, with the reason. An explicit number is never changed."""

from __future__ import annotations

from paceline.errors import LaunchError
from paceline.runtime import environment


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


def reject_launch_on_rank(what: str) -> None:
    """Raise an error if a launcher has started this process as one of several ranks."""
    info = environment.read_rank_info() if environment.is_rank() else None
    if info is not None and info.world > 1:
        raise LaunchError(
            "inside-a-rank",
            f"{what} was called on rank {info.rank} of {info.world}.",
            why="a launcher has started the ranks already; each of them would start ranks of its own",
            fix="run the script with python, or call the function directly and keep the launcher",
        )


def _gpus(device: str | int | None) -> list[str]:
    """The GPUs that ranks may use; none if the CPU was requested. Does not initialize CUDA."""
    if str(device) == "cpu":
        return []
    from paceline.runtime.device import gpu_names

    return gpu_names()
