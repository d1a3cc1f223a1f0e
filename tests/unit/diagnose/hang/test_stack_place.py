"""What a stack says about where a rank stands."""

from __future__ import annotations

import pdb  # noqa: T100
import subprocess
import sys
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import paceline
from paceline.diagnose.hang.stack_place import StackPlace, place_of

SEEN: list[StackPlace] = []


def look(frame: FrameType) -> None:
    SEEN.append(place_of(frame))


class Looking(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        look(sys._getframe())
        return torch.zeros(2), torch.zeros(1)


class Model(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        look(sys._getframe())
        return super().forward(inputs)


def trainer() -> paceline.Trainer:
    torch.manual_seed(0)
    return paceline.Trainer(Model(2, 1), criterion=nn.MSELoss(), batch=4, run=False, quiet=True)


def test_reading_data_names_the_line_of_the_dataset() -> None:
    SEEN.clear()
    trainer().evaluate(Looking())
    assert SEEN[0].activity == "data"
    assert SEEN[0].text.startswith("trainer.evaluate() at test_stack_place.py:")
    assert ", in __getitem__() at test_stack_place.py:" in SEEN[0].text


def test_a_model_is_no_data() -> None:
    SEEN.clear()
    trainer().train([(torch.zeros(4, 2), torch.zeros(4, 1))], epochs=1)
    assert SEEN[-1].activity == ""
    assert SEEN[-1].text.startswith("trainer.train() at test_stack_place.py:")
    assert ", in forward() at test_stack_place.py:" in SEEN[-1].text


def test_code_outside_the_trainer_is_named_by_its_own_line() -> None:
    place = place_of(sys._getframe())
    assert place.activity == ""
    assert place.text.startswith("test_stack_place.py:")


def test_a_debugger_is_recognized(monkeypatch: Any) -> None:
    monkeypatch.setattr(pdb.Pdb, "interaction", lambda self, frame, *others: SEEN.append(place_of(sys._getframe(1))))
    SEEN.clear()
    pdb.Pdb().user_line(sys._getframe())
    assert SEEN[0].activity == "debugger"


# Calls and returns at many depths, while another thread walks this stack, and the garbage collector, whenever it runs
# in that thread, lets this one go on.
WALKED = """
import gc, random, select, sys, threading
from paceline.diagnose.hang import stack_place

sys.setswitchinterval(1e-5)
walks = 0

def let_others_run(phase, info):
    if threading.current_thread() is walker:
        select.select([], [], [], 0)  # releases the GIL

def walk():
    global walks
    while walks < 300:
        stack_place.main_stack()
        stack_place.is_any_thread_in("nowhere")
        walks += 1

def first(n, *args):
    a = b = c = n
    return second(n - 1, a, b, [c]) if n > 0 else 0

def second(n, a, b, c, d=1, *rest):
    return sum(third(n - 1, each) for each in [0]) if n > 0 else 0

def third(n, a):
    return max((fourth(n - 1), 1), key=lambda each: each) if n > 0 else 0

def fourth(n):
    a = b = c = d = e = f = g = h = i = j = k = l = n
    return first(n - 1, a, b) if n > 0 else 0

walker = threading.Thread(target=walk)
gc.callbacks.append(let_others_run)
gc.set_threshold(3, 1000, 1000)
walker.start()
while walker.is_alive():
    first(random.randrange(60))
    fourth(random.randrange(30))
    third(random.randrange(40), 1)
assert walks == 300  # the walker may find things that are no frames
"""


def test_a_stack_can_be_walked_while_its_thread_runs() -> None:
    """Python 3.11 crashes if the garbage collector runs meanwhile."""
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", WALKED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
