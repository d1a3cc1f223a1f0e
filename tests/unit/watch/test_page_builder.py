"""The page as one document."""

from __future__ import annotations

import base64
import hashlib
import json
import re

from paceline.watch import page_builder


def inline(kind: str, page: str) -> list[str]:
    return re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.S)


def test_only_our_script_and_style_are_allowed() -> None:
    body, policy = page_builder.live_page()
    page = body.decode()
    for kind, directive in (("script", "script-src"), ("style", "style-src")):
        (text,) = inline(kind, page)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy and "connect-src 'self'" in policy
    assert not re.search(r"<[^>]*\s(style|on\w+)=", re.sub(r"<script>.*?</script>", "", page, flags=re.S))
    assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write)\b|\beval\(|\bFunction\(", page)


def test_a_report_loads_nothing() -> None:
    page = page_builder.standalone_page({"runs": []}).decode()
    assert "http-equiv" in page and "connect-src" not in page
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", re.sub(r"<script>.*?</script>", "", page, flags=re.S))
    assert "http://" not in page and "https://" not in page


def test_values_cannot_end_their_element() -> None:
    odd = {"a": "</script><script>alert(1)</script>", "b": "<!--", "c": "<!--script--><!--style-->\u2028"}
    page = page_builder.standalone_page(odd).decode()
    assert page.count("<script>") == 1 and page.count("</script>") == 2
    values = re.search(r'id="values">(.*?)</script>', page, re.S)
    assert values is not None and json.loads(values[1]) == odd
