"""Bytes of gradients by method."""

from __future__ import annotations

from paceline.plan.gradient_bytes import as_matrix, dense_bytes, is_compressed, powersgd_bytes


def test_dense_gradients_are_four_bytes_per_value() -> None:
    assert dense_bytes([(2048, 2048), (2048,), ()]) == 4 * (2048 * 2048 + 2048 + 1)


def test_a_matrix_is_sent_as_two_factors_and_a_vector_as_it_is() -> None:
    found = powersgd_bytes([(2048, 1024), (2048,)], rank=2, min_ratio=2.0)
    assert found == (4 * 2 * 2048, 4 * 2 * 1024, 4 * 2048)
    assert found.total == 4 * (2 * 2048 + 2 * 1024 + 2048)


def test_a_kernel_is_a_matrix_of_its_output_channels() -> None:
    assert as_matrix((64, 32, 3, 3)) == (64, 288)
    assert powersgd_bytes([(64, 32, 3, 3)], rank=1, min_ratio=2.0).total == 4 * (64 + 288)


def test_a_matrix_that_would_shrink_too_little_is_not_compressed() -> None:
    assert is_compressed((8, 8), 2, 2.0)  # 32 values instead of 64
    assert not is_compressed((8, 8), 2, 2.1) and not is_compressed((8, 8), 4, 2.0) and not is_compressed((64,), 1, 1.0)
    assert powersgd_bytes([(8, 8)], rank=4, min_ratio=2.0) == (0, 0, 4 * 64)
