from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from paceline import Trainer, log
from paceline.testing import ranks

LOGGER = logging.getLogger("paceline")
DATA = TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
MSE = torch.nn.MSELoss()


class Records(logging.Handler):
    """A platform's own handler."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    """Each test begins as a new process does."""
    before = (list(LOGGER.handlers), LOGGER.level, LOGGER.propagate)
    LOGGER.handlers[:] = []
    LOGGER.setLevel(logging.NOTSET)
    LOGGER.propagate = True
    yield
    LOGGER.handlers[:], LOGGER.propagate = before[0], before[2]
    LOGGER.setLevel(before[1])


@pytest.fixture
def records() -> Records:
    handler = Records()
    LOGGER.addHandler(handler)
    return handler


def trained(**settings: Any) -> None:
    Trainer(torch.nn.Linear(3, 1), criterion=MSE, batch=4, run=False, **settings).train(DATA, max_steps=2)


def test_importing_configures_nothing() -> None:
    code = (
        "import logging; from paceline import Trainer, launch, log; ours = logging.getLogger('paceline'); "
        "print(ours.handlers, logging.getLogger().handlers, ours.level)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] [] 0"


def test_lines_of_a_rank_are_on_stdout_and_lines_of_a_launcher_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    log.rank_log(0).info("100% of it")
    log.rank_log(0).warning("low")
    log.info("submitted")
    log.warning("late")
    out, err = capfd.readouterr()
    assert out == "100% of it\nwarning: low\n"
    assert err == "submitted\nwarning: late\n"


def test_a_script_that_configures_the_root_logger_sees_each_line_once(capfd: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    try:
        log.rank_log(0).info("once")
    finally:
        logging.getLogger().removeHandler(handler)
    assert capfd.readouterr() == ("once\n", "")


def test_a_users_handler_gets_records_with_level_and_rank_and_the_console_nothing(
    records: Records, capfd: pytest.CaptureFixture[str]
) -> None:
    trained()
    log.warning("late")
    assert capfd.readouterr() == ("", "")
    assert {(record.levelname, record.rank) for record in records.records} == {("INFO", 0), ("WARNING", None)}
    assert any(record.getMessage().startswith("step 2/2") for record in records.records)
    assert records.records[-1].getMessage() == "late"
    assert records.records[-1].filename == "test_log.py"  # who said it, and not the logger's own module


def test_a_null_handler_leaves_everything_to_the_root_logger(capfd: pytest.CaptureFixture[str]) -> None:
    LOGGER.addHandler(logging.NullHandler())
    root = Records()
    logging.getLogger().addHandler(root)
    try:
        log.rank_log(0).info("routed")
    finally:
        logging.getLogger().removeHandler(root)
    assert [record.getMessage() for record in root.records] == ["routed"]
    assert capfd.readouterr() == ("", "")


def test_a_level_silences_a_training(capfd: pytest.CaptureFixture[str]) -> None:
    LOGGER.setLevel(logging.ERROR)
    trained()
    log.rank_log(0).warning("unseen")
    assert capfd.readouterr() == ("", "")


def test_quiet_keeps_warnings(capfd: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(3, 1)
    model.register_parameter("unused", torch.nn.Parameter(torch.zeros(2)))
    Trainer(model, criterion=MSE, batch=4, run=False, quiet=True).train(DATA, max_steps=1)
    printed = capfd.readouterr().out
    assert printed.startswith("warning: the loss does not depend on unused;")
    assert printed.count("\n") == 1


def test_one_trainers_quiet_is_not_anothers(capfd: pytest.CaptureFixture[str]) -> None:
    loud, quiet = log.rank_log(0), log.rank_log(0, quiet=True)
    loud.info("a")
    quiet.info("b")
    quiet.warning("c")
    loud.info("d")
    assert capfd.readouterr().out == "a\nwarning: c\nd\n"


def test_a_stream_that_is_replaced_later_gets_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = log.rank_log(0)
    rank.info("before")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    rank.info("after")
    assert sys.stdout.getvalue() == "after\n"  # type: ignore[attr-defined]


@ranks(2)
def test_ranks_other_than_0_are_silent() -> None:
    from paceline import dist

    handler = Records()
    LOGGER.addHandler(handler)
    trained()
    log.rank_log(dist.rank()).warning("from all of them")
    said = [record.rank for record in handler.records]
    assert set(said) == ({0} if dist.rank() == 0 else set())
