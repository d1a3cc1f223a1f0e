"""How many ranks, and why.

A number that somebody wrote is never changed. Only without one are ranks chosen, and the choice is said.
"""

from __future__ import annotations

from paceline.errors import LaunchError


def choose_ranks(asked: int | None, *, device: str | int | None, on_cpu: int) -> tuple[int, str]:
    """The number of ranks and the reason. `on_cpu` is the choice where there is no GPU and no number."""
    gpus = _gpus(device)
    if asked is not None:
        if not isinstance(asked, int) or isinstance(asked, bool) or asked < 1:
            raise LaunchError("bad-number", f"{asked!r} ranks were asked for.", fix="give a whole number from 1 on")
        if gpus and asked > len(gpus):
            raise LaunchError(
                "more-ranks-than-gpus",
                f"{asked} ranks were asked for, but this machine shows {len(gpus)}: {', '.join(gpus)}.",
                why="two ranks on one GPU share its memory and speed, and NCCL refuses them",
                fix=f"ask for {len(gpus)} or fewer; or for CPU ranks: device: cpu in a recipe, --cpu for a script, "
                "CUDA_VISIBLE_DEVICES= in the environment elsewhere",
            )
        return asked, "as asked"
    if gpus:
        return len(gpus), f"all GPUs: {', '.join(gpus)}"
    where = "device: cpu" if str(device) == "cpu" else "no GPU here"
    return on_cpu, where


def _gpus(device: str | int | None) -> list[str]:
    """The GPUs that ranks may use, none where the CPU was asked for. Counting them does not open the driver."""
    if str(device) == "cpu":
        return []
    from paceline.runtime.device import gpu_names

    return gpu_names()
