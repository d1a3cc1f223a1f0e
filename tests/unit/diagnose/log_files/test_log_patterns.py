"""Each pattern has a page, and each page a pattern."""

from __future__ import annotations

import re
from typing import get_args

from paceline.diagnose import catalog
from paceline.diagnose.log_files import log_patterns, log_scan
from paceline.diagnose.log_files.log_patterns import Role


def test_every_code_has_a_page_and_every_page_patterns() -> None:
    codes = [signature.code for signature in log_patterns.signatures()]
    assert len(codes) == len({*codes}) >= 80
    assert {*codes} == {*catalog.log_pages()}
    assert {signature.role for signature in log_patterns.signatures()} == {*get_args(Role)}


def test_a_code_is_either_ours_or_of_a_log() -> None:
    assert not {*catalog.log_pages()} & {*catalog.own_pages()}


def test_every_page_says_what_it_looks_like_why_how_to_check_and_how_to_fix() -> None:
    for code in catalog.log_pages():
        parts = catalog.sections(code)
        assert [name for name in parts if name != "Versions"] == ["", "Looks like", "Why", "Check", "Fix"], code
        assert all(parts.values()), code


def test_what_a_page_shows_is_found() -> None:
    """At least one of the messages that a page quotes has the code of the page."""
    silent = []
    for code in catalog.log_pages():
        shown = catalog.sections(code)["Looks like"]
        matched = [
            found.code for text in [*re.findall(r"`([^`]+)`", shown), shown] if (found := log_patterns.match(text))
        ]
        if code not in matched:
            silent.append(code)
    assert silent == []


def test_a_large_log_is_searched_for_words_that_failures_contain() -> None:
    """Nearly all messages do; the lines around one do where it does not."""
    texts = [
        text for code in catalog.log_pages() for text in re.findall(r"`([^`]+)`", catalog.sections(code)["Looks like"])
    ]
    known = [text for text in texts if log_patterns.match(text)]
    assert len(known) > 150
    found = [text for text in known if any(word in text.encode() for word in log_scan.WORDS)]
    assert len(found) / len(known) > 0.5
