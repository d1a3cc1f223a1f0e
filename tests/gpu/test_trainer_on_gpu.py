"""The Trainer's promises that only a GPU can show: no waiting, flags on the device, memory that runs out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import paceline
import tiny
from fresh import in_a_fresh_process
from paceline.errors import TrainError

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() == 0, reason="no GPU, or not asked for: make gpu"),
    # torch's own: the watch for waiting is a prototype, compile uses what torch deprecates, threads open contexts late.
    pytest.mark.filterwarnings(
        "ignore:Synchronization debug mode",
        "ignore:.*torch.jit",
        "ignore:.*cuBLAS",
        "ignore:TensorFloat32 tensor cores",
    ),
]


class NoWaiting:
    """Between log points every operation that waits for the GPU is an error."""

    def __init__(self, log_every: int) -> None:
        self.log_every, self.guarded = log_every, 0

    def on_step(self, record: Any) -> None:
        at_log_point = record.step % self.log_every == 0
        torch.cuda.set_sync_debug_mode("default" if at_log_point else "error")
        self.guarded += not at_log_point

    def on_log(self, record: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")

    def on_end(self, record: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    on_error = on_end


@pytest.fixture(autouse=True)
def waiting_allowed_again() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "bf16", "accumulate": 3, "clip_norm": 1.0, "ema": 0.99},
        {"precision": "fp16", "clip_norm": 1.0, "clip_value": 0.5},
        {"nonfinite": "skip", "schedule": {"name": "cosine", "warmup": 3, "steps": 40}},
        {"optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9}, "precision": "fp16"},
    ],
)
@pytest.mark.parametrize("name", ["gpt", "padded-gpt"])
def test_nothing_waits_for_the_gpu_between_log_points(name: str, settings: dict[str, Any]) -> None:
    guard = NoWaiting(log_every=8)
    recipe = tiny.recipe(name, batch=12, log_every=8, device="cuda", **settings)
    config = paceline.Config.from_dict(recipe)
    trainer = paceline.Trainer.from_config(config, callbacks=[guard])
    data, _ = tiny.tiny_text(length=64, padded=name == "padded-gpt")
    history = trainer.train(data, max_steps=32)
    assert guard.guarded == 28 and history.losses[-1] < history.losses[0]


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16", "accumulate": 2, "clip_norm": 1.0, "ema": 0.9}])
def test_channels_last_neither_waits_nor_changes_the_losses(settings: dict[str, Any]) -> None:
    def train(channels_last: bool) -> tuple[Any, list[float]]:
        guard = NoWaiting(log_every=8)
        recipe = tiny.recipe("resnet", batch=12, log_every=8, device="cuda", channels_last=channels_last, **settings)
        trainer = paceline.Trainer.from_config(paceline.Config.from_dict(recipe), callbacks=[guard])
        history = trainer.train(tiny.tiny_images(length=96)[0], max_steps=16)
        assert guard.guarded == 14
        return trainer, history.losses

    trainer, losses = train(True)
    weights = [parameter for parameter in trainer.model.parameters() if parameter.dim() == 4]
    assert weights and all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
    assert losses[:1] == pytest.approx(train(False)[1][:1], rel=1e-4 if not settings else 2e-2)


def test_the_guard_bites() -> None:
    guard = NoWaiting(log_every=8)
    trainer = tiny.classifier_trainer(device="cuda", callbacks=[guard, lambda record: record.loss.item()], log_every=8)
    with pytest.raises(RuntimeError, match="synchronizing"):
        trainer.train(tiny.blobs(), max_steps=4)


def broken(index: int) -> TensorDataset:
    inputs, targets = tiny.blobs().tensors
    inputs = inputs.clone()
    inputs[index, 3] = float("nan")
    return TensorDataset(inputs, targets)


def test_a_nan_is_found_at_the_log_point_with_the_weights_that_its_step_had() -> None:
    trainer = tiny.classifier_trainer(device="cuda", log_every=10)
    with pytest.raises(TrainError) as caught:
        trainer.train(broken(7), epochs=9)
    assert "sample 7" in str(caught.value) and torch.isfinite(tiny.weights(trainer)).all()


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_steps_that_are_not_finite_are_skipped_fused_or_not(optimizer: str) -> None:
    trainer = tiny.classifier_trainer(device="cuda", nonfinite="skip", optimizer={"name": optimizer, "lr": 1e-2})
    history = trainer.train(broken(7), epochs=3)
    assert sum(bool(record.get("skipped")) for record in history.steps) == 3
    assert torch.isfinite(tiny.weights(trainer)).all()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains(precision: str) -> None:
    history = tiny.classifier_trainer(device="cuda", precision=precision).train(tiny.blobs(), epochs=6)
    plain = tiny.classifier_trainer(device="cpu").train(tiny.blobs(), epochs=6)
    assert history.losses == pytest.approx(plain.losses, rel=2e-2)


def test_deterministic_gives_the_same_bits_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what it sets itself, but stays set

    def train() -> torch.Tensor:
        recipe = tiny.recipe("resnet", batch=12, device="cuda", deterministic=True, precision="bf16")
        trainer = paceline.Trainer.from_config(paceline.Config.from_dict(recipe))
        trainer.train()
        return tiny.weights(trainer)

    try:
        assert torch.equal(train(), train())
    finally:
        torch.use_deterministic_algorithms(False)


def test_compiled_training_gives_the_plain_losses(tmp_path: Path) -> None:
    """In a process of its own, because the compiler leaves workers behind."""
    code = """
