"""On a machine with a GPU. CI has none; what these gave is written in docs/performance.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
import tiny
from fresh import in_a_fresh_process
from paceline.errors import PacelineError

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no GPU, or not asked for: make gpu")


def train(device: str, **changes: Any) -> paceline.History:
    recipe = tiny.recipe("gpt", batch=10, device=device, precision="fp64", **changes)
    return paceline.Trainer.from_config(paceline.Config.from_dict(recipe)).train()


def test_a_launched_rank_trains_on_its_gpu_and_then_launching_from_a_process_with_cuda_is_refused(
    tmp_path: Path,
) -> None:
    code = """
import paceline, torch
def where():
    trainer = paceline.Trainer(torch.nn.Linear(2, 1), run=False, quiet=True)
    return str(trainer.world.device), str(next(trainer.model.parameters()).device)
print(paceline.launch(where))
torch.ones(1, device="cuda")
try:
    paceline.launch(where)
except paceline.errors.PacelineError as error:
    print(error.code)
"""
    done = in_a_fresh_process(code, cwd=tmp_path)
    assert "('cuda:0', 'cuda:0')" in done.stdout, done.stderr
    assert "launch.gpu-already-open" in done.stdout


def test_more_ranks_than_gpus_names_the_gpus() -> None:
    with pytest.raises(PacelineError, match="cuda:0"):
        paceline.launch(lambda: None, ranks=torch.cuda.device_count() + 1)


def test_the_gpu_gives_the_cpus_losses() -> None:
    assert train("cuda").losses == pytest.approx(train("cpu").losses, rel=1e-9)


def test_workers_and_pinned_memory_change_nothing() -> None:
    assert train("cuda", workers=2).losses == train("cuda").losses


def test_two_ranks_on_one_gpu_fall_back_to_gloo_and_give_the_same_losses(tmp_path: Path) -> None:
    code = """
import json, pathlib, paceline, tiny
config = paceline.Config.from_dict(tiny.recipe("gpt", batch=10, precision="fp64", fallback=True))
trainer = paceline.Trainer.from_config(config)
history = trainer.train()
pathlib.Path(f"losses-{trainer.world.rank_info.rank}").write_text(json.dumps([trainer.world.backend, history.losses]))
"""
    done = in_a_fresh_process(code, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nccl failed to initialize" in done.stderr
    expected = train("cuda").losses
    for rank in range(2):
        backend, losses = json.loads((tmp_path / f"losses-{rank}").read_text())
        assert backend == "gloo" and losses == pytest.approx(expected, rel=1e-9)
