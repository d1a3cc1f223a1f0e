"""What a cold review found in checkpoints: each of these was wrong once, most of them without a word."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import IterableDataset, Sampler, TensorDataset

import paceline
import tiny
from paceline.checkpoint import host_copy
from paceline.checkpoint.filesystem import Filesystem
from paceline.errors import CheckpointError


class Net(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.first(inputs.to(self.first.weight.dtype))))
        result: torch.Tensor = self.last(hidden)
        return result.float()


def points(count: int = 64) -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(count, 4, generator=draw), torch.randn(count, 1, generator=draw))


def trainer(model: Callable[[], nn.Module] = Net, optimizer: Any = None, scheduler: Any = None, **settings: Any) -> Any:
    torch.manual_seed(1)
    built = model()
    made = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)))(built.parameters())
    options = {"criterion": nn.MSELoss(), "batch": 8, "run": False, "quiet": True, **settings}
    return paceline.Trainer(built, made, scheduler=scheduler(made) if scheduler else None, **options)


def require_same_end(make: Any, folder: Path, data: Any, at: int = 4, steps: int = 12, **ends: Any) -> None:
    """Trained to `at`, saved, loaded into a fresh trainer and trained on: as without a stop."""
    ends = ends or {"max_steps": steps}
    whole, first, second = make(), make(), make()
    whole.train(data, **ends)
    first.train(data, max_steps=at)
    first.save_checkpoint(folder / "c")
    second.load_checkpoint(folder / "c")
    second.train(data, **ends)
    assert second.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    expected = whole.model.state_dict()
    assert [n for n, tensor in second.model.state_dict().items() if not torch.equal(tensor, expected[n])] == []


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.last = nn.Conv2d(3, 5, 3), nn.Linear(5, 1)
        self.to(memory_format=torch.channels_last)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.convolution(images).mean((2, 3)))
        return result


def test_a_fused_optimizer_finds_its_memory_of_channels_last_weights_in_order(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    images = TensorDataset(torch.randn(64, 3, 6, 6, generator=draw), torch.randn(64, 1, generator=draw))
    fused = {"optimizer": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True)}
    require_same_end(lambda: trainer(Convolution, **fused), tmp_path, images)


class Master(torch.optim.Optimizer):
    """Keeps wide copies of narrow weights."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.003})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["master"] = parameter.float().clone()
            state["master"] -= 0.003 * parameter.grad.float()
            parameter.copy_(state["master"])


def test_wide_state_of_narrow_weights_stays_wide(tmp_path: Path) -> None:
    require_same_end(lambda: trainer(lambda: Net().bfloat16(), Master), tmp_path, points())


class Counts(Net):
    """Remembers a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return super().forward(inputs)

    def get_extra_state(self) -> torch.Tensor:
        return self.count.clone()

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.count = state


@pytest.mark.parametrize("weights_only", [False, True])
def test_extra_state_that_is_a_tensor_comes_back(tmp_path: Path, weights_only: bool) -> None:
    first, second = trainer(Counts), trainer(Counts)
    first.train(points(), max_steps=3)
    first.save_checkpoint(tmp_path / "c")
    second.load_checkpoint(tmp_path / "c", weights_only=weights_only)
    assert second.model.count == first.model.count > 0


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        data = points()
        return (data[index] for index in range(64))


def test_the_end_of_an_epoch_of_unknown_length_is_not_lost_behind_a_save(tmp_path: Path) -> None:
    def make(**settings: Any) -> Any:
        return trainer(scheduler=lambda o: lr_scheduler.StepLR(o, 1, 0.5), save_every=8, keep=None, **settings)

    whole = make(run=str(tmp_path / "a"))
    whole.train(Stream(), epochs=3)
    resumed = make(run=str(tmp_path / "b"), resume=str(tmp_path / "a" / "checkpoints" / "step-000008"))
    resumed.train(Stream(), epochs=3)
    assert resumed.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"] == 0.0125


def test_a_copy_that_is_late_has_the_weights_and_not_the_averages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the save of an epoch's last step comes its evaluation, with the averages in the model's place."""
    settled, at_once, settle = threading.Event(), host_copy._copy_all, host_copy.HostCopy.wait_for_copy

    def late(pairs: Any) -> None:
        settled.wait(60)
        at_once(pairs)

    def settling(copy: Any) -> None:
        settled.set()
        settle(copy)

    monkeypatch.setattr(host_copy, "_cores_are_busy", lambda: False)
    monkeypatch.setattr(host_copy, "_copy_all", late)
    monkeypatch.setattr(host_copy.HostCopy, "wait_for_copy", settling)
    trainer(ema=0.9, run=str(tmp_path / "r"), save_every=8, keep=None).train(Stream(), points(8), max_steps=10)
    reference, other = trainer(ema=0.9), trainer(ema=0.9)
    reference.train(Stream(), max_steps=8)
    other.load_checkpoint(tmp_path / "r" / "checkpoints" / "step-000008")
    assert torch.equal(other.model.first.weight, reference.model.first.weight)


