"""The figures that `make bench-compare` records, and the program that measures them. No test here depends on a time."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROGRAMS = ("compare_commits.py", "key_figures.py", "import_time.py", "verdict.py")


@pytest.fixture
def key_figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import key_figures

    return key_figures


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import verdict

    return verdict


QUIET = [200.0, 201, 199, 202, 200, 198, 203, 201, 200]
LOADED = [200.0, 390, 210, 260, 480, 205, 230, 310, 220]


def test_a_time_that_moved_in_every_round_is_reported_with_its_direction(verdict: Any) -> None:
    for times in (QUIET, LOADED):  # both sides of a round see the same load
        assert verdict.verdict(times, [1.05 * each for each in times], "µs") == "slower"
        assert verdict.verdict([1.05 * each for each in times], times, "µs") == "faster"


def test_noise_is_not_reported(verdict: Any) -> None:
    assert verdict.verdict(QUIET, QUIET[::-1], "µs") == "-"
    assert verdict.verdict(QUIET, LOADED, "µs") == "-"  # two rounds are equal or faster
    assert verdict.verdict(QUIET, [1.015 * each for each in QUIET], "µs") == "-"  # too little
    assert verdict.verdict(LOADED, [1.3 * each for each in LOADED[:-2]] + LOADED[-2:], "µs") == "-"


def test_few_rounds_decide_nothing_about_times(verdict: Any) -> None:
    assert verdict.NEEDED == 9
    assert verdict.verdict(QUIET[:8], [2 * each for each in QUIET[:8]], "µs") == "?"


def test_a_figure_around_zero_is_compared_by_differences(verdict: Any) -> None:
    noise = [-2.0, 1, 0, 3, -1, 2, 0, -3, 1]
    assert verdict.verdict(noise, [each + 5 for each in noise], "µs", 3.0) == "slower"
    assert verdict.verdict(noise, [each + 2 for each in noise], "µs", 3.0) == "-"
    assert verdict.verdict(noise, [each - 5 for each in noise], "µs", 3.0) == "faster"


def test_a_count_that_changed_is_reported_after_any_number_of_rounds(verdict: Any) -> None:
    assert verdict.verdict([89.0], [90.0], "calls") == "more"
    assert verdict.verdict([89.0, 89.0], [88.0, 88.0], "calls") == "fewer"
    assert verdict.verdict([89.0, 89.0, 97.5], [90.0, 90.0, 90.0], "calls") == "more"  # one round was disturbed
    assert verdict.verdict([81.02], [81.34], "calls") == "-"  # ranks were polled in between


def test_probabilities_are_those_of_the_signed_rank_test(verdict: Any) -> None:
    assert verdict.signed_rank_p([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 2 / 512
    assert verdict.signed_rank_p([-1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4 / 512
    assert verdict.signed_rank_p([-1, 2, -3, 4]) == 14 / 16
    assert verdict.signed_rank_p([1, 1, -1, 1]) == 10 / 16  # ties share a rank
    assert verdict.signed_rank_p([0, 0]) == 1


@pytest.mark.parametrize(
    ("of", "limit", "ours", "figure", "is_met"),
    [
        ("difference", 10, [212, 209], "+9 µs (+10)", True),
        ("difference", 8, [212, 209], "+9 µs (+10)", False),
        ("time", 1.03, [202, 230], "1.01 × (1.08)", True),
        ("speed", 1.6, [130, 125], "1.60 × (1.57)", True),
        ("speed", 1.7, [130, 125], "1.60 × (1.57)", False),
    ],
)
def test_a_bound_is_judged_by_the_fastest_rounds(
    monkeypatch: pytest.MonkeyPatch, of: str, limit: float, ours: list[float], figure: str, is_met: bool
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from cost_table import Bound

    result = Bound(limit, of).judge([201, 200], ours)
    assert (result.figure, result.is_met) == (figure, is_met)


def rows_of(history: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in history.read_text().splitlines()]


@pytest.mark.nightly
def test_every_figure_is_measured_through_the_public_api(key_figures: ModuleType) -> None:
    loop = key_figures.loop(rounds=1, steps=5)
    data, optimizer = key_figures.data(rounds=1, steps=5), key_figures.optimizer(rounds=1, steps=5)
    on_ranks = key_figures.ddp(rounds=1, steps=5)
    checkpoint = key_figures.checkpoint(saves=2, layers=1, width=8, rows=2)
    figures = {*loop, *data, *optimizer, *on_ranks, *checkpoint, *key_figures.imports(rounds=1)}
    assert figures == {figure for figure in key_figures.UNITS if "launch" not in figure and "GPU" not in figure}
    assert loop["step time"] > 0 and 0 < loop["Python calls per step"] < 500


def test_the_history_has_one_object_per_line_with_the_same_fields(key_figures: ModuleType) -> None:
    rows = rows_of(BENCHMARKS / "history.jsonl")
    assert rows
    for row in rows:
        assert list(row) == ["commit", "date", "machine", "figure", "value", "unit"], row
        assert re.fullmatch(r"[0-9a-f]{40}", str(row["commit"])) and re.fullmatch(r"\d{4}-\d\d-\d\d", str(row["date"]))
        assert isinstance(row["value"], float) and row["unit"] == key_figures.UNITS[row["figure"]], row


class Checkout:
    """A git repository with the programs and a paceline that consists of its imports."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "benchmarks").mkdir()
        for program in PROGRAMS:
            shutil.copy(BENCHMARKS / program, root / "benchmarks")
        self.git("init", "--quiet")

    def git(self, *args: str) -> str:
        who = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
        return subprocess.run(
            ["git", *who, *args], cwd=self.root, capture_output=True, text=True, check=True
        ).stdout.strip()

    def write(self, source: str) -> None:
        (self.root / "src" / "paceline").mkdir(parents=True, exist_ok=True)
        (self.root / "src" / "paceline" / "__init__.py").write_text(source)

    def commit(self, source: str) -> str:
        self.write(source)
        self.git("add", "src")
        self.git("commit", "--quiet", "--message", "A commit")
        return self.git("rev-parse", "HEAD")

    def compare(self, *args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "benchmarks/compare_commits.py", "--only", "import", "--rounds", "1", *args]
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True, timeout=60)


