"""The page of a rank: whole or not there, whatever happens to its file."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from paceline.run import rank_page
from paceline.run.folder import RunFolder
from paceline.run.rank_page import RankPageWriter, read_pages

COPY = 1 << 14


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "logs").mkdir()
    return RunFolder(tmp_path)


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
    writer.close()
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
    assert rank_page._unpack_ranks(rank_page.pack_ranks(ranks)) == ranks
