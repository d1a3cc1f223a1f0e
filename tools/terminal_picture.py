"""The picture of the README: a real run in a terminal, from start to end.

    python tools/terminal_picture.py

Runs `paceline train` in a terminal of 110 columns, and writes docs/images/terminal.svg.
"""

from __future__ import annotations

import os
import pty
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "terminal.svg"
COLUMNS = 110
COMMANDS = (["train", "-n", "2"],)


def output_of(arguments: list[str], cwd: str) -> str:
    """What a command writes to a terminal."""
    pid, descriptor = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.environ.update(COLUMNS=str(COLUMNS), TERM="xterm-256color", OMP_NUM_THREADS="1")
        os.execv(sys.executable, [sys.executable, "-m", "paceline", *arguments])
    pieces = []
    while True:
        try:
            piece = os.read(descriptor, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        pieces.append(piece)
    _, status = os.waitpid(pid, 0)
    assert status == 0, b"".join(pieces).decode()
    return b"".join(pieces).decode()


def as_left_on_screen(text: str) -> str:
    """Without what was overwritten: a progress bar draws its line again and again."""
    text = re.sub(r"\x1b\[\?25[lh]", "", text).replace("\r\n", "\n")
    lines: list[str] = []
    for line in text.split("\n"):
        ups = len(re.findall(r"\x1b\[1A", line))
        del lines[len(lines) - ups :]
        lines.append(re.sub(r"\x1b\[(?:1A|2K|K)", "", line).rpartition("\r")[2])
    return "\n".join(lines)


def main() -> None:
    console = Console(record=True, width=COLUMNS, file=Path(os.devnull).open("w"), force_terminal=True)  # noqa: SIM115
    with tempfile.TemporaryDirectory() as folder:
        for arguments in COMMANDS:
            console.print(Text.assemble(("$ ", "bold green"), ("paceline " + " ".join(arguments), "bold")))
            console.print(Text.from_ansi(as_left_on_screen(output_of(arguments, folder)).strip()), soft_wrap=False)
            console.print()
    IMAGE.parent.mkdir(exist_ok=True)
    svg = console.export_svg(title="paceline")
    IMAGE.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S))  # a page must not ask for fonts elsewhere
    print(IMAGE)


if __name__ == "__main__":
    main()