import paceline, tiny
for compile in (False, True):
    recipe = tiny.recipe("gpt", batch=12, device="cuda", compile=compile)
    print("losses", *paceline.Trainer.from_config(paceline.Config.from_dict(recipe)).train().losses)
"""
    done = in_a_fresh_process(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plain, compiled = ([float(x) for x in line.split()[1:]] for line in done.stdout.splitlines() if "losses" in line)
    assert compiled == pytest.approx(plain, rel=1e-4)


def test_data_parallel_over_two_devices_is_the_whole_batch(tmp_path: Path) -> None:
    """One GPU taken twice: what is shown is the cutting and the adding up. NCCL leaves a socket open in its process."""
    code = """
import paceline, tiny, torch
from paceline.parallel.data_parallel import DataParallel
from paceline.models.model_call import infer_call
from paceline.models.loss_module import LossModule
device = torch.device("cuda", 0)
for loss_fn in (None, lambda model, batch: paceline.Loss(model(batch[0]).square().sum(), batch[1].sum())):
    model = tiny.classifier().to(device)
    batch = tuple(tensor.to(device) for tensor in tiny.blobs(9)[:])
    module = LossModule(model)
    module.call = infer_call(model, batch, loss_fn, None if loss_fn else torch.nn.CrossEntropyLoss())
    value, weight = module(batch)
    split, split_weight = DataParallel(module, [device, device])(batch)
    torch.testing.assert_close(split, value)
    assert (weight is None and split_weight is None) or float(split_weight) == float(weight)
    split.backward()
    assert all(p.grad is not None for p in model.parameters())
print("same")
"""
    done = in_a_fresh_process(code, cwd=tmp_path)
    assert "same" in done.stdout, done.stderr


GREEDY = """
import paceline, tiny, torch
class Greedy(torch.nn.Module):
    '''A quarter of a gibibyte a sample, and several times that in a backward, of two fifths of the GPU: other tests
    use it at the same time.'''
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)
    def forward(self, inputs):
        torch.cuda.set_per_process_memory_fraction(0.4)
        wide = self.layer(inputs)[:, :1] * torch.ones(1, 2**26, device=inputs.device)
        return self.layer(inputs) + wide.square().mean(1, keepdim=True)
"""


def test_the_finder_finds_what_fits_and_trains_with_it(tmp_path: Path) -> None:
    code = (
        GREEDY
        + """
trainer = paceline.Trainer(Greedy(), criterion=torch.nn.CrossEntropyLoss(), batch=48 * 4, micro_batch="auto", run=False)
history = trainer.train(tiny.blobs(48 * 4), max_steps=2)
print("found", trainer.config.micro_batch, "steps", len(history.steps))
"""
    )
    done = in_a_fresh_process(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = int(done.stdout.split("found ")[1].split()[0])
    assert 16 <= found <= 64 and "steps 2" in done.stdout


def test_out_of_memory_says_what_was_asked_and_free(tmp_path: Path) -> None:
    code = (
        GREEDY
        + """
trainer = paceline.Trainer(Greedy(), criterion=torch.nn.CrossEntropyLoss(), batch=400, run=False, quiet=True)
trainer.train(tiny.blobs(400), max_steps=1)
"""
    )
    done = in_a_fresh_process(code, cwd=tmp_path)
    assert "train.out-of-memory" in done.stderr and "rank 0 (cuda:0)" in done.stderr, done.stderr
    assert "tried to allocate" in done.stderr
    assert "accumulate=2 (200 instead of 400 samples at a time" in done.stderr


def test_two_ranks_share_a_batch_norm_on_the_gpu(tmp_path: Path) -> None:
    code = """
import json, pathlib, paceline, tiny
recipe = tiny.recipe("resnet", batch=10, precision="fp64", device="cuda:0", backend="gloo", accumulate=3)
trainer = paceline.Trainer.from_config(paceline.Config.from_dict(recipe))
losses = trainer.train().losses
pathlib.Path(f"losses-{trainer.world.size}-{trainer.world.rank_info.rank}").write_text(json.dumps(losses))
"""
    for ranks in (1, 2):
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        done = in_a_fresh_process(code, *launcher, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    one, two = (json.loads((tmp_path / f"losses-{ranks}-0").read_text()) for ranks in (1, 2))
    assert two == pytest.approx(one, rel=1e-9)


@pytest.mark.parametrize("large", [False, True], ids=["copied at once", "copied ahead"])
def test_masks_that_begin_in_one_micro_batch_of_an_epoch_are_seen(
    large: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their batch is looked at before it is copied to the GPU."""

    def normalized(model: Any, batch: Any) -> torch.Tensor:
        mask = (batch[1] >= 0).float()
        return ((model(batch[0])[:, 0] - 1).square() * (mask / mask.sum())).sum()

    torch.manual_seed(0)
    batches = [(torch.randn(12, 20000 if large else 6), torch.zeros(12).long()) for _ in range(2)]
    batches[1][1][-3:] = -100
    model = torch.nn.Linear(batches[0][0].shape[1], 4)
    settings: dict[str, Any] = {"accumulate": 2, "run": False, "quiet": True}
    trainer = paceline.Trainer(model, {"name": "sgd", "lr": 1e-6}, loss_fn=normalized, **settings)
    trainer.train(batches, epochs=3)
    assert "[train.loss-of-slices]" in capsys.readouterr().out
