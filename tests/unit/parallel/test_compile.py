from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from paceline.errors import LayoutError
from paceline.models.gpt import GPT
from paceline.parallel.compile import compile_model, require_compiler, set_cache_dir
from paceline.parallel.recompute import recompute
from paceline.testing import run_on_ranks


@pytest.fixture(autouse=True)
def no_real_compiler(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was handed to torch.compile."""
    handed: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, *args, **kwargs: handed.append(function) or function)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/nowhere")
    return handed


@pytest.mark.parametrize(("how", "count"), [(True, 3 + 1), ("blocks", 3 + 1), ("model", 1)])
def test_blocks_or_the_model_are_compiled(how: bool | str, count: int, no_real_compiler: list[Any]) -> None:
    model = GPT(layers=3, width=16, heads=2)
    names = list(model.state_dict())
    compile_model(model, how)
    assert len(no_real_compiler) == count and list(model.state_dict()) == names


def test_a_model_without_blocks_is_compiled_in_full(no_real_compiler: list[Any]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert "full model" in compile_model(model, True)
    assert len(no_real_compiler) == 1 and model._compiled_call_impl is no_real_compiler[0]


def test_what_is_recomputed_is_compiled_inside_so_that_both_forwards_are_the_compiled_one(
    no_real_compiler: list[Any],
) -> None:
    model = GPT(layers=2, width=16, heads=2)
    recompute(model, "full")
    compile_model(model, True)
    assert [function.__name__ for function in no_real_compiler] == ["forward", "forward", "finish"]
    recompute(model, "selective")
    compile_model(model, True)
    assert [function.__name__ for function in no_real_compiler[3:]] == ["_call_impl", "_call_impl", "finish"]


def test_no_compiler_is_found_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(LayoutError) as caught:
        require_compiler(torch.device("cpu"))
    assert caught.value.code == "layout.no-compiler"
    require_compiler(torch.device("cuda"))


def test_the_cache_is_the_users_own_folder_unless_one_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/nowhere")
    assert set_cache_dir() == "/nowhere"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # which torch sets by itself
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert set_cache_dir() == os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "paceline" / "inductor")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert set_cache_dir() == str(tmp_path / ".cache" / "paceline" / "inductor")


def test_a_cache_that_others_may_write_to_or_that_cannot_be_created_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    folder = tmp_path / "paceline" / "inductor"
    assert set_cache_dir() == str(folder) and folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    folder.chmod(0o777)
    assert set_cache_dir() == default_cache_dir()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert set_cache_dir() == default_cache_dir()


def test_a_rank_that_is_forked_after_its_parent_has_compiled_has_threads_of_its_own() -> None:
    AsyncCompile.pool().submit(int).result(timeout=60)

    def on_rank() -> None:
        compile_model(nn.Linear(2, 2), "model")
        assert AsyncCompile.pool().submit(int).result(timeout=60) == 0

    try:
        run_on_ranks(1, on_rank)
    finally:
        AsyncCompile.pool().shutdown()
        AsyncCompile.pool.cache_clear()
