from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import paceline
from paceline.checkpoint.export import export
from paceline.checkpoint.local_store import locate
from resumable import points, require_same_end, trainer
from tiny import tiny_hf_gpt2


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


def test_a_hugging_face_model_is_exported_as_save_pretrained_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = tiny_hf_gpt2()
    paceline.Trainer(model, run=False, quiet=True).save_checkpoint(tmp_path / "c")
    export(locate(tmp_path / "c"), "huggingface", tmp_path / "exported")
    model.save_pretrained(tmp_path / "theirs")
    again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(report.values())
    assert type(again) is type(model)
    ids = torch.arange(12).reshape(2, 6)
    assert torch.equal(again.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    for name in ("config.json", "generation_config.json"):
        ours, theirs = (json.loads((tmp_path / folder / name).read_text()) for folder in ("exported", "theirs"))
        assert {**theirs, "dtype": None} == {**ours, "dtype": None}
