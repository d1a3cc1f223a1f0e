"""`sync` on the GPU: compression and local steps of two ranks that share it, through gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fresh import in_a_fresh_process

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no GPU, or not asked for: make gpu")

LOCAL = {"every": 4, "warmup": 2, "outer": {"name": "nesterov", "lr": 0.7}}
METHODS: dict[str, Any] = {
    "none": None,
    "fp16": "fp16",
    "bf16": "bf16",
    "int8": "int8",
    "powersgd": {"compress": "powersgd", "rank": 2},
    "local": {"every": 4, "warmup": 2},
    "diloco": LOCAL,
    "diloco-int8": {**LOCAL, "compress": "int8"},
}
CODE = """
import json, pathlib, sys, paceline, tiny
for name, sync in json.loads({methods!r}).items():
    recipe = tiny.recipe("gpt", batch=8, fallback=True, device={device!r}, sync=sync)
    trainer = paceline.Trainer.from_config(paceline.Config.from_dict(recipe))
    losses = trainer.train(tiny.tiny_text(length=400)[0], max_steps=18).losses
    if trainer.world.rank_info.rank == 0:
        pathlib.Path(name).write_text(json.dumps([trainer.world.device.type, losses]))
"""


def losses_on(device: str | None, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    code = CODE.format(methods=json.dumps(METHODS), device=device)
    done = in_a_fresh_process(code, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: json.loads((folder / name).read_text()) for name in METHODS}


def test_every_method_gives_on_the_gpu_the_losses_of_the_cpu(tmp_path: Path) -> None:
    on_cpu, on_gpu = losses_on("cpu", tmp_path / "cpu"), losses_on(None, tmp_path / "gpu")
    for name in METHODS:
        assert on_gpu[name] == ["cuda", pytest.approx(on_cpu[name][1], rel=1e-3)], name
    assert len({str(losses) for losses in on_gpu.values()}) == len(METHODS)
