from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import LaunchError
from paceline.run import jsonl
from paceline.run.jsonl import JsonlWriter, RecordStream, truncate_after


def lines(path: Path) -> list[Any]:
    return [json.loads(line, parse_constant=lambda word: f"not JSON: {word}") for line in path.read_text().splitlines()]


def test_a_record_is_a_line_that_is_there_before_the_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = JsonlWriter(tmp_path / "metrics.jsonl")
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    file.append([{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}])
    assert lines(file.path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
    file.append([{"step": 3, "name": "é"}])
    assert len(lines(file.path)) == 2  # held: the last write was just now
    now[0] += 0.2
    file.append([{'odd "% name': 4}])
    assert lines(file.path)[2:] == [{"step": 3, "name": "é"}, {'odd "% name': 4}]
    file.append([{"step": 5}])
    file.close()
    assert lines(file.path)[4:] == [{"step": 5}]


def test_nonfinite_numbers_become_null(tmp_path: Path) -> None:
    file = JsonlWriter(tmp_path / "metrics.jsonl")
    file.append([{"loss": float("nan"), "parts": {"a": float("inf"), "b": [1.0, float("-inf")]}}, {"loss": 1.0}])
    file.close()
    assert lines(file.path) == [{"loss": None, "parts": {"a": None, "b": [1.0, None]}}, {"loss": 1.0}]


def test_a_second_run_appends_to_the_same_file(tmp_path: Path) -> None:
    for step in (1, 2):
        file = JsonlWriter(tmp_path / "metrics.jsonl")
        file.append([{"step": step}])
        file.close()
        file.close()
    file.append([{"step": 3}])
    file.close()
    assert lines(file.path) == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_the_half_line_of_a_killed_writer_spoils_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    file = JsonlWriter(path)
    file.append([{"step": 3}])
    file.close()
    first, torn, third = path.read_text().splitlines()
    assert (json.loads(first), torn, json.loads(third)) == ({"step": 1}, '{"step": 2, "lo', {"step": 3})


def test_what_came_after_a_step_is_forgotten_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    kept = ['{"step": 1}', '{"step": 2}', '{"evaluation": true, "step": 2}']
    later = ['{"step": 3}', '{"evaluation": true, "step": 4}']
    path.write_text("\n".join([*kept[:2], later[0], '{"torn', kept[2], later[1], '{"step": 4, "lo']))
    assert truncate_after(path, 2) == 2
    assert path.read_text().splitlines() == kept
    assert truncate_after(path, 2) == 0
    assert truncate_after(path, 0) == 3
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"] and path.read_text() == ""


def test_without_a_metrics_file_there_is_nothing_to_forget(tmp_path: Path) -> None:
    assert truncate_after(tmp_path / "metrics.jsonl", 2) == 0
    assert list(tmp_path.iterdir()) == []


def test_records_stay_in_memory_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = JsonlWriter(tmp_path / "metrics.jsonl")
    file.append([{"step": 1}])
    write = os.write

    def full(descriptor: int, content: bytes) -> int:
        write(descriptor, content[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(os, "write", full)
        file.append([{"step": 2}])
        with pytest.raises(LaunchError, match="No space left") as caught:
            file.flush()
    assert caught.value.code == "launch.run-folder" and lines(file.path) == [{"step": 1}]
    file.close()
    assert lines(file.path) == [{"step": 1}, {"step": 2}]


def test_a_deleted_file_is_written_again_and_a_replaced_one_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "r" / "metrics.jsonl"
    path.parent.mkdir()
    lost: list[bool] = []
    file = JsonlWriter(path, lambda: lost.append(True))
    file.append([{"step": 1}])
    shutil.rmtree(path.parent)
    file.append([{"step": 2}])
    file.flush()
    assert lines(path) == [{"step": 1}, {"step": 2}] and lost == [True]
    (tmp_path / "edited").write_text('{"step": 2}\n')
    (tmp_path / "edited").replace(path)
    file.append([{"step": 3}])
    file.close()
    assert lines(path) == [{"step": 2}, {"step": 3}] and lost == [True]


def read(path: Path, content: bytes, last_bytes: int = 1 << 31) -> tuple[list[object], RecordStream]:
    path.write_bytes(content)
    stream = RecordStream(path, last_bytes)
    found = [record["a"] for records in stream for record in records]
    return [*found, *(record["a"] for record in stream.rest())], stream


def test_unreadable_lines_are_counted(tmp_path: Path) -> None:
    lines = [b'{"a": 1}', b'{"a": [2', b"3]}", b"", b"[1]", b"1,2", b"\xff", b"[" * 100_000, b'{"a": NaN, "a": 4}']
    found, stream = read(tmp_path / "x", b"\n".join(lines) + b'\n{"a": 5, "tru')
    assert found == [1, 4] and stream.unreadable == 7


def test_long_lines_are_skipped_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_PIECE", 64)
    monkeypatch.setattr(jsonl, "_MAX_LINE", 100)
    long = json.dumps({"a": "x" * 1000}).encode()
    found, stream = read(tmp_path / "x", b'{"a": 1}\n' + long + b'\n{"a": 2}\n' + long)
    assert found == [1, 2] and stream.unreadable == 2


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_lines_may_be_cut_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(jsonl, "_PIECE", piece)
    content = "".join(f'{{"a": "é{n}"}}\n' for n in range(20)).encode()
    found, stream = read(tmp_path / "x", content)
    assert found == [f"é{n}" for n in range(20)] and stream.unreadable == 0


def test_only_the_end_of_a_file_is_read(tmp_path: Path) -> None:
    content = "".join(f'{{"a": {n}}}\n' for n in range(100)).encode()
    found, stream = read(tmp_path / "x", content, last_bytes=30)
    assert found == [98, 99] and stream.unreadable == 0 and stream.skipped_bytes == len(content) - 30


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"a": 1}\n')
    (tmp_path / "x").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic link"):
        list(RecordStream(tmp_path / "x"))


def test_a_second_iteration_yields_what_was_appended(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b'{"a": 1}\n{"a": ')
    stream = RecordStream(path)
    assert list(stream) == [[{"a": 1}]]
    with path.open("ab") as file:
        file.write(b'2}\n{"a": 3}\n')
    assert list(stream) == [[{"a": 2}, {"a": 3}]] and list(stream) == [] and not stream.was_replaced()


def test_a_file_that_was_replaced_or_shortened_is_noticed(tmp_path: Path) -> None:
    path, other = tmp_path / "x", tmp_path / "y"
    path.write_bytes(b'{"a": 1}\n' * 3)
    stream = RecordStream(path)
    list(stream)
    other.write_bytes(b'{"a": 1}\n' * 9)
    other.replace(path)
    assert stream.was_replaced()
    again = RecordStream(path)
    list(again)
    path.write_bytes(b'{"a": 1}\n')
    assert again.was_replaced()
    path.unlink()
    assert again.was_replaced()