def test_nothing_is_saved_or_loaded_inside_the_averages(tmp_path: Path) -> None:
    one = trainer(ema=0.9)
    one.train(points(), max_steps=2)
    one.save_checkpoint(tmp_path / "c")
    with one.ema_weights():
        for call in (lambda: one.save_checkpoint(tmp_path / "d"), lambda: one.load_checkpoint(tmp_path / "c")):
            with pytest.raises(CheckpointError, match=r"checkpoint\.inside-ema"):
                call()


def test_ones_own_loop_is_attended_to_after_train_and_load(tmp_path: Path) -> None:
    one = trainer(scheduler=lambda o: lr_scheduler.StepLR(o, 1, 0.5), log_every=5)
    batches = one.loader(points())
    for batch, _ in zip(batches, range(3), strict=False):
        one.training_step(batch)
    one.train(points(), epochs=2)
    for _ in range(2):
        for batch in batches:
            one.training_step(batch)
    assert one.step_count == 32 and one.optimizer.param_groups[0]["lr"] == 0.1 / 16


@pytest.mark.parametrize("own_loop", [False, True])
def test_another_number_of_samples_is_refused_though_the_steps_are_as_many(tmp_path: Path, own_loop: bool) -> None:
    one, two = trainer(), trainer()
    one.train(points(60), max_steps=3)
    one.save_checkpoint(tmp_path / "c")
    two.load_checkpoint(tmp_path / "c")
    with pytest.raises(CheckpointError, match="samples was 60, and is 63"):
        two.loader(points(63)) if own_loop else two.train(points(63), max_steps=5)


@pytest.mark.parametrize("kind", ["weights_only", "without optimizer", "file"])
@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_weights_alone_leave_no_memory_of_what_was_trained_before(tmp_path: Path, kind: str, optimizer: Any) -> None:
    source = trainer(optimizer=optimizer)
    source.train(points(), max_steps=4)
    source.save_checkpoint(tmp_path / "c", include_optimizer=kind == "weights_only")
    torch.save(source.model.state_dict(), tmp_path / "c.pt")
    used, fresh = trainer(optimizer=optimizer), trainer(optimizer=optimizer)
    used.train(points(), max_steps=9)
    for one in (used, fresh):
        path = tmp_path / ("c.pt" if kind == "file" else "c")
        one.load_checkpoint(path, weights_only=kind == "weights_only")
        assert one.step_count == (4 if kind == "without optimizer" else 0)
        one.train(points(), max_steps=12)
    assert torch.equal(used.model.first.weight, fresh.model.first.weight)


