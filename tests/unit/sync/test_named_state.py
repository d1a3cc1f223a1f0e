from __future__ import annotations

import torch

from paceline.sync.named_state import NamedState, Slot, StepEnd

A, B = Slot("a", (2, 3), (3, 1), 0), Slot("b", (2,), (1,), 6)
YES, NO = torch.tensor(True), torch.tensor(False)


def test_values_follow_their_names_to_other_buckets_and_memory_formats() -> None:
    state = NamedState()
    together = state.collect([A, B], like=torch.empty(8))
    together.value.copy_(torch.arange(8.0))
    alone = state.collect([Slot("a", (2, 3), (1, 2), 4)], like=torch.empty(10))
    assert alone.value[4:].tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    found = state.state()
    assert found["a"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] and found["b"].tolist() == [6.0, 7.0]


def test_loaded_values_wait_for_their_bucket() -> None:
    state = NamedState(initial=lambda name, view: view.fill_(9.0))
    state.collect([A], like=torch.empty(6))
    state.load({"a": torch.ones(2, 3), "frozen": torch.zeros(1)})
    kept = state.collect([A, B], like=torch.empty(8))
    assert kept.value.tolist() == [1.0] * 6 + [9.0] * 2
    assert state.state().keys() == {"a", "b", "frozen"}


def test_a_step_counts_for_all_buckets_or_for_none() -> None:
    state, end = NamedState(), StepEnd()
    first, last = state.collect([A], like=torch.empty(6)), state.collect([B], like=torch.empty(8))
    first.next.fill_(1.0)
    last.next.fill_(2.0)
    end.add(True, False, YES, first)
    end.add(False, True, NO, last)
    assert not first.value.any() and not last.value.any()
    end.add(True, False, NO, first)  # a backward that failed after its first bucket
    end.add(True, False, YES, first)
    assert not first.value.any()
    end.add(False, True, YES, last)
    assert first.value.unique().tolist() == [1.0] and last.value.unique().tolist() == [2.0]
