"""Folders that several starts want, that are cleared, or that are moved: nobody loses anything."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

import ledgers
from paceline.run import failed_start
from paceline.run.folder import RunFolder

ROUNDS, STARTS = 100, 3


def failed_launch(path: Path, *events: str) -> RunFolder:
    """A start of a launcher, which failed after these events."""
    names = ("launched", *events, "ended")
    (path / "logs").mkdir(parents=True)
    folder = ledgers.written(path, *((1.0 + at, name, {"status": 1}) for at, name in enumerate(names)))
    folder.rank_log(0).write_text("output")
    return folder


def claim_all(root: Path, barrier: Any, claimed: Any) -> None:
    found = []
    for number in range(ROUNDS):
        barrier.wait()
        found.append(RunFolder.create(str(root / str(number))).path.name)
    claimed.put(found)


@pytest.mark.parametrize("before", ["nothing", "an empty folder", "a failed start"])
def test_of_starts_at_the_same_time_each_gets_a_folder_of_its_own(tmp_path: Path, before: str) -> None:
    for number in range(ROUNDS if before != "nothing" else 0):
        path = tmp_path / str(number)
        path.mkdir() if before == "an empty folder" else failed_launch(path)
    fork = multiprocessing.get_context("fork")
    barrier, claimed = fork.Barrier(STARTS), fork.Queue()
    starts = [fork.Process(target=claim_all, args=(tmp_path, barrier, claimed)) for _ in range(STARTS)]
    for start in starts:
        start.start()
    by_start = [claimed.get() for _ in starts]
    for start in starts:
        start.join()
    for names in zip(*by_start, strict=True):
        assert len(set(names)) == STARTS


FOREIGN = ("logs/samples.txt", "logs/deep/weights.pt", "tensorboard/mine.txt", "images/mine.gif", "profile/mine.json")
OF_A_SCRIPT = ("metrics.csv", "config.yaml", "tensorboard/events.out.tfevents.1.host", "images/00000001-a-00000000.png")


@pytest.mark.parametrize("file", [*FOREIGN, *OF_A_SCRIPT])
@pytest.mark.parametrize("has_trainer", [True, False])
def test_a_failed_start_with_files_of_others_is_not_cleared(tmp_path: Path, file: str, has_trainer: bool) -> None:
    folder = failed_launch(tmp_path / "a", *(["joined", "opened"] if has_trainer else []))
    path = folder.path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    is_ours = has_trainer and file in OF_A_SCRIPT
    assert failed_start.cleared(folder) is is_ours and path.exists() is not is_ours


def test_a_launch_folder_that_cannot_be_moved_stays_as_it_is(tmp_path: Path) -> None:
    launch, run = failed_launch(tmp_path / "launch"), failed_launch(tmp_path / "run")
    before = run.ledger.read_text()
    (run.path / ".launch" / "kept").mkdir(parents=True)  # where it goes first
    with pytest.raises(OSError):
        launch.move_to(run)
    assert launch.is_unclaimed and launch.rank_log(0).read_text() == "output" and run.ledger.read_text() == before
    assert run.rank_log(0).exists()


@pytest.mark.parametrize("opened, is_cleared", [((), False), (("opened",), True)])
def test_what_a_trainer_without_a_run_printed_in_an_hour_is_kept(
    tmp_path: Path, opened: tuple[str, ...], is_cleared: bool
) -> None:
    folder = failed_launch(tmp_path / "a", "joined", *opened)
    ledgers.written(folder.path, (4000.0, "ended", {"status": 1}))
    assert failed_start.cleared(folder) is is_cleared
