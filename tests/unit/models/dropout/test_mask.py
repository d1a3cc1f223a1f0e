"""A mask is a function of the sample and of coordinates in it."""

from __future__ import annotations

import torch

from paceline.models.dropout.mask import Reading, arrange, hash_elements, read_shape, threshold

KEYS = torch.randint(-(2**31), 2**31, (6, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(0))


def shape_of(shape: tuple[int, ...], samples: int, **options: bool) -> tuple[int, ...] | None:
    reading = read_shape(shape, samples, **options)
    return None if reading is None else reading.shape


def test_heads_that_are_flattened_into_the_batch_are_split() -> None:
    assert shape_of((24, 5, 5), 6) == (6, 4, 5, 5)
    assert shape_of((6, 5), 6) == (6, 5) and shape_of((6,), 6) == (6, 1)
    assert shape_of((7, 5), 6) is None and shape_of((), 6) is None


def test_samples_are_found_in_the_second_dim_of_a_time_major_model() -> None:
    assert shape_of((24, 6, 5), 6, time_major=True) == (6, 24, 5)
    assert shape_of((7, 6, 5), 6, time_major=True) == (6, 7, 5)
    assert shape_of((6, 4, 6, 6), 6, time_major=True) == (6, 4, 6, 6)
    mask = hash_elements(KEYS, 0, (6, 24, 5))
    assert torch.equal(arrange(mask, Reading((6, 24, 5), True), (24, 6, 5)), mask.transpose(0, 1))
    assert torch.equal(arrange(mask, Reading((6, 24, 5), False), (144, 5)), mask.view(144, 5))


def test_a_shape_in_which_samples_may_be_in_several_dims_is_left_to_torch() -> None:
    assert shape_of((6, 6, 5), 6, time_major=True) is None
    assert shape_of((24, 6, 6), 6, time_major=True) is None
    assert shape_of((24, 6, 5), 6) is None
    assert shape_of((6, 6, 5), 6, time_major=True, known=True) == (6, 6, 5)  # read as by the same call before
    assert shape_of((24, 6, 6), 6, time_major=True, known=False) == (6, 4, 6, 6)
    assert shape_of((12, 5), 6, splits=False) is None  # two views of each sample, stacked


def test_padding_does_not_change_the_mask_of_an_element() -> None:
    short, padded = hash_elements(KEYS, 0, (6, 4, 5, 5)), hash_elements(KEYS, 0, (6, 4, 9, 9))
    assert torch.equal(short, padded[:, :, :5, :5])


def test_a_rank_with_some_of_the_elements_has_their_part_of_the_mask() -> None:
    full = hash_elements(KEYS, 2, (6, 8, 10))
    assert torch.equal(full[:, 4:], hash_elements(KEYS, 2, (6, 4, 10), offsets=(4,)))
    assert torch.equal(full[..., 5:], hash_elements(KEYS, 2, (6, 8, 5), offsets=(0, 5)))


def test_compiled_code_gives_the_same_mask() -> None:
    compiled = torch.compile(hash_elements, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(KEYS, 3, (6, 7, 11)), hash_elements(KEYS, 3, (6, 7, 11)))


def test_the_threshold_keeps_its_share() -> None:
    numbers = hash_elements(KEYS, 0, (6, 100, 100))
    for p in (0.1, 0.5, 0.9):
        assert abs(float((numbers >= threshold(p)).double().mean()) - (1 - p)) < 0.01
