"""Layouts on one GPU: split with the CPU, recomputation, compilation, offload, and two ranks that share the GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
import tiny
from fresh import in_a_fresh_process

# Here, as what it imports sets environment variables, which a test must not leave behind.
pytest.importorskip("transformers.models.gpt2.modeling_gpt2")

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no GPU, or not asked for: make gpu"),
    # torch's own: threads of a backward open contexts late.
    pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*cuBLAS", "ignore:TensorFloat32 tensor cores"),
]

SPLIT = {"strategy": "split", "split": {"devices": ["cuda:0", "cpu"]}}
IN_PARTS = {"strategy": "split", "split": {"devices": ["cuda:0", "cpu"], "microbatches": 3}}


def trained(name: str, **changes: Any) -> tuple[paceline.Trainer, paceline.History]:
    recipe = tiny.recipe(name, **{"batch": 10, "precision": "fp64", "clip_norm": 0.5, "ema": 0.9, **changes})
    trainer = paceline.Trainer.from_config(paceline.Config.from_dict(recipe))
    return trainer, trainer.train()


@pytest.mark.parametrize("name", ["gpt", "padded-gpt", "vae", "mlp", "resnet", "hf-gpt2"])
def test_split_over_gpu_and_cpu_trains_as_one_device(name: str) -> None:
    noise_is_the_gpus = name == "vae"  # the vae's encoder, and so its noise, stays on the GPU: another generator
    _, expected = trained(name, device="cuda" if noise_is_the_gpus else "cpu")
    for changes in (SPLIT,) if name == "resnet" else (SPLIT, IN_PARTS, {**IN_PARTS, "accumulate": 2}):
        trainer, history = trained(name, **changes)
        assert {parameter.device.type for parameter in trainer.model.parameters()} == {"cuda", "cpu"}
        assert history.losses == pytest.approx(expected.losses, rel=1e-9)
        assert history.evaluations[-1]["ema_loss"] == pytest.approx(expected.evaluations[-1]["ema_loss"], rel=1e-9)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_split_with_the_cpu_first_and_in_half_precision(precision: str) -> None:
    _, expected = trained("gpt", device="cpu", precision="fp32")
    _, history = trained("gpt", precision=precision, strategy="split", split={"devices": ["cpu", "cuda:0"]})
    assert history.losses == pytest.approx(expected.losses, rel=2e-2)


class ByHand(nn.Module):
    """What a user writes who has placed the layers already."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(8, 16).to("cuda"), nn.Linear(16, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(inputs.to("cuda"))).cpu()).to("cuda")


def test_a_model_that_was_placed_by_hand_stays_there() -> None:
    model = ByHand()
    trainer = tiny.classifier_trainer(model, device="cuda", clip_norm=1.0)
    losses = trainer.train(tiny.blobs(), epochs=3).losses
    assert model.first.weight.is_cuda and not model.second.weight.is_cuda and losses[-1] < losses[0]


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.linear(inputs)))
        return hidden + paceline.noise(hidden)


def test_a_backward_in_a_thread_of_its_own_draws_again_what_the_forward_drew() -> None:
    def weights(kind: str) -> Tensor:
        torch.manual_seed(1)
        model = nn.Sequential(Noisy(), Noisy(), nn.Linear(8, 2))
        trainer = tiny.classifier_trainer(model, device="cuda", precision="fp64", recompute=kind)
        trainer.train(tiny.blobs(), epochs=2)
        return tiny.weights(trainer)

    expected = weights("off")
    assert all(torch.equal(weights(kind), expected) for kind in ("full", "every-2", "selective"))


