"""Agreement of all ranks, or of those of a replica, over the store of the process group.

For a rank that is about to leave the common sequence of collectives: the others may already wait for it in a
collective of that sequence, so it can't ask them with another one.
"""

from __future__ import annotations

import hashlib
import secrets
import time

import torch.distributed as torch_dist

from paceline.runtime import collectives, whereabouts

_POLLS_AT_FIRST, _SHORT, _LONG = 50, 0.0002, 0.005
_LOOK_EVERY, _LOOKS = 200, 4  # polls; looks in a row with the same result, because a post may be old


class Agreement:
    """Collective: must be created on every rank. `part`: the ranks that agree, and a name for them; default: all."""

    def __init__(self, timeout: float, part: tuple[int, str] | None = None) -> None:
        self._seconds = timeout / 2  # before a collective that waits for this rank times out
        self.ranks, name = part or (collectives.world(), "")
        # Separates this training from others.
        self._name = f"{collectives.broadcast_object(secrets.token_hex(4))}{name}"
        self._number = 0

    def reached_by(self, value: str) -> int:
        """Wait until each of the ranks has passed the same value. Returns the number of ranks that did in time."""
        # There is no public way to it, and the user may have initialized the group.
        store = torch_dist.distributed_c10d._get_default_store()
        key = f"paceline/{self._name}/{self._number}/{hashlib.sha256(value.encode()).hexdigest()[:16]}"
        self._number += 1
        deadline, polls, looks = time.monotonic() + self._seconds, 0, 0
        try:
            if store.add(key, 1) == self.ranks:
                store.set(f"{key}/all", "")
                return self.ranks
            # A blocking wait would hold the lock of the store's client, which background threads use as well.
            while not store.check([f"{key}/all"]):
                polls += 1
                if polls % _LOOK_EVERY == 0:
                    looks = looks + 1 if _all_others_wait() else 0
                if looks == _LOOKS or time.monotonic() > deadline:
                    return int(store.add(key, -1)) + 1  # for ranks that come later, this one has left
                time.sleep(_SHORT if polls < _POLLS_AT_FIRST else _LONG)
        except RuntimeError:  # the rank that hosts the store has exited
            return 0
        return self.ranks


def _all_others_wait() -> bool:
    """Whether every other rank waits: as this one does as well, nobody will ever continue."""
    board = whereabouts.board()
    others = (board.read(rank) for rank in range(board.world) if rank != board.rank)
    return all(post and (post.waits or post.ended) for post in others)
