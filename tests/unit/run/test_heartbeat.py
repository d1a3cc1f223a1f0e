from __future__ import annotations

import os
import signal
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.nn.functional import cross_entropy

import tiny
from paceline.run import heartbeat
from paceline.run.folder import RunFolder
from paceline.run.heartbeat import Heartbeat, RankPageWriter, Suspects, read_pages
from paceline.runtime import environment


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path)
    made.logs.mkdir()
    return made


def writer(folder: RunFolder, rank: int = 0) -> heartbeat.HeartbeatWriter:
    return heartbeat.open_writer(folder.heartbeat(rank))


def test_heartbeats_have_the_phase_of_each_rank_and_its_duration(folder: RunFolder) -> None:
    before = time.time()
    writer(folder, 0).at(12)
    writer(folder, 3).enter("rendezvous")
    pages = heartbeat.read(folder)
    assert {rank: page[:2] for rank, page in pages.items()} == {0: ("training", 12), 3: ("rendezvous", 0)}
    assert all(before <= page.time <= time.time() for page in pages.values())


def test_a_phase_ends_with_its_block_also_after_an_error(folder: RunFolder) -> None:
    page = writer(folder)
    page.at(7)
    with pytest.raises(ValueError), page.during("saving"):
        assert heartbeat.read(folder)[0][:2] == ("saving", 7)
        raise ValueError
    assert heartbeat.read(folder)[0][:2] == ("training", 7)


def test_a_killed_rank_leaves_its_last_heartbeat(folder: RunFolder) -> None:
    process = os.fork()
    if not process:
        writer(folder, 1).at(1234)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(process, 0)
    assert heartbeat.read(folder)[1][:2] == ("training", 1234)


def test_without_a_path_or_a_writable_one_a_rank_runs_without_a_heartbeat(tmp_path: Path) -> None:
    missing = RunFolder(tmp_path / "missing")
    heartbeat.open_writer(None).at(3)
    writer(missing).at(3)
    assert list(tmp_path.iterdir()) == [] and heartbeat.read(missing) == {}


def test_invalid_pages_are_skipped(folder: RunFolder) -> None:
    writer(folder, 0).at(1)
    whole = folder.heartbeat(0).read_bytes()
    folder.heartbeat(1).write_bytes(whole[:39])
    folder.heartbeat(2).write_bytes(bytes(64))
    folder.heartbeat(3).write_bytes(whole[:16] + b"\xff\xff" + whole[18:])  # an unknown phase
    (folder.logs / "progress-x").write_bytes(whole)
    folder.heartbeat(4).mkdir()
    assert list(heartbeat.read(folder)) == [0]


def test_only_a_rank_that_trains_is_in_a_step() -> None:
    assert [Heartbeat(phase, 12, 0.0).trained for phase in ("first step", "training", "saving")] == [13, 13, None]


def test_suspects_are_restored_whatever_their_indices_are(folder: RunFolder) -> None:
    heartbeat.write_suspects(folder.suspects(1), Suspects(9, 1, [3, np.int64(4), "five", Path("six")]))
    folder.suspects(2).write_text('{"step": 9, "sam')
    assert heartbeat.read_suspects(folder) == {1: Suspects(9, 1, [3, 4, "five", "six"])}


def test_a_training_goes_through_its_phases(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.LOG_FOLDER, str(folder))
    seen: list[tuple[str, int]] = []

    class Look:
        def on_start(self, start: object) -> None:
            self.look()

        def on_step(self, step: object) -> None:
            self.look()

        def look(self) -> None:
            seen.append(heartbeat.read(folder)[0][:2])

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
    assert heartbeat.read(folder)[0][:2] == ("done", 2)


COPY = 1 << 14


def values(**others: Any) -> dict[str, Any]:
    group = {"name": "0", "label": "", "ranks": [[0, 4, 1]], "entered": 3, "left": 2}
    return {"time": 1.0, "pid": 7, "micros": 5, "groups": [group], "pending": [], **others}


def test_the_last_write_is_read(folder: RunFolder) -> None:
    writer = RankPageWriter(folder.page(3))
    for micros in range(5):
        writer.write(values(micros=micros))
    page = read_pages(folder)[3]
    assert (page.micros, page.pid, page.groups[0]["ranks"], page.groups[0]["left"]) == (4, 7, [0, 1, 2, 3], 2)


def test_a_write_that_was_interrupted_leaves_the_one_before(folder: RunFolder) -> None:
    writer = RankPageWriter(folder.page(0))
    writer.write(values(micros=1))
    writer.write(values(micros=2))
    with folder.page(0).open("r+b") as file:
        file.seek(COPY * 0 + 40)  # the second write is in the first copy
        file.write(b"\0\0\0\0")
    assert read_pages(folder)[0].micros == 1


def test_a_new_writer_removes_the_page_of_an_earlier_rank(folder: RunFolder) -> None:
    RankPageWriter(folder.page(0)).write(values())
    RankPageWriter(folder.page(0))
    assert read_pages(folder) == {}


@pytest.mark.parametrize(
    "content", [b"", b"x" * 10, b"y" * 40_000, struct.pack("=16sQII", b"paceline rank 1\0", 1, 9, 9)]
)
def test_foreign_files_are_skipped(folder: RunFolder, content: bytes) -> None:
    folder.page(0).write_bytes(content)
    folder.page(1).mkdir()
    os.mkfifo(folder.page(2))
    folder.page(4).symlink_to(folder.page(0))
    RankPageWriter(folder.page(3)).write(values())
    assert set(read_pages(folder)) == {3}


@pytest.mark.parametrize("place", ["missing/folder", "a-folder", "a-link"])
def test_a_page_that_cannot_be_written_is_ignored(tmp_path: Path, place: str) -> None:
    (tmp_path / "a-folder").mkdir()
    (tmp_path / "a-link").symlink_to(tmp_path / "elsewhere")
    writer = RankPageWriter(tmp_path / place)
    writer.write(values())
    assert not (tmp_path / "elsewhere").exists()


def test_what_does_not_fit_is_cut_and_said(folder: RunFolder) -> None:
    operations = [
        {"group": "0", "number": n, "name": "all_reduce", "sizes": [[n]], "dtypes": ["Float"]} for n in range(900)
    ]
    RankPageWriter(folder.page(0)).write(values(pending=operations, place="p" * 50))
    page = read_pages(folder)[0]
    assert 50 < len(page.pending) < 900
    assert page.pending[0]["number"] == 0
    assert "too many" in page.missing
    assert page.place == "p" * 50


@pytest.mark.parametrize("ranks", [[], [3], [0, 1, 2], [0, 8, 16], [5, 2, 9, 10, 11, 40], list(range(0, 4096, 2))])
def test_ranks_are_packed_without_loss(ranks: list[int]) -> None:
    assert heartbeat._unpack_ranks(heartbeat.pack_ranks(ranks)) == ranks
