"""Options of `paceline bench comm`, and how they reach the ranks."""

from __future__ import annotations

import pytest

from paceline.errors import LaunchError
from paceline.tools.bench.comm_request import (
    SIZES,
    CommRequest,
    format_size,
    parse_collectives,
    parse_sizes,
    require_peers,
)


def test_sizes_have_units_and_are_sorted() -> None:
    assert parse_sizes("1MiB, 64kib,512,2 GiB,512B") == (512, 65536, 1 << 20, 2 << 30)
    assert [format_size(size) for size in (512, 1020, 65536, 3 << 19, 2 << 30)] == [
        "512 B", "1020 B", "64 KiB", "1.5 MiB", "2 GiB",
    ]  # fmt: skip
    assert (format_size(SIZES[0]), format_size(SIZES[-1])) == ("1 KiB", "256 MiB")


@pytest.mark.parametrize("text", ["1KB", "", "1MiB,", "-1KiB", "many", "0", "8", "1e6"])
def test_a_size_that_is_none_is_named(text: str) -> None:
    with pytest.raises(LaunchError, match="Invalid size in --sizes") as caught:
        parse_sizes(text)
    assert caught.value.code == "launch.bad-options"


def test_an_unknown_collective_gets_a_suggestion() -> None:
    assert parse_collectives("all-reduce,broadcast") == ("all_reduce", "broadcast")
    with pytest.raises(LaunchError, match=r"'allreduce'[\s\S]*did you mean 'all_reduce'"):
        parse_collectives("broadcast,allreduce")


def test_one_rank_has_nobody_to_talk_to() -> None:
    require_peers(2)
    with pytest.raises(LaunchError, match=r"single rank, which communicates with nobody[\s\S]*-n 2") as caught:
        require_peers(1)
    assert caught.value.code == "launch.one-rank"


def test_a_request_reaches_ranks_unchanged() -> None:
    request = CommRequest(("broadcast",), (1024,), 2.5, "gloo", "cpu", "-", "out.html", {"model": {"name": "gpt"}})
    assert CommRequest.from_text(request.to_text()) == request


def test_advice_needs_a_fit_of_all_reduce() -> None:
    CommRequest(recipe={}).require_fit()
    CommRequest(("broadcast",)).require_fit()
    for request in (CommRequest(("broadcast",), recipe={}), CommRequest(sizes=(1024,), recipe={})):
        with pytest.raises(LaunchError, match="needs all_reduce"):
            request.require_fit()
