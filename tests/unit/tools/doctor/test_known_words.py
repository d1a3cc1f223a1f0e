"""Words of paceline's own source are known, long numbers and anything else are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.tools.doctor import known_words


@pytest.mark.parametrize(
    "name",
    [
        "train.py",
        "unused_parameters",
        "TensorParallel",
        "fp16",
        "step-000016",
        "rank-0.log",
        "layers.0.weight",
        "cuda:0",
    ],
)
def test_names_of_training_are_known(name: str) -> None:
    assert known_words.is_known(name)


@pytest.mark.parametrize(
    "name",
    [
        "zyx",
        "train4711",
        "4711",
        "10.0.0.7",
        "a1b2c3",
        "Tr0ub4dor",
        "train.zyx",
        "contraseña",
        "密码",
        "x-zyx-x",
        "$!%&/",
    ],
)
def test_other_names_are_not(name: str) -> None:
    assert not known_words.is_known(name)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("dbPassword", "secret"),
        ("HF_TOKEN", "doubtful"),
        ("exit_code", "doubtful"),
        ("pin", "secret"),
        ("pin_memory", ""),
        ("lr", ""),
    ],
)
def test_names_announce_secrets(name: str, kind: str) -> None:
    assert known_words.kind_of(name) == kind


def test_files_of_packages_are_known_wherever_they_were(tmp_path: Path) -> None:
    assert known_words.installed("/opt/venv/lib/python3.11/site-packages/pytest/__init__.py") == "pytest/__init__.py"
    assert known_words.installed("/usr/lib/python3.11/json/decoder.py") == "json/decoder.py"
    assert known_words.installed(str(tmp_path / "decoder.py")) == ""
    assert known_words.installed("/x/site-packages/../../etc/zyx.py") == ""
    assert known_words.defines("/usr/lib/python3.11/json/decoder.py", "raw_decode")
    assert not known_words.defines("/usr/lib/python3.11/json/decoder.py", "zyx")


def test_variables_are_those_of_the_source() -> None:
    assert {"RANK", "MASTER_ADDR", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES"} <= known_words.variables()
    assert "ZYX_TOKEN" not in known_words.variables()
