from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.nn.functional import cross_entropy

import tiny
from paceline.run import heartbeat
from paceline.run.heartbeat import Heartbeat, Suspects
from paceline.runtime import environment


def variables(folder: Path, rank: int = 0) -> dict[str, str]:
    return {heartbeat.FOLDER: str(folder), **environment.variables(environment.RankInfo(rank, 4, rank, 4))}


def test_pages_tell_who_is_doing_what_since_when(tmp_path: Path) -> None:
    before = time.time()
    heartbeat.open_page(variables(tmp_path, 0)).at(12)
    heartbeat.open_page(variables(tmp_path, 3)).enter("rendezvous")
    pages = heartbeat.read(tmp_path)
    assert {rank: page[:2] for rank, page in pages.items()} == {0: ("training", 12), 3: ("rendezvous", 0)}
    assert all(before <= page.time <= time.time() for page in pages.values())


def test_a_phase_ends_with_its_block_also_after_an_error(tmp_path: Path) -> None:
    page = heartbeat.open_page(variables(tmp_path))
    page.at(7)
    with pytest.raises(ValueError), page.during("saving"):
        assert heartbeat.read(tmp_path)[0][:2] == ("saving", 7)
        raise ValueError
    assert heartbeat.read(tmp_path)[0][:2] == ("training", 7)


def test_a_killed_rank_leaves_its_last_words(tmp_path: Path) -> None:
    process = os.fork()
    if not process:
        heartbeat.open_page(variables(tmp_path, 1)).at(1234)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(process, 0)
    assert heartbeat.read(tmp_path)[1][:2] == ("training", 1234)


def test_without_a_launcher_or_where_nothing_can_be_written_a_rank_goes_on(tmp_path: Path) -> None:
    heartbeat.open_page({}).at(3)
    heartbeat.open_page(variables(tmp_path / "missing")).at(3)
    assert list(tmp_path.iterdir()) == [] and heartbeat.read(tmp_path / "missing") == {}


def test_what_is_no_whole_page_is_left_out(tmp_path: Path) -> None:
    heartbeat.open_page(variables(tmp_path, 0)).at(1)
    whole = (tmp_path / "progress-0").read_bytes()
    (tmp_path / "progress-1").write_bytes(whole[:39])
    (tmp_path / "progress-2").write_bytes(bytes(64))
    (tmp_path / "progress-3").write_bytes(whole[:16] + b"\xff\xff" + whole[18:])  # a phase that nobody knows
    (tmp_path / "progress-x").write_bytes(whole)
    (tmp_path / "progress-4").mkdir()
    assert list(heartbeat.read(tmp_path)) == [0]


def test_a_new_start_begins_without_the_pages_of_the_last(tmp_path: Path) -> None:
    heartbeat.open_page(variables(tmp_path, 2)).at(1)
    heartbeat.write_suspects(Suspects(2, 0, [5]), variables(tmp_path, 2))
    (tmp_path / "rank-2.log").write_text("stays")
    heartbeat.clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-2.log"]


def test_a_page_says_in_words_where_a_rank_was() -> None:
    assert str(Heartbeat("training", 12, 0.0)) == "in step 13"
    assert str(Heartbeat("saving", 12, 0.0)) == "saving after step 12"
    assert str(Heartbeat("load", 0, 0.0)) == "before training (load)"
    assert [Heartbeat(phase, 12, 0.0).trained for phase in ("first step", "training", "saving")] == [13, 13, None]


def test_suspects_come_back_whatever_their_indices_are(tmp_path: Path) -> None:
    heartbeat.write_suspects(Suspects(9, 1, [3, np.int64(4), "five", Path("six")]), variables(tmp_path, 1))
    (tmp_path / "suspects-2.json").write_text('{"step": 9, "sam')
    assert heartbeat.read_suspects(tmp_path) == {1: Suspects(9, 1, [3, 4, "five", "six"])}


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("3", 3), ("", 0), ("many", 0), ("-1", 0)])
def test_the_number_of_restarts_is_read(text: str, number: int) -> None:
    assert heartbeat.generation({heartbeat.RESTARTS: text}) == number


def test_a_training_goes_through_its_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(heartbeat.FOLDER, str(tmp_path))
    seen: list[tuple[str, int]] = []

    class Look:
        def on_start(self, start: object) -> None:
            self.look()

        def on_step(self, step: object) -> None:
            self.look()

        def look(self) -> None:
            seen.append(heartbeat.read(tmp_path)[0][:2])

    def loss(model: Any, batch: Any) -> Any:
        Look().look()
        inputs, targets = batch
        return cross_entropy(model(inputs), targets)

    trainer = tiny.classifier_trainer(loss_fn=loss, callbacks=[Look()], preflight=False)
    trainer.train(tiny.blobs(16), tiny.blobs(16), max_steps=2)
    assert seen == [
        ("load", 0), ("first step", 0), ("training", 1), ("evaluating", 1),
        ("training", 1), ("training", 2), ("evaluating", 2),
    ]  # fmt: skip
    assert heartbeat.read(tmp_path)[0][:2] == ("done", 2)
