from __future__ import annotations

from pathlib import Path

import pytest

from ledgers import Line, written
from paceline.diagnose.goodput import Goodput, summarize
from paceline.run.folder import RunFolder
from paceline.run.ledger import Ledger


def launch(at: float, generation: int = 0) -> list[Line]:
    """Two seconds to the group, one of them of the rendezvous; a second of loading; a first step of three."""
    return [
        (at, "launched", {"nodes": 1, "ranks": 2, "generation": generation}),
        (at + 0.5, "ranks-started", {}),
        (at + 2, "joined", {"seconds": 1.0}),
    ]


# A second a step, a save of two seconds, an evaluation of three.
UNBROKEN: list[Line] = [
    *launch(1000),
    (1005, "first-step", {"step": 1, "steps": 1, "seconds": 2.5}),
    (1010, "stepped", {"step": 6}),
    (1015, "saved", {"step": 9, "seconds": 2.0}),
    (1016, "stepped", {"step": 10}),
    (1019, "evaluated", {"seconds": 3.0}),
    (1029, "finished", {"step": 20}),
    (1030, "ended", {"status": 0}),
]


def rounded(found: Goodput) -> dict[str, float]:
    return {name: round(value, 3) for name, value in vars(found).items() if value}


def test_the_time_of_a_run_without_a_failure_is_attributed(tmp_path: Path) -> None:
    found = summarize(written(tmp_path, *UNBROKEN))
    assert rounded(found) == {
        "start": 1.5, "rendezvous": 1.0, "compile": 1.5, "training": 20.0, "saves": 2.0, "evaluation": 3.0, "end": 1.0,
        "steps": 20,
    }  # fmt: skip
    assert found.total == pytest.approx(30.0) and found.effective == pytest.approx(20 / 30)


def test_the_time_of_a_hang_is_counted_once(tmp_path: Path) -> None:
    """One in a step, and one in an evaluation, which ends later."""
    hung: list[Line] = [
        *UNBROKEN[:6],
        (1020, "hang", {"kind": "missing", "seconds": 3.0}),
        (1024, "continued", {"seconds": 4.0}),
        (1030, "hang", {"kind": "missing", "seconds": 2.0}),
        (1034, "continued", {"seconds": 4.0}),
        (1035, "evaluated", {"seconds": 9.0}),
        (1045, "finished", {"step": 20}),
        (1046, "ended", {"status": 0}),
    ]
    found = summarize(written(tmp_path, *hung))
    assert (found.hung, found.evaluation, found.saves) == (13.0, 3.0, 2.0)
    assert found.total == pytest.approx(46.0)


def test_steps_that_are_trained_again_were_lost(tmp_path: Path) -> None:
    """Step 10 was saved, 16 were done, and the 17th was cut off."""
    failed = [*UNBROKEN[:7], (1022, "stepped", {"step": 16}), (1022.5, "failed", {"cause": "signal", "step": 16})]
    again: list[Line] = [
        *launch(1024.5, generation=1),
        (1027.5, "restored", {"step": 10, "seconds": 1.0}),
        (1029.5, "first-step", {"step": 11, "steps": 1, "seconds": 2.0}),
        (1038.5, "finished", {"step": 20}),
    ]
    found = summarize(written(tmp_path, *failed, *again))
    assert (found.lost_steps, found.steps) == (6, 20)
    assert found.lost == pytest.approx(6.5) and found.down == pytest.approx(2.0)
    assert found.load == pytest.approx(1.0) and found.training == pytest.approx(20.0)
    assert found.total == pytest.approx(38.5)


def test_the_step_on_a_dead_ranks_page_counts_as_done_and_lost(tmp_path: Path) -> None:
    lines = [*UNBROKEN[:5], (1014, "failed", {"step": 10}), *launch(1015, 1)]
    first = (1020, "first-step", {"step": 1, "steps": 1, "seconds": 1.0})
    found = summarize(written(tmp_path, *lines, first, (1021, "finished", {"step": 2})))
    assert (found.lost_steps, found.steps) == (10, 2) and found.lost == pytest.approx(10.0)


