"""Users' own type checkers see paceline's types (PEP 561)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_a_users_mypy_sees_the_public_types_and_finds_mistakes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(USER_CODE)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-codes", script.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    found = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    notes = [line.removeprefix("note: Revealed type is ").strip('"') for line in found if "Revealed type" in line]
    mistakes = [line for line in found if line.startswith("error")]
    assert [note.rpartition(".")[2] for note in notes[:2]] == ["Trainer", "History"], done.stdout
    assert notes[2].endswith("float") and "int" in notes[3] and notes[4].endswith("int"), done.stdout
    assert len(mistakes) == 2, done.stdout
    assert "fp7" in mistakes[0] or "precision" in mistakes[0]
    assert '"epochs"' in mistakes[1] or "epochs" in mistakes[1]
