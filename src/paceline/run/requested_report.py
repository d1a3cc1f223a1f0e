"""The page about a run that its recipe asks for (`report: true`).

`paceline report` writes it, in a process of its own: neither ranks nor launchers import the page.
"""

from __future__ import annotations

import re
import subprocess
import sys

from paceline import log
from paceline.run import ledger, regular_files
from paceline.run.folder import RunFolder, short

_REQUESTED = re.compile(r"^report: true\b", re.MULTILINE)
_MAX_RECIPE = 1 << 20  # bytes
_SECONDS = 120.0  # half a second is usual
_MAX_MESSAGE = 2000  # characters, from the end


def write_all(launch: RunFolder) -> None:
    """When a launch ends: write the reports of its runs whose recipes ask for them, to their folders."""
    for folder in dict.fromkeys((launch, *ledger.opened(launch))):
        try:
            recipe = regular_files.read_bytes(folder.config, _MAX_RECIPE).decode()
        except (OSError, ValueError):
            continue
        if _REQUESTED.search(recipe):
            write(folder)


def write(folder: RunFolder) -> None:
    """A report that can't be written does not change how a run ends. The Ctrl-C that ends a run does not reach the
    process that writes its report, which has a session of its own."""
    command = [sys.executable, "-P", "-m", "paceline", "report", str(folder.path), "-o", str(folder.report)]
    try:
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_SECONDS,
            check=True,
            start_new_session=True,
        )
        log.info(f"report: {short(folder.report)}")
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        log.warning(f"the report was not written: {said[-_MAX_MESSAGE:]}")
