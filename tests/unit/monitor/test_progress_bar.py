from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from paceline.log import rank_log
from paceline.monitor.progress_bar import Bar, Display, Lines, LogPoint, choose_display

LOG_POINT = LogPoint(
    step=1200, epoch=2, loss=1.23456, lr=3e-4, samples_per_second=96.4, tokens_per_second=12345.0,
    data_wait=0.034, memory=int(1.2 * 2**30), extras={"accuracy": 0.5}, tflops=412.3, mfu=0.4167,
)  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def played(width: int, total: int | None = 5000, point: LogPoint | None = LOG_POINT) -> str:
    """What a terminal of that width received during a short training."""
    screen = Terminal()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None, _environ={})
    with Bar(total, 1000, console) as bar:
        bar.completed = 1200
        if point is not None:
            bar.show(point)
        rank_log(0).info("step 1200: evaluation [loss] 1.2")
        bar.completed = 1500
    return screen.getvalue()


def last_line(output: str) -> str:
    lines = [line.rpartition("\r")[2] for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output).split("\n")]
    assert lines[-1] == ""  # what comes next begins on a line of its own
    return lines[-2]


def test_a_wide_bar_shows_everything() -> None:
    line = last_line(played(200))
    expected = ["epoch 2", "━", "1500/5000", "loss 1.2346", "lr 0.0003", "12.3k tokens/s", "data wait 3%", "1.2 GiB",
                "MFU 41.7%", "accuracy 0.5000", "ETA "]  # fmt: skip
    assert [fact for fact in expected if fact not in line] == []
    assert line.count("━") == 30 * 1500 // 5000


def test_flops_are_shown_where_the_peak_of_the_device_is_not_known() -> None:
    assert "12.5GFLOP/s" in last_line(played(200, point=replace(LOG_POINT, tflops=0.0125, mfu=None)))
    assert "FLOP/s" not in last_line(played(200, point=replace(LOG_POINT, tflops=None, mfu=None)))


def test_bytes_are_shown_where_they_are_counted() -> None:
    assert "sent 1.25 MB/step" in last_line(played(200, point=replace(LOG_POINT, sent_mb=1.25)))
    assert "sent 128 B/step" in last_line(played(200, point=replace(LOG_POINT, sent_mb=1.28e-4)))  # between rounds
    assert "sent" not in last_line(played(200))


def test_a_slow_rank_is_shown_while_there_is_one() -> None:
    slow = "rank 3 1.9× slower: data"
    assert slow in last_line(played(100, point=replace(LOG_POINT, slow=slow)))
    assert "slower" not in last_line(played(100))


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 132])
def test_a_bar_stays_on_one_line(width: int) -> None:
    output = played(width)
    assert "\x1b[1A" not in output  # rich moves up when it has drawn more than one line
    assert 0 < len(last_line(output)) <= width
    assert "1500/5000" in last_line(output)


def test_eighty_columns_hold_what_matters_most() -> None:
    line = last_line(played(80))
    kept = ["━", "1500/5000", "loss 1.2346", "12.3k tokens/s", "data wait 3%", "ETA "]
    assert [fact for fact in kept if fact not in line] == []
    assert "accuracy" not in line


def test_a_log_line_stands_above_the_bar_as_it_was_written() -> None:
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", played(80))
    assert "step 1200: evaluation [loss] 1.2\n" in text
    assert text.rindex("evaluation [loss]") < text.rindex("1500/5000")


def test_a_bar_before_the_first_log_point_shows_the_steps() -> None:
    line = last_line(played(80, point=None))
    assert "1500/5000" in line
    assert "loss -" in line


def test_a_terminal_without_unicode_gets_a_plain_bar() -> None:
    raw = io.BytesIO()
    screen = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    with Bar(10, 0, Console(file=screen, force_terminal=True, width=80, color_system=None, _environ={})) as bar:
        bar.completed = 5
    assert "###" in last_line(raw.getvalue().decode("ascii"))


def test_a_bar_without_an_end_shows_neither_bar_nor_time_left() -> None:
    line = last_line(played(200, total=None))
    assert "1500 steps" in line
    assert "━" not in line
    assert "ETA" not in line


def test_time_left_is_unknown_before_the_first_step() -> None:
    screen = Terminal()
    with Bar(10, 3, Console(file=screen, force_terminal=True, width=80, color_system=None, _environ={})):
        pass
    assert last_line(screen.getvalue()).endswith("ETA -")


def test_time_left_at_the_end_is_none() -> None:
    screen = Terminal()
    with Bar(10, 3, Console(file=screen, force_terminal=True, width=80, color_system=None, _environ={})) as bar:
        bar.completed = 10
    assert last_line(screen.getvalue()).endswith("ETA 0:00")


def test_lines_print_the_first_and_the_last_standing_and_few_between(capsys: pytest.CaptureFixture[str]) -> None:
    with Lines(100, 0, rank_log(0)) as display:
        for step in range(10, 60, 10):
            display.completed = step
            display.show(LogPoint(step, 0, 0.5, 0.1, 5.0))
    printed = capsys.readouterr().out.splitlines()
    assert [line[:11] for line in printed] == ["step 10/100", "step 50/100"]
    assert "epoch 0  loss 0.5000  lr 0.1  5.0 samples/s  data wait 0%" in printed[0]


def test_lines_print_the_last_step_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Lines(30, 0, rank_log(0)) as display:
        for step in (10, 20, 30):
            display.completed = step
            display.show(LogPoint(step, 0, 0.5, 0.1, 5.0, extras={"accuracy": 0.25}))
    printed = capsys.readouterr().out.splitlines()
    assert [line[:10] for line in printed] == ["step 10/30", "step 30/30"]
    assert "accuracy 0.2500" in printed[1]


def test_silence_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with choose_display(10, 0, rank_log(0), silent=True) as display:
        display.completed = 3
        display.show(LOG_POINT)
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_a_bar_and_a_file_gets_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    displays: list[Display] = [
        choose_display(10, 2, rank_log(0), silent=False),
        choose_display(10, 2, rank_log(0), silent=True),
    ]
    with (tmp_path / "log").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        displays.append(choose_display(10, 2, rank_log(0), silent=False))
    assert [type(display) for display in displays] == [Bar, Display, Lines]
    assert [display.completed for display in displays] == [2, 2, 2]
