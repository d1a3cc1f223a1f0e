"""Runs a script in a new process, as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def in_a_fresh_process(code: str, *command: str, cwd: Path, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    """CUDA that was opened here could not be used by forked ranks."""
    (cwd / "script.py").write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n{code}")
    return subprocess.run(
        [sys.executable, *command, "script.py"],
        cwd=cwd,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
