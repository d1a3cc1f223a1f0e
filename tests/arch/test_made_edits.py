"""The edits of test_edits.py are inserted where they say, and taken back (edits.py)."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

import edits
from edits import Change, Edit


def test_an_edit_is_inserted_at_its_anchor() -> None:
    source = dedent(
        """
        TABLE = (
            "ä",
        )
        ROW = {"a": 1}
        class Kind:
            one = 1
        def find():
            "What it finds."
            found = (2,)
            return found
        """
    )

    def into(name: str, text: str) -> dict[str, object]:
        found: dict[str, object] = {}
        exec(edits.insert(source, Edit("x.py", text, into=name)), found)
        return found

    assert into("TABLE", '"é",')["TABLE"] == ("ä", "é")
    assert into("ROW", '"b": 2,')["ROW"] == {"a": 1, "b": 2}
    assert into("Kind", "two = 2")["Kind"].two == 2  # type: ignore[attr-defined]
    assert into("find", "if True:\n    return 1")["find"]() == 1  # type: ignore[operator]
    assert into("find.found", "3,")["find"]() == (2, 3)  # type: ignore[operator]
    for nothing in ("nothing", "find.nothing"):
        with pytest.raises(LookupError):
            into(nothing, "1")


def test_a_change_leaves_the_copy_as_it_was(tmp_path: Path) -> None:
    package = tmp_path / edits.SOURCE.name
    package.mkdir()
    (package / "old.py").write_text("TABLE = []\n")
    before = (package / "old.py").stat().st_mtime_ns
    table = [Edit("old.py", f"{number},", into="TABLE") for number in (1, 2)]
    change = Change("any", (*table, Edit("new.py", "x")), use="")
    with edits.applied(change, tmp_path):
        assert (package / "new.py").exists()
        found: dict[str, object] = {}
        exec((package / "old.py").read_text(), found)
        assert found["TABLE"] == [1, 2]
    assert [path.name for path in package.iterdir()] == ["old.py"]
    assert (package / "old.py").read_text() == "TABLE = []\n" and (package / "old.py").stat().st_mtime_ns == before
