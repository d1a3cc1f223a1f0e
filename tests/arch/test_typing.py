"""Users' own type checkers see paceline's types (PEP 561)."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
USER_CODE = """
import torch
from torch import nn

import paceline


class Net(nn.Module):
    model_spec = paceline.ModelSpec(blocks=("layers",))


trainer = paceline.Trainer(Net(), torch.optim.SGD(Net().parameters(), lr=0.1), strategy="fsdp", batch=8, ema=0.99)
history = trainer.train([torch.ones(8, 1)], epochs=1)
reveal_type(trainer)
reveal_type(history)
reveal_type(history.losses[0])
reveal_type(paceline.Config.from_file("recipe.yaml").batch)
reveal_type(paceline.dist.rank())
paceline.Trainer(Net(), precision="fp7")
trainer.train([], epochs="three")
"""


def use_results_of_lint(folder: Path) -> None:
    """With the same settings for other modules, mypy takes what it found in torch by `make lint` from its cache: 1 s of
    CPU time instead of 20. The script itself is checked with --strict."""
    settings = (ROOT / "pyproject.toml").read_text().partition("[tool.mypy]")[2].partition("[tool.pytest")[0]
    installed = re.sub(r"^(packages|mypy_path) = .*\n", "", settings, flags=re.M)
    own = 'module = ["train"]\ndisallow_untyped_calls = true\ndisallow_subclassing_any = true\n'
    (folder / "pyproject.toml").write_text(f"[tool.mypy]{installed}[[tool.mypy.overrides]]\n{own}")
    if (ROOT / ".mypy_cache").exists():
        shutil.copytree(ROOT / ".mypy_cache", folder / ".mypy_cache")


def test_a_users_mypy_sees_the_public_types_and_finds_mistakes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(USER_CODE)
    use_results_of_lint(tmp_path)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-codes", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    found = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    notes = [line.removeprefix("note: Revealed type is ").strip('"') for line in found if "Revealed type" in line]
    mistakes = [line for line in found if line.startswith("error")]
    assert [note.rpartition(".")[2] for note in notes[:2]] == ["Trainer", "History"], done.stdout
    assert notes[2].endswith("float") and "int" in notes[3] and notes[4].endswith("int"), done.stdout
    assert len(mistakes) == 2, done.stdout
    assert "fp7" in mistakes[0] or "precision" in mistakes[0]
    assert '"epochs"' in mistakes[1] or "epochs" in mistakes[1]
