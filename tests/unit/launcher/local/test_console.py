from __future__ import annotations

from pathlib import Path

from fresh import in_a_fresh_process

SCRIPT = """
import os
from pathlib import Path
from paceline.launcher.local.console import Console
print("before", flush=True)
Path("log").touch()
with Console({log}, {shown}):
    print("line 1", flush=True)
    print("problem", file=sys.stderr, flush=True)
    os.write(1, b"half a line")
    while "line 1" not in Path("log").read_text():
        os.sched_yield()
    {more}
print("after")
"""


def test_output_is_on_screen_and_in_the_log(tmp_path: Path) -> None:
    done = in_a_fresh_process(SCRIPT.format(log="Path('log')", shown=None, more="pass"), cwd=tmp_path)
    assert done.stdout == "before\nline 1\nhalf a lineafter\n", done.stderr
    assert done.stderr == "problem\n"
    log = (tmp_path / "log").read_text()  # two pipes: the order between them is open
    assert log.replace("problem\n", "") == "line 1\nhalf a line" and "problem\n" in log


def test_lines_of_shown_ranks_have_a_prefix(tmp_path: Path) -> None:
    (tmp_path / "rank-1").write_text("of an earlier start\n")
    script = SCRIPT.format(
        log="Path('log')",
        shown="{0: Path('log'), 1: Path('rank-1')}",
        more="Path('rank-1').write_text('of an earlier start\\nhello\\nand half a line')",
    )
    done = in_a_fresh_process(script, cwd=tmp_path)
    shown = ["[rank 0] half a line", "[rank 0] line 1", "[rank 1] and half a line", "[rank 1] hello"]
    assert sorted(done.stdout.splitlines()) == [*shown, "after", "before"]
    assert done.stderr == "[rank 0] problem\n"
