"""Records of the last steps, when ranks may no longer make collective calls: after an error, or when a process ends.

Every rank publishes its losses in the store of the process group, and rank 0 waits briefly for those of the others. A
killed rank can't publish any.
"""

from __future__ import annotations

import json
import time
from itertools import count
from typing import Any

import torch.distributed as torch_dist

from paceline.runtime import collectives, environment

SECONDS = 2.0  # that rank 0 waits for the others, which fail as soon as they notice that one did
_POLL_SECONDS = 0.01
_names = count()


class LastExchange:
    """One exchange. Must be created on all ranks in the same order."""

    def __init__(self) -> None:
        self._is_done = False
        self._name = f"paceline/last-records/{environment.restart_count()}/{next(_names)}"

    def exchange(self, mine: dict[str, Any], *, wait: bool) -> list[dict[str, Any]] | None:
        """On rank 0, if `wait`: the values of all ranks, or None if they do not arrive. Elsewhere None."""
        rank, ranks = collectives.rank(), collectives.world()
        if ranks == 1:
            return [mine]
        if self._is_done:  # other ranks may still read what was published first
            return None
        self._is_done = True
        try:
            store = torch_dist.distributed_c10d._get_default_store()  # there is no public way to it
            keys = [f"{self._name}/{each}" for each in range(ranks)]
            store.set(keys[rank], json.dumps(mine))
            if rank or not wait:
                return None
            deadline = time.monotonic() + SECONDS
            while not store.check(keys):
                if time.monotonic() > deadline:
                    return None
                time.sleep(_POLL_SECONDS)
            return [json.loads(store.get(key)) for key in keys]
        except (RuntimeError, ValueError):  # without a process group any more, or without its store
            return None
