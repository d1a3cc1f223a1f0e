"""The line of the user's code in a traceback."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import Dataset

from paceline import errors
from paceline.config.recipe import Config
from paceline.errors import ConfigError
from paceline.run.user_frame import UserFrame, find_user_frame, hide_library_frames


def frame_of(error: BaseException) -> UserFrame:
    found = find_user_frame(error)
    assert found is not None and found.file == __file__
    return found


def test_it_is_the_innermost_line_outside_libraries() -> None:
    with pytest.raises(ConfigError) as caught:
        Config(batches=3)
    found = frame_of(caught.value)
    assert found.code == "Config(batches=3)"
    assert found.function == "test_it_is_the_innermost_line_outside_libraries"
    with pytest.raises(RuntimeError) as raised:
        torch.nn.Linear(2, 2)(torch.ones(3))
    assert frame_of(raised.value).code == "torch.nn.Linear(2, 2)(torch.ones(3))"


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        raise KeyError("missing")

    def __getitem__(self, index: int) -> int:
        return {}[index]


def test_a_dataloader_worker_sends_its_line_as_text() -> None:
    try:
        Broken()[7]
    except KeyError:
        sent = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(KeyError) as caught:
        sent.reraise()
    assert frame_of(caught.value).code == "return {}[index]"


def test_the_line_behind_an_error_that_a_library_translates_is_shown() -> None:
    library: dict[str, Any] = {"data": Broken(), "error": ConfigError("type", "Wrong.")}
    source = "try:\n    len(data)\nexcept KeyError:\n    raise error from None\n"
    with pytest.raises(ConfigError) as caught:
        exec(compile(source, str(Path(torch.__file__)), "exec"), library)
    assert frame_of(caught.value).code == 'raise KeyError("missing")'


def test_an_exception_that_the_user_handled_is_not_the_place() -> None:
    with pytest.raises(ConfigError) as caught:
        try:
            {}["cache"]
        except KeyError:
            Config(batches=3)
    assert frame_of(caught.value).code == "Config(batches=3)"


def test_a_cycle_of_causes_ends() -> None:
    source = "try:\n    raise error\nexcept Exception as caught:\n    raise caught from caught\n"
    with pytest.raises(ConfigError) as caught:
        exec(compile(source, str(Path(torch.__file__)), "exec"), {"error": ConfigError("type", "Wrong.")})
    assert caught.value.__cause__ is caught.value
    assert frame_of(caught.value).function == "test_a_cycle_of_causes_ends"


def test_library_frames_are_hidden_except_the_innermost_of_others() -> None:
    def frame(file: str, source: str = "    call()\n") -> str:
        return f'  File "{file}", line 3, in f\n{source}'

    head, torchs, ours = "Traceback (most recent call last):\n", frame(torch.__file__), frame(errors.__file__)
    user, marked = frame("/home/me/train.py"), frame("/env/site-packages/x.py", "    call(1)\n         ^\n")
    hidden = "  … ({})\n"
    for text, shown in {
        user: user,
        user + ours + torchs + user: user + hidden.format("2 library frames") + user,
        user + ours + ours: user + hidden.format("2 library frames"),
        user + ours + ours + marked: user + hidden.format("2 library frames") + marked,
    }.items():
        both = "{0}{1}ValueError: x\n\nDuring handling\n\n{0}{1}KeyError: y\n    File\n"
        expected = both.format(head, shown).replace("s)\n", "s; the whole traceback is in rank-0.log)\n", 1)
        assert hide_library_frames(both.format(head, text), "rank-0.log") == expected


def test_a_syntax_error_is_at_its_line(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("x = 1\nfor x in 3\n    pass\n")
    with pytest.raises(SyntaxError) as caught:
        runpy.run_path(str(script))
    found = find_user_frame(caught.value)
    assert found == UserFrame(str(script), 2, "<module>", "for x in 3")


def test_an_error_without_code_of_the_user_has_no_place() -> None:
    assert find_user_frame(ConfigError("type", "Wrong.")) is None
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("1 / 0", str(Path(sys.modules["json"].__file__ or "")), "exec"))
    assert find_user_frame(caught.value.with_traceback(caught.tb.tb_next)) is None


def test_a_long_line_is_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    frame = UserFrame(str(tmp_path / "train.py"), 17, "main", "trainer.train(data)")
    assert str(frame) == "train.py:17, in main: trainer.train(data)"
    assert len(str(UserFrame("a.py", 1, "f", "x" * 500))) < 130
