"""Reports: pages that need no server."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from made_runs import make_run
from paceline.errors import LaunchError
from paceline.tools.watch import report
from paceline.tools.watch.report import write_report
from watched import HOSTILE, embedded_values, run_folder


def values_in(path: Path) -> dict[str, Any]:
    return embedded_values(path.read_text())


def test_a_report_holds_what_the_page_shows(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=300, ranks=4, failed=True)
    write_report([folder], tmp_path / "report.html")
    (run,) = values_in(tmp_path / "report.html")["runs"]
    assert run["head"]["state"] == "failed" and len(run["curves"]["loss"]["x"]) == 300
    assert run["about"]["verdict"]["rank"] == 3 and run["ranks"]["ranks"] == [0, 1, 2, 3]
    assert set(run["log"]) == {"0", "1", "2", "3"} and len(run["log"]["2"]["lines"]) == 59


def test_runs_over_each_other(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"run-{n}", steps=100, seed=n) for n in range(2)]
    write_report(folders, tmp_path / "both.html", by="time")
    values = values_in(tmp_path / "both.html")
    assert values["chosen"] == ["0", "1"] and values["by"] == "time" and len(values["runs"]) == 2


def test_logs_of_many_ranks_stay_small(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    for rank in range(100):
        folder.rank_log(rank).write_text(f"{'x' * 300}\n" * 1000)
    write_report([folder], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 2 << 20


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", config="report: true\n")
    with pytest.raises(LaunchError, match="report-not-written"):
        write_report([folder], tmp_path / "missing" / "report.html")


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", config=json.dumps({"a": HOSTILE}))
    folder.rank_log(0).write_text(HOSTILE)
    write_report([folder], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("<script") == 2 and "\x1b" not in page and "\u202e" not in page


def inline(kind: str, page: str) -> list[str]:
    return re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.S)


def test_only_our_script_and_style_are_allowed() -> None:
    body, policy = report.live_page()
    page = body.decode()
    for kind, directive in (("script", "script-src"), ("style", "style-src")):
        (text,) = inline(kind, page)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy and "connect-src 'self'" in policy
    assert not re.search(r"<[^>]*\s(style|on\w+)=", re.sub(r"<script>.*?</script>", "", page, flags=re.S))
    assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write)\b|\beval\(|\bFunction\(", page)


def test_a_report_loads_nothing() -> None:
    page = report.standalone_page({"runs": []}).decode()
    assert "http-equiv" in page and "connect-src" not in page
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", re.sub(r"<script>.*?</script>", "", page, flags=re.S))
    assert "http://" not in page and "https://" not in page


def test_values_cannot_end_their_element() -> None:
    odd = {"a": "</script><script>alert(1)</script>", "b": "<!--", "c": "<!--script--><!--style-->\u2028"}
    page = report.standalone_page(odd).decode()
    assert page.count("<script>") == 1 and page.count("</script>") == 2
    values = re.search(r'id="values">(.*?)</script>', page, re.S)
    assert values is not None and json.loads(values[1]) == odd


def test_images_are_part_of_a_report_the_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path / "run")
    folder.images.mkdir()
    with folder.media.open("w") as file:
        for step in range(30):
            folder.image("a", step).write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(200_000))
            file.write(json.dumps({"kind": "image", "name": "a", "step": step, "width": 2, "height": 2}) + "\n")
    report.write_report([folder], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    entries = embedded_values(text)["runs"][0]["media"]["entries"]
    assert [each["step"] for each in entries] == list(range(15, 30)) and len(text) < 5 << 20
    assert base64.b64decode(entries[0]["data"]).startswith(b"\x89PNG") and "img-src data:" in text
