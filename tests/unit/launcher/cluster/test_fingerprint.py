"""What must be the same on every node."""

from __future__ import annotations

from pathlib import Path

from paceline.launcher.cluster.fingerprint import differences, fingerprint


def test_code_is_the_script_and_the_modules_next_to_it(tmp_path: Path) -> None:
    for name in ("train.py", "parts/model.py", ".git/hook.py", "env/lib/x.py", "runs/a/copy.py", "data.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    found = fingerprint(script=tmp_path / "train.py", recipe={"launch": {"node_rank": 1}, "model": {"width": 8}})
    assert sorted(found["code"]) == ["parts/model.py", "train.py"]
    assert found["recipe"] == {"model.width": "8"}  # launch: says where a node is, not what it trains


def test_a_changed_file_and_a_changed_key_are_differences(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("a = 1")
    before = fingerprint(script=script, recipe={"batch": 16})
    assert differences(before, fingerprint(script=script, recipe={"batch": 16})) == []
    script.write_text("a = 2")
    after = fingerprint(script=script, recipe={"batch": 32})
    assert differences(before, after) == ["code: train.py differs", "recipe: batch is 16 and 32"]


def test_long_values_are_shortened() -> None:
    (found,) = differences({"recipe": {"name": "a" * 100}}, {"recipe": {"name": "b"}})
    assert found == f"recipe: name is {'a' * 59}… and b"
