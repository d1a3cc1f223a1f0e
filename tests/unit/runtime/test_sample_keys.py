"""Keys depend on the seed, the step, the scope and the position of a sample, and on nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.runtime.sample_keys import SampleKeys


@dataclass
class Rows:
    samples: int
    start: int
    step: int
    step_samples: int = 12


def keys_of(rows: Rows, seed: int = 1) -> SampleKeys:
    keys = SampleKeys(seed, torch.device("cpu"), ["layers.0", "layers.1"])
    keys.begin(rows)
    return keys


def test_a_slice_of_a_batch_has_the_keys_of_its_samples() -> None:
    batch, part = keys_of(Rows(12, 0, step=3)), keys_of(Rows(4, 5, step=3))
    assert batch.rows is not None and part.rows is not None
    assert torch.equal(batch.rows[5:9], part.rows)


def test_keys_differ_between_seeds_steps_scopes_and_samples() -> None:
    contexts = [(Rows(12, 0, step=3), 1), (Rows(12, 0, step=4), 1), (Rows(12, 0, step=3), 2)]
    found = []
    for rows, seed in contexts:
        keys = keys_of(rows, seed)
        for scope in [keys.outside, *keys.inside.values(), *keys.after.values()]:
            keys.current = scope
            own = keys.own()
            assert own is not None
            found.append(own.view(torch.int64).flatten())
    numbers = torch.cat(found)
    assert len(numbers) == 3 * 5 * 12 and len(numbers.unique()) == len(numbers)


def test_restored_keys_continue_where_they_were_saved() -> None:
    keys = keys_of(Rows(12, 0, step=3))
    keys.current, keys.calls, keys.inside["layers.0"].visits = keys.inside["layers.0"], 7, 1
    saved = keys.save()
    keys.begin(Rows(4, 0, step=4))
    keys.restore(saved)
    assert (keys.current.name, keys.calls, keys.samples, keys.current.visits) == ("layers.0", 7, 12, 1)


def test_rows_of_padding_repeat_the_last_sample() -> None:
    keys = keys_of(Rows(5, 0, step=0))
    rows = keys.select(4, 3).rows
    assert rows is not None and torch.equal(rows[0], rows[2])


def test_a_model_without_dropout_computes_no_keys_after_its_first_micro_batch() -> None:
    keys = keys_of(Rows(12, 0, step=0))
    keys.end()
    keys.begin(Rows(12, 0, step=1))
    assert keys.rows is None


def test_the_backward_of_a_loss_without_a_micro_batch_decides_nothing() -> None:
    keys = SampleKeys(1, torch.device("cpu"))
    keys.watches = True
    keys.end()
    keys.begin(Rows(12, 0, step=0))
    assert keys.rows is not None