def test_a_saved_step_counts_as_done_without_a_record(tmp_path: Path) -> None:
    """An exception's last save, of step 12, before a failure of which no step is known."""
    lines: list[Line] = [*UNBROKEN[:5], (1016, "saved", {"step": 12, "seconds": 0.0}), (1016, "failed", {})]
    first = (1020, "first-step", {"step": 13, "steps": 1, "seconds": 1.0})
    found = summarize(written(tmp_path, *lines, *launch(1017, 1), first, (1027, "finished", {"step": 20})))
    assert (found.lost_steps, found.steps, found.lost) == (0, 20, 0.0)


def test_two_failures_in_a_row_count_each_step_once(tmp_path: Path) -> None:
    lines = [*UNBROKEN[:5], (1010, "failed", {"step": 6})]
    for generation in (1, 2):
        begin = 1000 + 20 * generation
        lines += [
            *launch(begin, generation),
            (begin + 4, "first-step", {"step": 3, "steps": 1, "seconds": 1.0}),
            (begin + 7, "stepped", {"step": 6}),
            (begin + 7, "failed", {"step": 6}),
        ]
    found = summarize(written(tmp_path, *lines))
    assert (found.lost_steps, found.steps) == (8, 6)


def test_time_between_two_runs_is_not_counted_but_what_was_lost_is(tmp_path: Path) -> None:
    """The first one's launcher was killed: nobody noted how it ended."""
    later: list[Line] = [
        *launch(900_000),
        (900_004, "first-step", {"step": 9, "steps": 1, "seconds": 1.0}),
        (900_015, "finished", {"step": 20}),
    ]
    found = summarize(written(tmp_path, *UNBROKEN[:6], *later))
    assert found.total == pytest.approx(15 + 15) and found.lost_steps == 1 and found.down == 0.0
    (tmp_path / "ledger.jsonl").unlink()
    found = summarize(written(tmp_path, *UNBROKEN[:7], *later))
    assert found.total == pytest.approx(16 + 15) and found.lost_steps == 2


def test_a_second_training_of_a_script_undoes_nothing_of_the_first(tmp_path: Path) -> None:
    second: list[Line] = [
        (1031, "joined", {"seconds": 0.0}),
        (1035, "first-step", {"step": 1, "steps": 1, "seconds": 1.0}),
        (1039, "finished", {"step": 5}),
    ]
    found = summarize(written(tmp_path, *UNBROKEN[:-1], *second))
    assert (found.lost_steps, found.steps) == (0, 25)
    assert found.total == pytest.approx(39.0)


def test_trainers_that_take_turns_lose_no_steps(tmp_path: Path) -> None:
    """A generator and a discriminator, of which one is further ahead."""
    lines: list[Line] = [(0, "launched", {"generation": 0})]
    for step in range(1, 6):
        event = "first-step" if step == 1 else "stepped"
        lines.append((2 * step, event, {"step": 3 * step, "steps": 3, "seconds": 1.0, "trainer": 0}))
        lines.append((2 * step + 1, event, {"step": step, "steps": 1, "seconds": 1.0, "trainer": 1}))
    lines += [(12, "finished", {"step": 15, "trainer": 0}), (13, "finished", {"step": 5, "trainer": 1})]
    found = summarize(written(tmp_path, *lines))
    assert (found.lost_steps, found.lost, found.steps) == (0, 0.0, 20)
    assert found.total == pytest.approx(13.0)


def test_a_failure_discards_steps_of_each_trainer(tmp_path: Path) -> None:
    lines: list[Line] = [
        (0, "launched", {"generation": 0}),
        (1, "first-step", {"step": 1, "steps": 1, "seconds": 1.0, "trainer": 0}),
        (2, "first-step", {"step": 1, "steps": 1, "seconds": 1.0, "trainer": 1}),
        (8, "stepped", {"step": 10, "trainer": 0}),
        (9, "stepped", {"step": 4, "trainer": 1}),
        (10, "failed", {"step": 4}),
        (11, "launched", {"generation": 1}),
        (12, "first-step", {"step": 7, "steps": 1, "seconds": 1.0, "trainer": 0}),
        (13, "first-step", {"step": 3, "steps": 1, "seconds": 1.0, "trainer": 1}),
        (18, "finished", {"step": 12, "trainer": 0}),
        (19, "finished", {"step": 6, "trainer": 1}),
    ]
    found = summarize(written(tmp_path, *lines))
    assert (found.lost_steps, found.steps) == ((10 - 6) + (4 - 2), 12 + 6)
    assert found.total == pytest.approx(19.0)


