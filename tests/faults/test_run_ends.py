"""However a run was started, and however it ended: terminal, `ls`, `show`, page, `--json` and `explain` agree, and are
right. `benchmarks/run_ends.py` writes the table of all of them (docs/run-ends.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

import forked
import nodes
from faults import run_ends
from paceline.run import ledger
from paceline.run.folder import RunFolder

# Each end, and each start but torchrun (which takes 6 CPU seconds), at least once.
ALWAYS = {
    ("python", "success"), ("python, own loop", "success"), ("paceline launch", "exception in model"),
    ("paceline train", "exception in data"),
    ("paceline.launch(fn)", "exception in callback"), ("python", "exception in main"), ("python", "SIGINT"),
    ("python, own loop", "SIGINT"), ("paceline.launch(fn)", "SIGTERM"), ("paceline launch", "SIGKILL"),
    ("python", "SIGKILL"), ("paceline.launch(fn)", "SIGSEGV"), ("paceline launch, own loop", "os._exit"),
    ("python", "sys.exit"), ("paceline launch", "hang, Ctrl-C"), ("paceline launch", run_ends.KILLED_LAUNCHER),
}  # fmt: skip
ALL = [(start, way) for start in run_ends.STARTS for way in run_ends.WAYS]


@pytest.mark.parametrize(
    ("start", "way"),
    [*sorted(ALWAYS), *(pytest.param(*each, marks=pytest.mark.nightly) for each in ALL if each not in ALWAYS)],
)
def test_all_say_the_same_about_the_end_of_a_run(tmp_path: Path, start: str, way: str) -> None:
    with nodes.launchers(tmp_path) as launch:
        seen = run_ends.see(start, way, tmp_path, launch)
    assert run_ends.disagreements(start, way, seen) == [], f"{seen.terminal}\n{seen.show}\n{seen.explain}"


SEVERAL_RUNS = """
import torch, paceline
data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
for number in range(3):
    trainer = paceline.Trainer(torch.nn.Linear(2, 1), criterion=torch.nn.MSELoss(), batch=8, run=f"run-{number}")
    if number == 2: trainer.model.forward = None
    trainer.train(data, max_steps=1)
"""


def test_a_run_that_has_finished_does_not_fail_with_a_later_one(tmp_path: Path) -> None:
    (tmp_path / "several.py").write_text(SEVERAL_RUNS)
    assert forked.script(Path("several.py"), cwd=tmp_path).returncode
    ends = [ledger.find_end(ledger.events(RunFolder(tmp_path / "runs" / f"run-{number}"))) for number in range(2)]
    assert [end is not None and end.state for end in ends] == ["finished", "finished"]
