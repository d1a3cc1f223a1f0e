from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.optim import lr_scheduler

from resumable import points, require_same_end, trainer


def test_a_multi_step_scheduler_inside_another_one_resumes(tmp_path: Path) -> None:
    def nested(optimizer: Any) -> Any:
        parts = [lr_scheduler.LinearLR(optimizer, 0.1, 1, 3), lr_scheduler.MultiStepLR(optimizer, [2, 4])]
        return lr_scheduler.SequentialLR(optimizer, parts, [6])

    require_same_end(lambda: trainer(scheduler=nested, scheduler_interval="step"), tmp_path, points(), steps=10)


class Remembers:
    def __init__(self) -> None:
        self.seen: dict[Any, Any] = {}

    def on_step(self, record: Any) -> None:
        self.seen[(record.step, "step")] = [record.lr]

    def state_dict(self) -> Any:
        return {"seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.seen = state["seen"]


def test_the_state_of_a_callback_is_restored(tmp_path: Path) -> None:
    first, second = Remembers(), Remembers()
    one = trainer(callbacks=[first])
    one.train(points(), max_steps=3)
    one.save_checkpoint(tmp_path / "c")
    trainer(callbacks=[second]).load_checkpoint(tmp_path / "c")
    assert second.seen == first.seen and len(first.seen) == 3
