"""Files of JSON lines, whatever they contain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.watch import record_stream
from paceline.watch.record_stream import RecordStream


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
    monkeypatch.setattr(record_stream, "_PIECE", 64)
    monkeypatch.setattr(record_stream, "_MAX_LINE", 100)
    long = json.dumps({"a": "x" * 1000}).encode()
    found, stream = read(tmp_path / "x", b'{"a": 1}\n' + long + b'\n{"a": 2}\n' + long)
    assert found == [1, 2] and stream.unreadable == 2


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_lines_may_be_cut_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(record_stream, "_PIECE", piece)
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
