from __future__ import annotations

from collections.abc import Mapping

from paceline.tools.search.trial import Trial, TrialStatus, next_promotion, rung_fraction


def trial(number: int, values: Mapping[int, float], state: TrialStatus = "paused") -> Trial:
    return Trial(number, {}, state, rung=max(values, default=0), rung_values=values)


def promoted(
    trials: list[Trial], *, is_last: bool = False, minimizes: bool = True, high_first: bool = True
) -> int | None:
    found = next_promotion(trials, 3, 3, minimizes=minimizes, is_last=is_last, high_first=high_first)
    return None if found is None else found.number


def test_rungs_are_powers_of_eta() -> None:
    assert [rung_fraction(rung, 3, 3) for rung in range(3)] == [1 / 9, 1 / 3, None]


def test_the_best_third_of_a_rung_continues() -> None:
    trials = [trial(number, {0: float(number)}) for number in range(2)]
    assert promoted(trials) is None
    trials.append(trial(2, {0: 0.5}))
    assert promoted(trials) == 0
    assert promoted(trials, minimizes=False) == 1


def test_a_trial_is_promoted_once() -> None:
    trials = [trial(0, {0: 0.0}, "running"), *(trial(number, {0: float(number)}) for number in (1, 2))]
    assert promoted(trials) is None  # its place is taken by trial 0
    trials += [trial(number, {0: float(number)}) for number in (3, 4, 5)]
    assert promoted(trials) == 1


def test_high_or_low_rungs_come_first() -> None:
    low = [trial(number, {0: float(number)}) for number in range(3, 12)]
    high = [trial(number, {0: float(number), 1: 1.0 - number}) for number in range(3)]
    assert promoted([*high, *low]) == 2
    assert promoted([*high, *low], high_first=False) == 3


def test_at_the_end_the_best_one_reaches_the_top() -> None:
    trials = [trial(0, {0: 2.0}), trial(1, {0: 1.0})]
    assert promoted(trials) is None
    assert promoted(trials, is_last=True) == 1
    assert promoted([trial(0, {0: 2.0}), trial(1, {0: 1.0, 1: 0.5})], is_last=True) == 1
    assert (
        promoted([trial(0, {0: 2.0}), Trial(1, {}, "complete", rung=2, rung_values={0: 1.0, 1: 0.5})], is_last=True)
        is None
    )


def test_a_trial_that_failed_leaves_its_place_to_others() -> None:
    trials = [trial(0, {0: 1.0}, "failed"), trial(1, {0: 2.0}), trial(2, {0: 3.0})]
    assert promoted(trials, is_last=True) == 1


def test_ties_go_to_the_earlier_trial() -> None:
    assert promoted([trial(number, {0: 1.0}) for number in (2, 1, 0)]) == 0
