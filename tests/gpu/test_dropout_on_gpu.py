"""Dropout by sample on a GPU: the masks of a CPU, in one kernel, on any number of ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Subset

import paceline
from fresh import in_a_fresh_process
from paceline.models.dropout.functions import by_sample
from paceline.models.gpt import GPT
from paceline.runtime.noise import NoiseContext

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no GPU, or not asked for: make gpu"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

SHAPES = [(6, 128, 768), (6, 4, 33, 33), (6, 7), (6,), (24, 5, 33), (6, 3, 4, 5, 6), (6, 200, 1500)]


@dataclass
class Rows:
    samples: int = 6
    start: int = 5
    step: int = 3
    step_samples: int = 12


def dropped(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The output of a second dropout of a step, and the gradient of its input, for an input of ones."""
    inputs = torch.ones(shape, device=device, dtype=dtype, requires_grad=True)
    with NoiseContext(0, keys=by_sample(nn.Identity(), [], 0, torch.device(device))) as draw:
        draw.begin(Rows())
        functional.dropout(inputs, 0.3)
        outputs = functional.dropout(inputs, 0.3)
        draw.end()
    outputs.sum().backward()
    assert inputs.grad is not None
    return outputs.detach().cpu(), inputs.grad.cpu()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_kernel_has_the_masks_of_the_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    outputs, gradients = dropped(shape, "cuda", dtype)
    expected, _ = dropped(shape, "cpu", dtype)
    assert torch.equal(outputs, expected) and torch.equal(gradients, outputs)


CODE = """
import json, pathlib, sys, torch, paceline
from transformers import GPT2Config, GPT2LMHeadModel
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
tokens = torch.randint(3, 64, (48, 16), generator=torch.Generator().manual_seed(0))
class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return len(tokens)
    def __getitem__(self, index):
        return {"input_ids": tokens[index], "labels": tokens[index]}
losses = []
for settings in SETTINGS:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    trainer = paceline.Trainer(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), batch=12, precision="fp64", device="cuda:0",
        backend="gloo", run=False, **settings)
    losses.append(trainer.train(Tokens(), max_steps=4).losses)
pathlib.Path(f"losses-{trainer.world.rank_info.rank}").write_text(json.dumps(losses))
"""


def losses(folder: Path, ranks: int, *settings: dict[str, Any]) -> tuple[list[list[float]], str]:
    """The losses of some steps with each of these settings, and what was printed."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}") if ranks > 1 else ()
    done = in_a_fresh_process(CODE.replace("SETTINGS", repr(settings)), *launcher, cwd=folder, timeout=LIMIT / 2)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "losses-0").read_text()), done.stdout + done.stderr


# Four interpreters import torch and transformers, three of them open CUDA, and one compiles GPT-2 from a cold cache: a
# minute on a machine of its own, several where four workers do that.
LIMIT = 1200.0


@pytest.mark.timeout(LIMIT)
def test_gpt2_with_dropout_has_the_same_loss_on_two_ranks_and_compiled(tmp_path: Path) -> None:
    cases = ({}, {"compile": True}, {"accumulate": 3})
    (one, *others), _ = losses(tmp_path, 1, *({"dropout": "exact", **settings} for settings in cases))
    [on_two_ranks], _ = losses(tmp_path, 2, {"dropout": "exact"})
    for other, settings in zip([*others, on_two_ranks], [*cases[1:], "two ranks"], strict=True):
        assert other == pytest.approx(one, rel=1e-9), settings


def test_fused_attention_is_named(tmp_path: Path) -> None:
    assert "fused attention" in losses(tmp_path, 1, {"dropout": "by-sample"})[1]


def test_steps_with_dropout_do_not_wait_for_the_gpu() -> None:
    def no_waiting(record: Any) -> None:
        torch.cuda.set_sync_debug_mode("error" if record.step < 9 else "default")

    trainer = paceline.Trainer(GPT(2, 32, 4, 64, 16, dropout=0.1), callbacks=[no_waiting], run=False, log_every=100)
    rows = torch.randint(64, (96, 17), generator=torch.Generator().manual_seed(0))
    try:
        trainer.train(Subset([{"inputs": row[:-1], "targets": row[1:]} for row in rows], range(96)), max_steps=9)
    finally:
        torch.cuda.set_sync_debug_mode("default")
