"""A run folder that one rank can't see, as on a node without the shared disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
import tiny
from hiding import a_folder_to_hide, hide
from paceline import dist
from paceline.checkpoint.local_store import locate
from paceline.checkpoint.reader import verify
from paceline.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("no_waiting")


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.runtime.consistency._SECONDS_BETWEEN_ATTEMPTS", 0.0)


def _train(folder: str, hidden: bool, **settings: Any) -> Any:
    if hidden and dist.rank() == 1:
        hide(Path(folder))
    trainer = tiny.classifier_trainer(strategy="fsdp", run=f"{folder}/r", resume="auto", save_every=2, **settings)
    before = trainer.step_count
    trainer.train(tiny.blobs(), max_steps=before + 3)
    return {"before": before, "weights": list(trainer.state_dict().values())}


def test_its_part_of_a_checkpoint_is_written_and_read_through_rank_0(tmp_path: Path) -> None:
    folder = a_folder_to_hide(tmp_path)
    first = paceline.launch(_train, ranks=2, folder=str(folder), hidden=True)
    made = verify(locate(folder / "r" / "checkpoints" / "step-000003")).manifest
    assert first["before"] == 0 and list(made.files) == ["rank-0.safetensors", "rank-1.safetensors"]
    hidden = paceline.launch(_train, ranks=2, folder=str(folder), hidden=True)
    assert hidden["before"] == 3

    shared = tmp_path / "shared"
    paceline.launch(_train, ranks=2, folder=str(shared), hidden=False)
    seen = paceline.launch(_train, ranks=2, folder=str(shared), hidden=False)
    assert all(torch.equal(a, b) for a, b in zip(hidden["weights"], seen["weights"], strict=True))


def test_it_is_refused_where_the_recipe_says_so(tmp_path: Path) -> None:
    folder = a_folder_to_hide(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint.unshared-folder.*Rank 1 can't access"):
        paceline.launch(_train, ranks=2, folder=str(folder), hidden=True, checkpoint={"unshared": "refuse"})
