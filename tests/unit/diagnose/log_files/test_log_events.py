"""Each pattern has a page, and each page a pattern."""

from __future__ import annotations

import re
import time
from typing import get_args

import pytest

from paceline.diagnose import catalog
from paceline.diagnose.log_files import log_events
from paceline.diagnose.log_files.log_events import Role
from paceline.diagnose.log_files.verdict import explain_text


def test_every_code_has_a_page_and_every_page_patterns() -> None:
    codes = [signature.code for signature in log_events.signatures()]
    assert len(codes) == len({*codes}) >= 80
    assert {*codes} == {*catalog.log_pages()}
    assert {signature.role for signature in log_events.signatures()} == {*get_args(Role)}


def test_a_code_is_either_ours_or_of_a_log() -> None:
    assert not {*catalog.log_pages()} & {*catalog.own_pages()}


def test_every_page_says_what_it_looks_like_why_how_to_check_and_how_to_fix() -> None:
    for code in catalog.log_pages():
        parts = catalog.sections(code)
        assert [name for name in parts if name != "Versions"] == ["", "Looks like", "Why", "Check", "Fix"], code
        assert all(parts.values()), code


def quoted(code: str) -> list[str]:
    """The messages that a page shows, and all of them together."""
    shown = catalog.sections(code)["Looks like"]
    return [*re.findall(r"`([^`]+)`", shown), shown]


def test_what_a_page_shows_is_found() -> None:
    """At least one of the messages that a page quotes has the code of the page, as a log too."""
    assert [code for code in catalog.log_pages() if code not in _matched(quoted(code))] == []
    silent = [code for code in catalog.log_pages() if code not in {explain_text(text).code for text in quoted(code)}]
    assert silent == []


def _matched(texts: list[str]) -> set[str]:
    return {found.code for text in texts if (found := log_events.match(text))}


FRAGMENTS = [
    "it 1 ", "step 1 loss ", "ibv_reg_mr", "libcu", "Xid (", "loss is ", "exitcode ", "Socket", "socket Connect",
    "gloo", "NCCL ", "a", " ", "1", ".", "WorkNCCL(", "placement group", "rank ", "connect to a ", "Signal ", "[Rank ",
    "Input type (", "world_size ", "NaN ", "File ", "host='", "store->get(", "torch_1_1", "RuntimeError: ",
]  # fmt: skip


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_hostile_lines_take_little_time(fragment: str) -> None:
    """With quadratic patterns a line of 2,000 characters would take seconds each."""
    line = (fragment * 2000)[:2000]
    began = time.process_time()
    explain_text("\n".join(f"{line}{number}" for number in range(10)))
    assert time.process_time() - began < 4
