"""Exit statuses, fixes, and exits of ranks as JSON."""

from __future__ import annotations

import json

import pytest

from paceline.diagnose.exits import EXIT_STATUSES, FIXES, RankExit
from paceline.run.failures import FailureRecord

ERROR = {"family": "data", "name": "empty", "what": "It is empty.", "why": "", "fix": "fill it"}


def test_each_kind_has_an_exit_status_of_its_own_and_a_fix() -> None:
    assert len(set(EXIT_STATUSES.values())) == len(EXIT_STATUSES)
    assert FIXES.keys() - EXIT_STATUSES.keys() == {"signal", "exit"}


@pytest.mark.parametrize("record", [None, FailureRecord(3, 9.5, 1, "[data.empty] It is empty.", ERROR)])
def test_an_exit_reported_by_another_node_is_on_our_clock(record: FailureRecord | None) -> None:
    there = RankExit(3, 0, -9, 10.0, record, "saving", 12, "the last line")
    here = RankExit.from_json(json.loads(json.dumps(there.to_json())), node=1, clock_offset=2.5)
    assert here == RankExit(3, 1, -9, 12.5, record, "saving", 12, "the last line")
    assert here.error_code == ("data.empty" if record else "")


@pytest.mark.parametrize(
    ("code", "number", "name"),
    [(-11, 11, "SIGSEGV"), (137, 9, "SIGKILL"), (143, 15, "SIGTERM"), (3, 0, "signal 0"), (None, 0, "signal 0"),
     (-64, 64, "SIGRTMAX"), (-63, 63, "signal 63")],
)  # fmt: skip
def test_a_signal_is_read_from_the_status_of_a_process_or_of_a_shell(code: int | None, number: int, name: str) -> None:
    rank_exit = RankExit(0, 0, code, 1.0)
    assert (rank_exit.signal_number, rank_exit.signal_name) == (number, name)


def test_a_status_over_128_with_a_record_was_chosen_by_the_rank() -> None:
    assert RankExit(0, 0, 137, 1.0, FailureRecord(0, 1.0, 137, "rank 0 called sys.exit(137)\n")).signal_number == 0


def test_only_a_record_has_the_exact_time() -> None:
    assert RankExit(0, 0, 1, 5.0, FailureRecord(0, 5.0, 1, "Traceback")).earliest == 5.0
    assert RankExit(0, 0, -9, 5.0).earliest < 5.0
