"""Reports that recipes ask for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from paceline.run import requested_report
from paceline.run.ledger import Ledger
from watched import run_folder


def test_reports_that_recipes_ask_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch = run_folder(tmp_path / "launch", config="report: false\n")
    asked = run_folder(tmp_path / "asked", config="report: true\n")
    silent = run_folder(tmp_path / "silent")
    for run in (asked, silent):
        Ledger(launch).note("opened", run=str(run.path), name="x")
    requested_report.write_all(launch)
    assert asked.report.is_file() and not launch.report.exists() and not silent.report.exists()
    assert "report: " in capsys.readouterr().err


def test_a_report_that_cannot_be_written_changes_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(tmp_path / "run", config="report: true\n")
    folder.report.mkdir()
    requested_report.write_all(folder)
    said = capsys.readouterr().err
    assert "the report was not written: " in said and "Can't write" in said


def test_runs_of_an_earlier_launch_are_left_alone(tmp_path: Path) -> None:
    """A folder that was copied names the one it was copied from."""
    other = run_folder(tmp_path / "other", config="report: true\n")
    launch = run_folder(tmp_path / "launch", events=[], config="report: true\n")
    Ledger(launch).note("opened", at=1.0, run=str(other.path), name="x")
    Ledger(launch).note("launched", at=2.0, nodes=1, ranks=1, generation=0)
    requested_report.write_all(launch)
    assert launch.report.exists() and not other.report.exists()


def test_the_writer_of_a_report_is_out_of_reach_of_ctrl_c_and_its_message_is_bounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is sent to the processes of a terminal's session."""
    writer = tmp_path / "writer"
    code = "import os, sys; sys.exit('x' * 100_000 + f' session {os.getsid(0)}')"
    writer.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}"\n')
    writer.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(writer))
    requested_report.write(run_folder(tmp_path / "run"))
    said = capsys.readouterr().err
    session = int(said.split("session")[-1])
    assert session != os.getsid(0) and len(said) < 3_000