class Global(torch.optim.SGD):
    """Remembers something of no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["all"]["steps"] = 1  # type: ignore[index]
        super().step()


def test_what_an_optimizer_remembers_of_no_parameter_is_refused(tmp_path: Path) -> None:
    one = trainer(optimizer=lambda p: Global(p, lr=0.1))
    one.train(points(), max_steps=1)
    with pytest.raises(CheckpointError, match=r"checkpoint\.optimizer-state.*'all'"):
        one.save_checkpoint(tmp_path / "c")


class OwnGenerator(Sampler[int]):
    def __init__(self) -> None:
        self.draw = torch.Generator().manual_seed(0)

    def __iter__(self) -> Any:
        return iter(torch.randperm(64, generator=self.draw).tolist())

    def __len__(self) -> int:
        return 64


class CountsEpochs(OwnGenerator):
    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Any:
        self.epoch += 1
        return iter(torch.randperm(64, generator=torch.Generator().manual_seed(self.epoch)).tolist())


@pytest.mark.parametrize("sampler", [OwnGenerator, CountsEpochs])
def test_a_sampler_that_remembers_goes_on_where_it_was(tmp_path: Path, sampler: Any) -> None:
    def losses(stop: int | None) -> list[float]:
        one = trainer()
        if stop is not None:
            one.load_checkpoint(tmp_path / "c")
        data = torch.utils.data.DataLoader(points(), batch_size=8, sampler=sampler())
        history = one.train(data, max_steps=24)
        if stop is None and not (tmp_path / "c").exists():
            first = trainer()
            first.train(torch.utils.data.DataLoader(points(), batch_size=8, sampler=sampler()), max_steps=11)
            first.save_checkpoint(tmp_path / "c")
        return history.losses

    assert losses(None)[11:] == losses(11)


def test_buffers_are_mended_from_those_that_were_loaded(tmp_path: Path) -> None:
    data = points()
    data.tensors[0][32:40] = float("nan")
    settings = {"nonfinite": "skip", "shuffle": False, "clip_norm": 1.0}
    require_same_end(lambda: trainer(lambda: Net(norm=True), **settings), tmp_path, data, at=4, steps=8)


def test_a_multi_step_scheduler_inside_of_another_goes_on(tmp_path: Path) -> None:
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


def test_what_a_callback_remembers_comes_back(tmp_path: Path) -> None:
    first, second = Remembers(), Remembers()
    one = trainer(callbacks=[first])
    one.train(points(), max_steps=3)
    one.save_checkpoint(tmp_path / "c")
    trainer(callbacks=[second]).load_checkpoint(tmp_path / "c")
    assert second.seen == first.seen and len(first.seen) == 3


def test_metadata_that_would_not_be_read_again_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint\.too-much-metadata"):
        trainer().save_checkpoint(tmp_path / "c", metadata={"losses": [0.1234567] * 600_000})
    assert list(tmp_path.iterdir()) == []


def test_another_model_is_not_called_another_optimizer(tmp_path: Path) -> None:
    tiny.classifier_trainer().save_checkpoint(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"checkpoint\.other-model"):
        trainer().load_checkpoint(tmp_path / "c")


def test_what_the_recipe_changes_on_a_resume_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(run=str(tmp_path / "r"), save_every=2).train(points(), max_steps=3)
    trainer(run=str(tmp_path / "r"), resume="auto", quiet=False, clip_norm=1.0)
    said = capsys.readouterr().out
    assert "changed since this checkpoint" in said
    assert "save_every 2 → None" in said and "clip_norm None → 1.0" in said


def test_the_folder_of_a_runs_checkpoints_is_the_run(tmp_path: Path) -> None:
    trainer(run=str(tmp_path / "r")).train(points(), max_steps=3)
    resumed = trainer(run=str(tmp_path / "r"), resume=str(tmp_path / "r" / "checkpoints"))
    assert resumed.step_count == 3 and resumed.train(points(), max_steps=4).run == str(tmp_path / "r")
    with pytest.raises(CheckpointError, match="neither a run nor a checkpoint"):
        trainer(resume=str(tmp_path))


def test_the_best_step_is_saved_again_where_its_first_save_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs of data without a length end behind the save of their last step: the best one is known after it."""
    create, failures = Filesystem.create, [1]

    def fails_once(self: Filesystem, path: Path) -> int:
        if "step-000016" in str(path) and failures:
            failures.pop()
            raise OSError(28, "No space left on device")
        return create(self, path)

    monkeypatch.setattr(Filesystem, "create", fails_once)
    one = trainer(run=str(tmp_path / "r"), save_every=8, save_best=True, keep=None)
    one.train(Stream(), points(8), epochs=3)
    checkpoints = tmp_path / "r" / "checkpoints"
    assert not failures
    [best] = (checkpoints / "best").read_text().split()
    assert (checkpoints / best / "manifest.json").exists()
    assert int(best.removeprefix("step-")) == min(one_evaluations(tmp_path), key=lambda each: each["loss"])["step"]


def one_evaluations(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "r" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("evaluation")]
