"""`paceline node`: the launcher of one machine, started by a front end on another one. Not for people.

Its order is one line of JSON on standard input (launcher/cluster/orders.py). Then standard input stays open; its
end means that the front end is gone.
"""

from __future__ import annotations

import os

from paceline.cli import workloads


def node() -> None:
    """The launcher of one machine, started by a front end."""
    from paceline.config.recipe import Config
    from paceline.errors import LaunchError
    from paceline.launcher.cluster import orders
    from paceline.launcher.cluster.manual import COORDINATOR_LOST
    from paceline.launcher.cluster.node import Node
    from paceline.launcher.local.rank_env import prepare_environment
    from paceline.launcher.rank_count import choose_ranks

    order = orders.read(0)
    _enter(order.folder)
    spec = order.spec
    prepare_environment(spec)
    if order.target is not None:
        order.target.check()
        workload = workloads.script_workload(order.target)
    else:
        workload = workloads.recipe_workload(Config.model_validate(order.recipe))
    ranks, _ = choose_ranks(spec.ranks, device=spec.device, on_cpu=spec.default_cpu_ranks)
    # Ranks have nobody at a keyboard; who gave the order is still listened to.
    source = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # Now, because nobody would hear of this launcher while it imports torch.
    import paceline.launcher.local.agent  # noqa: F401

    workload.preload()
    launcher = Node(workload, spec, ranks, orders.reachable(order), order.token, number=order.node, orders=source)
    try:
        raise SystemExit(launcher.run())
    except LaunchError as error:
        if error.code != "launch.coordinator-lost":
            raise
        raise SystemExit(COORDINATOR_LOST) from None


def _enter(folder: str) -> None:
    import socket

    from paceline.errors import LaunchError

    try:
        os.chdir(folder)
    except OSError as error:
        raise LaunchError(
            "no-folder",
            f"The working folder {folder} can't be entered on {socket.gethostname()}: {error.strerror}.",
            why="ranks work in the same folder on every machine",
            fix="start from a folder that all machines share, or that has the same path and files on each",
        ) from None