def test_two_commits_are_measured_and_recorded_side_by_side(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    old = checkout.commit("import csv, decimal, wave")
    new = checkout.commit("import wave")
    done = checkout.compare("--record")
    assert done.returncode == 0, done.stderr
    rows = [row for row in rows_of(tmp_path / "benchmarks" / "history.jsonl") if row["figure"] == "imported modules"]
    assert [row["commit"] for row in rows] == [old, new]
    before, after = (row["value"] for row in rows)
    assert isinstance(before, float) and isinstance(after, float) and 1 <= after < before
    assert f"| imported modules | {before:.4g} | {after:.4g} | modules | {after / before:.3f} |" in done.stdout
    assert checkout.git("worktree", "list").count("\n") == 0  # the temporary one is removed


def test_a_check_fails_if_a_figure_got_worse(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.commit("import wave")
    checkout.commit("import csv, decimal, wave")
    done = checkout.compare("--check")
    assert done.returncode == 1 and "Worse than HEAD~1: imported modules." in done.stderr
    assert re.search(r"^\| imported modules .* \| more \|$", done.stdout, re.MULTILINE), done.stdout
    assert checkout.compare("HEAD", "--check").returncode == 0


def test_uncommitted_changes_are_measured_but_not_recorded(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.commit("import wave")
    checkout.write("import csv, decimal, wave")
    assert checkout.compare("HEAD", "--record").returncode == 2
    assert not (tmp_path / "benchmarks" / "history.jsonl").exists()
    done = checkout.compare("HEAD")
    assert done.returncode == 0 and "| working tree |" in done.stdout, done.stderr


def test_a_base_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.commit("import wave")
    done = checkout.compare("no-such-commit")
    assert done.returncode == 1 and "no-such-commit" in done.stderr and "Traceback" not in done.stderr