def test_a_background_save_does_not_count_as_training(tmp_path: Path) -> None:
    """It held training up before the step that was noted in between."""
    lines: list[Line] = [
        (0, "launched", {"generation": 0}),
        (1, "first-step", {"step": 1, "steps": 1, "seconds": 1.0}),
        (5, "stepped", {"step": 4}),
        (5.5, "saved", {"step": 2, "seconds": 1.5}),
        (11, "finished", {"step": 10}),
    ]
    found = summarize(written(tmp_path, *lines))
    assert found.saves == 1.5 and found.total == pytest.approx(11.0)


def test_half_lines_and_unknown_events_do_no_harm(tmp_path: Path) -> None:
    written(tmp_path, *UNBROKEN[:4])
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('[]\n{"time": "noon", "event": "stepped"}\n{"time": 1009, "event": "sang"}\n{"time": 1009.5, "ev')
    written(tmp_path, *UNBROKEN[4:])
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"time": 1031, "event": "st')
    assert summarize(RunFolder(tmp_path)).total == pytest.approx(30.0)
    assert summarize(RunFolder(tmp_path)).steps == 20


def test_without_a_ledger_there_is_no_summary(tmp_path: Path) -> None:
    Ledger(None).note("stepped", step=1)
    Ledger(RunFolder(tmp_path / "missing")).note("stepped", step=1)
    found = summarize(RunFolder(tmp_path))
    assert found.total == found.effective == 0.0
    assert found.table() == "time in training steps: 0.0 % of 0.0 s"


def test_a_person_reads_where_the_time_went() -> None:
    found = Goodput(start=2.1, rendezvous=0.4, load=0.8, compile=1.2, training=661.0, saves=50, lost=8.2, lost_steps=12)
    assert found.table() == (
        "time in training steps: 91.3 % of 12 min 4 s\n"
        "  start 2.1 s, rendezvous 0.4 s, load 0.8 s, first step 1.2 s, saves 50.0 s, "
        "lost and replayed 8.2 s (12 steps)"
    )


STEADY: list[Line] = [
    *launch(1000),
    (1005, "first-step", {"step": 1, "steps": 1, "seconds": 2.5}),
    (1010, "stepped", {"step": 6}),
]


def test_a_hang_lasts_until_somebody_ends_it(tmp_path: Path) -> None:
    """It was reported once, after two seconds; nothing more was heard for a minute and a half."""
    hung: list[Line] = [*STEADY, (1013, "hang", {"kind": "missing", "seconds": 2.0}), (1103, "ended", {"status": 130})]
    found = summarize(written(tmp_path, *hung))
    assert (found.hung, found.steps) == (92.0, 6) and found.training == pytest.approx(6.0)
    assert found.total == pytest.approx(103.0)


def test_the_step_in_which_training_was_interrupted_is_no_training(tmp_path: Path) -> None:
    """Nobody watches a plain script: the 8th step hangs, until Ctrl-C."""
    end: Line = (1103, "rank-ended", {"state": "interrupted", "signal": "SIGINT", "rank": 0, "step": 7})
    found = summarize(written(tmp_path, *STEADY, end, (1104, "rank-ended", {"state": "failed", "rank": 1})))
    assert found.unfinished == pytest.approx(92.0) and found.training == pytest.approx(7.0)
    assert found.total == pytest.approx(103.0)


def test_the_time_for_data_is_no_training(tmp_path: Path) -> None:
    waited: list[Line] = [
        *STEADY,
        (1020, "stepped", {"step": 12, "waited": 4.0}),
        (1027, "finished", {"step": 15, "waited": 3.5}),
    ]
    found = summarize(written(tmp_path, *waited))
    assert found.waiting == 7.5 and found.training + found.compile == pytest.approx(22 - 7.5 + 2.5)
    assert found.total == pytest.approx(27.0)
