"""`paceline node`: the launcher of one node, started by the front end of a job. Not for interactive use.

It reads its order, one line of JSON, from standard input (launcher/cluster/fingerprint.py). Standard input then stays
open; when it is closed, the front end has exited.
"""

from __future__ import annotations

import os

from paceline.cli import workloads


def node() -> None:
    """Run the launcher of one node. Started by `paceline launch` on another machine."""
    from paceline.config.recipe import Config
    from paceline.launcher.cluster import fingerprint
    from paceline.launcher.cluster.node import Node
    from paceline.launcher.local.start import prepare_environment
    from paceline.launcher.workload import choose_ranks

    order = fingerprint.read(0)
    _enter(order.folder)
    spec = order.spec
    prepare_environment(spec)
    if order.target is not None:
        order.target.check()
        workload = workloads.script_workload(order.target)
    else:
        workload = workloads.recipe_workload(Config.model_validate(order.recipe))
    ranks, _ = choose_ranks(spec.ranks, device=spec.device, on_cpu=spec.default_cpu_ranks)
    # Ranks read from /dev/null; the launcher keeps the original standard input, to notice when it is closed.
    source = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # Imported before connecting, because a launcher that imports torch sends no heartbeats.
    import paceline.launcher.local.agent  # noqa: F401

    workload.preload()
    launcher = Node(workload, spec, ranks, fingerprint.reachable(order), order.token, number=order.node, orders=source)
    raise SystemExit(launcher.run())


def _enter(folder: str) -> None:
    import socket

    from paceline.errors import LaunchError

    try:
        os.chdir(folder)
    except OSError as error:
        raise LaunchError(
            "no-folder",
            f"Cannot change to the working directory {folder} on {socket.gethostname()}: {error.strerror}.",
            why="ranks run in the same working directory on every node",
            fix="launch from a directory on a shared file system, or one that exists under the same path on every node",
        ) from None
