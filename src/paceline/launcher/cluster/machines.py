"""What ssh, SLURM and Ray have in common: machines on which a launcher can be started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class NodeBackend(Protocol):
    """Each runs one `paceline node`, a launcher that reads its order from standard input, and takes the end of that
    as the end of the job."""

    names: Sequence[str]  # of the nodes, for people

    def start(self, node: int, order: bytes) -> None:
        """Begin, or begin again, that node's launcher. `order` is one line."""

    def ended(self) -> dict[int, str]:
        """Nodes whose launcher is gone, with its last words for people; each is told once."""

    def stop(self) -> None:
        """End what runs; nothing stays behind."""
