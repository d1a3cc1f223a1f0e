"""`paceline bench step` and `paceline bench scaling`, as a person types them."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml

import forked
from watched import charts_in

RECIPE = {
    "model": {"name": "mlp", "inputs": 64, "width": 32},
    "data": {"name": "shapes", "size": 8, "channels": 1, "length": 256},
    "batch": 16,
    "device": "cpu",
    "schedule": {"name": "plateau"},  # would need evaluations
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    return tmp_path


def bench(folder: Path, *words: str) -> CompletedProcess[str]:
    return forked.paceline("bench", *words, cwd=folder)


def test_scaling_measures_each_number_of_ranks_and_compares_with_the_last_time(folder: Path) -> None:
    done = bench(
        folder, "scaling", "tiny.yaml", "--ranks", "1,2,64", "--mode", "strong", "--steps", "4", "--html", "a.html"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "failed: 64 ranks (strong): [config.batch-smaller-than-ranks]" in done.stdout
    [chart] = charts_in((folder / "a.html").read_text()).values()
    assert [each["name"] for each in chart["series"]][:2] == ["measured", "ideal"]
    [stored] = folder.glob("runs/bench/scaling-tiny-*/*.json")
    one, two, many = json.loads(stored.read_text())["entries"]
    assert (one["ranks"], two["ranks"], many["ranks"]) == (1, 2, 64)
    assert one["samples_per_second"] == pytest.approx(16 / one["step"])
    assert one["predicted"] is None and two["predicted"] > 0 and 0 <= two["hidden"] <= 1
    assert two["communication"] > 0 and two["memory"] > 1 << 20

    again = bench(folder, "scaling", "tiny.yaml", "--ranks", "1", "--mode", "strong", "--steps", "3", "--json", "-")
    assert again.returncode == 0, again.stderr
    assert [entry["ranks"] for entry in json.loads(again.stdout)["entries"]] == [1]
    assert not list(folder.glob("runs/bench/.*"))


def test_step_shows_parts_that_add_up_to_the_step(folder: Path) -> None:
    done = bench(folder, "step", "tiny.yaml", "-n", "2", "--steps", "5", "--json", "step.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "step.json").read_text())
    parts = sum(part["median"] for part in found["parts"].values())
    assert parts + found["residue"] == pytest.approx(found["step"])
    names = ["data", "forward", "backward", "communication", "optimizer", "logging", "other"]
    assert list(found["parts"]) == names
    assert min(found["parts"][name]["median"] for name in names[1:5]) > 0
    words = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]  # a long title takes two lines
    assert words[words.index("data") :][:9] == [*names, "residue", "step"]
    assert not list(folder.glob("runs/tiny*"))


def test_a_layout_that_excludes_sync_is_refused_before_ranks_start(folder: Path) -> None:
    done = bench(folder, "step", "tiny.yaml", "-n", "2", "strategy=fsdp", "sync=int8")
    assert done.returncode == 2 and done.stderr.startswith("[layout.compress-and-layout]"), done.stderr


@pytest.mark.parametrize("ranks", ["0", "1,x", "", "2,-1"])
def test_invalid_numbers_of_ranks_are_named(folder: Path, ranks: str) -> None:
    done = bench(folder, "scaling", "tiny.yaml", "--ranks", ranks)
    assert done.returncode == 2 and f"[launch.bad-number] Invalid value for --ranks: {ranks!r}." in done.stderr
