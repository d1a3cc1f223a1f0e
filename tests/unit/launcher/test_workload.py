from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import LaunchError
from paceline.launcher.workload import Target, Workload, choose_ranks
from paceline.runtime import device

WRITE = """
import json, pathlib, sys
pathlib.Path("told").write_text(json.dumps([__name__, sys.argv, sys.path[0]]))
"""


@pytest.fixture
def script(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "argv", ["paceline"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    (in_folder / "code").mkdir()
    path = in_folder / "code" / "train_it.py"
    path.write_text(WRITE)
    return path


def told() -> list[object]:
    return list(json.loads(Path("told").read_text()))


def test_a_script_is_main_with_its_arguments_and_its_folder_first_on_the_path(script: Path) -> None:
    Target("script", "code/train_it.py", ("--lr", "1")).run()
    assert told() == ["__main__", [str(script), "--lr", "1"], str(script.parent.resolve())]


def test_a_module_is_main_and_found_from_the_working_folder(script: Path) -> None:
    script.parent.rename("package")
    Target("module", "package.train_it", ("x",)).run()
    name, (path, *arguments), first = told()  # type: ignore[misc]
    assert (name, Path(path).name, arguments, first) == ("__main__", "train_it.py", ["x"], str(Path.cwd()))


def test_the_local_rank_precedes_the_arguments_where_a_script_takes_it(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    Target("script", str(script), ("--lr", "1"), local_rank=True).run()
    assert told()[1] == [str(script), "--local_rank=1", "--lr", "1"]


def test_a_missing_script_or_program_has_a_code(in_folder: Path) -> None:
    with pytest.raises(LaunchError) as script:
        Target("script", "none.py").check()
    with pytest.raises(LaunchError) as program:
        Target("program", "no-such-program").run()
    assert (script.value.code, program.value.code) == ("launch.no-script", "launch.no-program")


def test_a_target_survives_json() -> None:
    target = Target("module", "a.b", ("--x", "ü\n"), local_rank=True)
    assert Target.from_json(json.loads(json.dumps(target.to_json()))) == target


def test_only_a_script_has_a_path() -> None:
    assert Workload(lambda: None, target=Target("script", "a.py")).script == Path("a.py")
    assert Workload(lambda: None, target=Target("module", "a")).script is None
    assert Workload(lambda: None).script is None


GPUS = ["cuda:0 (A)", "cuda:1 (A)"]


def test_a_requested_number_is_never_changed() -> None:
    assert choose_ranks(3, device=None, on_cpu=1)[0] == 3


def test_without_a_gpu_and_a_number_the_default_is_used() -> None:
    assert choose_ranks(None, device=None, on_cpu=4)[0] == 4


def test_every_gpu_gets_a_rank_unless_the_cpu_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_names", lambda: GPUS)
    ranks, reason = choose_ranks(None, device=None, on_cpu=4)
    assert ranks == 2 and all(name in reason for name in GPUS)
    assert choose_ranks(None, device="cpu", on_cpu=4)[0] == 4
    assert choose_ranks(3, device="cpu", on_cpu=4)[0] == 3


def test_more_ranks_than_gpus_have_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_names", lambda: GPUS)
    with pytest.raises(LaunchError) as caught:
        choose_ranks(3, device=None, on_cpu=1)
    assert caught.value.code == "launch.more-ranks-than-gpus"


@pytest.mark.parametrize("requested", [0, -1, True, 2.0, "2"])
def test_an_invalid_number_has_a_code(requested: Any) -> None:
    with pytest.raises(LaunchError) as caught:
        choose_ranks(requested, device=None, on_cpu=1)
    assert caught.value.code == "launch.bad-number"
