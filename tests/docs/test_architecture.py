"""docs/architecture.md tells what the code does: its map, its names, and its walk through a step."""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.utils.data import TensorDataset

import architecture
import paceline
from paceline.testing import ranks

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paceline"

TEXT = architecture.PAGE.read_text()
PLACE = r"`([\w.]+)`\s+in\s+\[[\w/.]+\]\(\.\./src/paceline/([\w/.]+)\)"
WALK = [(file, name) for name, file in re.findall(PLACE, TEXT.partition("## One step")[2]) if name != "Saver"]


def defined(file: str) -> set[str]:
    """Names that a module defines: functions, classes, methods, constants."""
    found = set()
    for node in ast.parse((SOURCE / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id for each in targets if isinstance(each, ast.Name)}
    return found


def test_the_map_equals_the_code() -> None:
    """`python tools/architecture.py` rewrites it."""
    found = architecture.MAP.search(TEXT)
    assert found and found[2] == architecture.architecture_map()
    top = {path.stem for path in SOURCE.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert set(architecture.PACKAGES) == {name for name in top if not name.startswith("_")} - {"dist", "py"}
    assert {name for layer in architecture.layers() for name in layer} == set(architecture.PACKAGES)


def test_names_on_the_page_are_where_it_says() -> None:
    places = re.findall(PLACE, TEXT)
    assert len(places) > 25
    assert [f"{name} in {file}" for name, file in places if name not in defined(file)] == []


@ranks(2)
def test_the_walk_is_what_a_step_does(in_folder: Path) -> None:
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and str(SOURCE) in code.co_filename:
            calls.append((os.path.relpath(code.co_filename, SOURCE), code.co_qualname))

    class Trace:
        def on_step(self, record: object) -> None:
            step = record.step  # type: ignore[attr-defined]
            if step in (2, 4):
                sys.setprofile(note if step == 2 else None)

    data = TensorDataset(torch.ones(64, 4), torch.ones(64, 1))
    trainer = paceline.Trainer(
        nn.Linear(4, 1), criterion=nn.MSELoss(), callbacks=[Trace()], strategy="ddp", batch=8, clip_norm=1.0, ema=0.9,
        log_every=3, run="walk", quiet=True,
    )  # fmt: skip
    trainer.train(data, max_steps=5)
    assert len(WALK) > 15
    remaining = iter(calls)
    missing = [place for place in WALK if place not in remaining]  # `in` consumes, so their order counts
    assert missing == [], missing