def test_recomputation_gives_the_same_bits_and_lowers_the_peak() -> None:
    model = {"name": "gpt", "layers": 8, "width": 256, "heads": 4, "context": 128, "dropout": 0.1}
    data = {"name": "tiny-text", "context": 128}
    peaks, found = {}, {}
    for kind in ("off", "full", "every-2", "selective"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        trainer, history = trained(
            "gpt", device="cuda", batch=16, model=model, data=data, recompute=kind, train={"max_steps": 3}
        )
        peaks[kind] = torch.cuda.max_memory_allocated() - before
        found[kind] = (history.losses, tiny.weights(trainer).cpu())
        del trainer
    for losses, weights in found.values():
        assert losses == found["off"][0] and torch.equal(weights, found["off"][1])
    assert peaks["full"] < peaks["every-2"] < peaks["off"] and peaks["selective"] < peaks["off"], peaks


def test_compiled_blocks_give_the_plain_losses_recomputed_too(tmp_path: Path) -> None:
    """In a process of its own, because the compiler leaves workers behind."""
    code = """
import paceline, tiny
for compile, kind in ((False, "off"), (True, "off"), (True, "full"), (True, "selective")):
    recipe = tiny.recipe("gpt", batch=12, device="cuda", compile=compile, recompute=kind)
    print("losses", *paceline.Trainer.from_config(paceline.Config.from_dict(recipe)).train().losses)
"""
    done = in_a_fresh_process(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plain, *others = ([float(x) for x in line.split()[1:]] for line in done.stdout.splitlines() if "losses" in line)
    assert len(others) == 3
    for losses in others:
        assert losses == pytest.approx(plain, rel=1e-4)


# 151 million parameters: 0.6 GB of weights and as much of gradients, 1.2 GB of AdamW's state. The cap is 1.1 GB.
CAPPED = """
import paceline, tiny, torch
torch.cuda.set_per_process_memory_fraction(1.1e9 / torch.cuda.get_device_properties(0).total_memory, 0)
recipe = tiny.recipe(
    "gpt", batch=2, device="cuda", strategy="fsdp", fsdp={"offload": OFFLOAD}, train={"max_steps": 3},
    model={"name": "gpt", "layers": 12, "width": 1024, "heads": 16, "context": 64},
    data={"name": "tiny-text", "context": 64}, optimizer={"name": "adamw", "lr": 1e-4},
)
trainer = paceline.Trainer.from_config(paceline.Config.from_dict(recipe))
losses = trainer.train().losses
state = sum(v.numel() * v.element_size() for s in trainer.optimizer.state.values() for v in s.values())
print("trained", losses, state, torch.cuda.max_memory_allocated())
"""


def test_offload_trains_what_the_gpus_memory_does_not_hold(tmp_path: Path) -> None:
    done = in_a_fresh_process(CAPPED.replace("OFFLOAD", "True"), cwd=tmp_path)
    assert "trained" in done.stdout, done.stderr
    state, peak = (int(word) for word in done.stdout.split("]")[-1].split())
    assert state > 1.1e9 > peak
    without = in_a_fresh_process(CAPPED.replace("OFFLOAD", "False"), cwd=tmp_path)
    assert without.returncode != 0 and "out of memory" in without.stderr.lower(), without.stdout


def test_two_ranks_on_the_one_gpu_agree_with_one(tmp_path: Path) -> None:
    code = """
import json, pathlib, paceline, tiny
found = {}
for name, changes in LAYOUTS.items():
    recipe = tiny.recipe("gpt", batch=10, precision="fp64", device="cuda:0", backend="gloo", clip_norm=0.5, **changes)
    trainer = paceline.Trainer.from_config(paceline.Config.from_dict(recipe))
    history = trainer.train()
    found[name] = [history.losses, [record["grad_norm"] for record in history.steps]]
pathlib.Path(f"losses-{trainer.world.size}-{trainer.world.rank_info.rank}").write_text(json.dumps(found))
"""
    of_two = {"ddp": {"strategy": "ddp"}, "fsdp": {"strategy": "fsdp"}, "tensor": {"layout": {"tensor": 2}}}
    for ranks, layouts in ((1, {"one": {}}), (2, of_two)):
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        done = in_a_fresh_process(code.replace("LAYOUTS", repr(layouts)), *launcher, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    losses, norms = json.loads((tmp_path / "losses-1-0").read_text())["one"]
    for name, found in json.loads((tmp_path / "losses-2-0").read_text()).items():
        assert found[0] == pytest.approx(losses, rel=1e-9), name
        assert found[1] == pytest.approx(norms, rel=1e-9), name


def test_networks_of_timm_agree_under_ddp_and_fsdp(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    code = """
import json, pathlib, paceline, timm, torch
from torch.utils.data import TensorDataset
generator = torch.Generator().manual_seed(3)
images, kinds = torch.randn(50, 3, 32, 32, generator=generator), torch.arange(50) % 4
data = TensorDataset(images + 2 * kinds[:, None, None, None], kinds)
found = {}
for name, options in {"resnet18": {}, "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8}}.items():
    for strategy in STRATEGIES:
        torch.manual_seed(1)
        model = timm.create_model(name, num_classes=4, **options)
        trainer = paceline.Trainer(
            model, torch.optim.SGD(model.parameters(), lr=0.02), criterion=torch.nn.CrossEntropyLoss(), batch=10,
            strategy=strategy, precision="fp64", device="cuda:0", backend="gloo", clip_norm=1.0, run=False, quiet=True,
        )
        history = trainer.train(data, max_steps=10)
        found[f"{name} {strategy}"] = [history.losses, [record["grad_norm"] for record in history.steps]]
pathlib.Path(f"losses-{trainer.world.size}-{trainer.world.rank_info.rank}").write_text(json.dumps(found))
"""
    for ranks, strategies in ((1, ["single"]), (2, ["ddp", "fsdp"])):
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        done = in_a_fresh_process(code.replace("STRATEGIES", repr(strategies)), *launcher, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    one, two = (json.loads((tmp_path / f"losses-{ranks}-0").read_text()) for ranks in (1, 2))
    for layout, found in two.items():
        losses, norms = one[f"{layout.split()[0]} single"]
        assert losses[-1] < 0.8 * losses[0]
        assert found[0] == pytest.approx(losses, rel=1e-9), layout
        assert found[1] == pytest.approx(norms, rel=1e-9), layout


def test_copies_of_a_model_on_cpu_and_gpu_are_refused_by_name(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import tiny
from test_layouts_on_gpu import ByHand
tiny.classifier_trainer(ByHand(), device="cuda:0", backend="gloo")
"""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = in_a_fresh_process(code, *launcher, cwd=tmp_path)
    assert done.returncode != 0 and "layout.copies-on-mixed-devices" in done.stderr, done.stderr
