"""Paths from a clone to a first run: the README alone, and a wheel. `make test-all` takes them; `make test` checks what
they consist of: commands that the blocks of the README run, and files that a wheel has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parents[2]
SMALL = ["model.layers=1", "model.width=16", "model.context=16", "data.context=16", "data.size=20000", "batch=8"]


def run(*command: str, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_a_newcomer_gets_from_a_clone_to_two_ranks_with_the_readme_alone(tmp_path: Path) -> None:
    said = run(
        "sh", str(ROOT / "tools" / "newcomer.sh"), cwd=tmp_path, ENVIRONMENT=str(Path(sys.executable).parents[1])
    )
    assert "script" in said and "finished" in said and "accuracy" in said


@pytest.mark.nightly
def test_a_wheel_holds_all_that_commands_need(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT), cwd=tmp_path)
    (wheel,) = tmp_path.glob("paceline-*.whl")
    with zipfile.ZipFile(wheel) as content:
        files = {name.removeprefix("paceline/") for name in content.namelist() if name.startswith("paceline/")}
    source = ROOT / "src" / "paceline"
    wanted = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert wanted - files == set() and not [name for name in files if name.startswith("tests")]
    run(*pip, "install", "--no-deps", "--target", str(tmp_path / "installed"), str(wheel), cwd=tmp_path)
    command = [sys.executable, "-m", "paceline"]
    where = {"PYTHONPATH": str(tmp_path / "installed")}
    place = "import paceline; print(paceline.__file__)"
    assert str(tmp_path / "installed") in run(sys.executable, "-c", place, cwd=tmp_path, **where)
    assert run(*command, "--version", cwd=tmp_path, **where).strip() == paceline.__version__
    said = run(*command, "train", *SMALL, "train.max_steps=2", "report=true", "run=first", cwd=tmp_path, **where)
    assert "final loss" in said and (tmp_path / "runs" / "first" / "report.html").exists()
    assert "launch.no-script" in run(*command, "explain", "launch.no-script", cwd=tmp_path, **where)


def test_every_command_of_a_newcomer_is_one_of_the_readme() -> None:
    """test_blocks.py runs those, in their order."""
    taken = re.findall(r"^paceline .+", (ROOT / "tools" / "newcomer.sh").read_text(), re.M)
    readme = re.sub(r" {2,}#.*", "", (ROOT / "README.md").read_text())
    assert len(taken) >= 4
    places = [re.search(rf"^{re.escape(command)}$", readme, re.M) for command in taken]
    assert [command for command, place in zip(taken, places, strict=True) if place is None] == []
    assert sorted(place.start() for place in places if place) == [place.start() for place in places if place]
    assert "<!-- file: script.py -->\n```python\n" in readme


def test_git_ignores_no_file_of_the_package() -> None:
    """A wheel has all files of src/paceline but those."""
    ignored = run("git", "ls-files", "--others", "--ignored", "--exclude-standard", "src/paceline", cwd=ROOT)
    assert [name for name in ignored.splitlines() if not name.endswith(".pyc")] == []
