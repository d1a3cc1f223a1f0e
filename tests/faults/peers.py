"""The same tensors saved and loaded by paceline, by torch.distributed.checkpoint and by torch.save."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from faults import saves
from paceline.checkpoint.local_store import LocalStore
from paceline.checkpoint.reader import verified

Content = dict[str, Tensor]
FAILURES = (Exception, CheckpointException)  # torch's is no Exception


class Peer(Protocol):
    name: str

    def save(self, folder: Path, content: Content) -> None:
        """Over what is there, in the way that the library offers for it."""

    def load(self, folder: Path, like: Content) -> Content:
        """`like` has the names, shapes and dtypes."""


@dataclass(frozen=True)
class Paceline:
    name: str = "paceline"

    def save(self, folder: Path, content: Content) -> None:
        saves.save(folder, 1, content, overwrite=True)

    def load(self, folder: Path, like: Content) -> Content:
        return saves.read_full(next(verified(LocalStore(folder))), "")


@dataclass(frozen=True)
class DCP:
    name: str = "torch DCP"

    def save(self, folder: Path, content: Content) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            dcp.save(content, checkpoint_id=folder / "checkpoint", no_dist=True)

    def load(self, folder: Path, like: Content) -> Content:
        # A value that no load would bring, so that what was not read shows.
        content = {name: torch.full_like(tensor, 77) for name, tensor in like.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(content, checkpoint_id=folder / "checkpoint", no_dist=True)
        return content


@dataclass(frozen=True)
class TorchSave:
    name: str = "torch.save"

    def save(self, folder: Path, content: Content) -> None:
        folder.mkdir(exist_ok=True)
        torch.save(content, folder / "state.pt")

    def load(self, folder: Path, like: Content) -> Content:
        loaded: Content = torch.load(folder / "state.pt", weights_only=True)
        return loaded


PEERS: tuple[Peer, ...] = (Paceline(), DCP(), TorchSave())
