"""DynamicDDP that train apart (`sync.every`): what they show and save is their mean, and they resume as they were."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import tiny
from faults import worlds
from paceline import Trainer, dist
from paceline.checkpoint.export import export
from paceline.checkpoint.local_store import locate
from paceline.models.weights import checksum
from paceline.parallel.shards import local_shard
from paceline.train.checkpointing import saver

EVERY, SAVED, STEPS = 3, 4, 7  # a save in the middle of the second round, and an end in that of the third
DILOCO = {"every": EVERY, "outer": {"name": "nesterov", "lr": 0.7}, "compress": "int8"}
HSDP = {"layout": {"replicate": 2, "shard": 2}}
FP16 = {"precision": "fp16", "scaler": {"initial": 256.0, "growth_interval": 3}}
OTHERS = tiny.blobs(20, first=1)
Action = Callable[[Trainer], Any]


def with_norm() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def trainer_of(**changes: Any) -> Trainer:
    return tiny.classifier_trainer(with_norm(), **{"sync": DILOCO, "ema": 0.9, "log_every": 2, **changes})


class After:
    """A callback: what to do with the trainer after a step. At the end of train() all replicas get the mean."""

    def __init__(self, actions: dict[int, Action]) -> None:
        self.actions, self.results = actions, dict[int, Any]()
        self.trainer: Trainer | None = None

    def on_step(self, record: Any) -> None:
        assert self.trainer is not None
        if record.step in self.actions:
            self.results[record.step] = self.actions[record.step](self.trainer)


def train(actions: dict[int, Action], load: Path | None = None, val: Any = None, **changes: Any) -> dict[int, Any]:
    """The results of the actions; training ends with the last one."""
    after = After(actions)
    after.trainer = trainer = trainer_of(callbacks=[after], **changes)
    if load is not None:
        trainer.load_checkpoint(load)
    trainer.train(tiny.blobs(), val, max_steps=max(actions))
    return after.results


def saves(folder: Path, **options: Any) -> Action:
    return lambda trainer: trainer.save_checkpoint(folder, **options)


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Everything that this rank has of weights, EMA and optimizer state."""
    engine = trainer._engine
    assert engine.features.average is not None
    found = {"scale": torch.tensor(trainer.scaler.get_scale())}
    found |= {name: local_shard(value).clone() for name, value in trainer.model.state_dict().items()}
    found |= {f"ema/{name}": value.clone() for name, value in engine.features.average.state_dict().items()}
    names = [name for names in engine.bound.names for name in names]
    for name, state in zip(names, trainer.optimizer.state.values(), strict=True):
        found |= {f"optimizer/{name}/{key}": local_shard(value).clone() for key, value in state.items()}
    return found


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


def mean_of(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """By hand."""
    means = {name: value.double() for name, value in values.items()}
    for mean in means.values():
        dist.all_reduce(mean, op="mean")
    return {name: mean.to(values[name].dtype) for name, mean in means.items()}


def weights_in(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if "/" not in name and name != "scale"}


def in_checkpoint(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name if "/" in name else f"model/{name}": value for name, value in state.items() if name != "scale"}


def set_own_scale(trainer: Trainer) -> None:
    """As if replicas had skipped different steps."""
    if trainer.scaler.is_enabled():
        trainer.scaler._scale.fill_(64.0 * (1 + dist.rank()))


@pytest.mark.parametrize(("ranks", "settings"), [(2, FP16), (4, HSDP)])
def test_a_run_saved_in_the_middle_of_a_round_resumes_with_the_same_bits(
    tmp_path: Path, ranks: int, settings: dict[str, Any]
) -> None:
    folder = tmp_path / "c"

    def body() -> list[Any]:
        whole = train({1: set_own_scale, STEPS: state_of}, **settings)[STEPS]
        train({1: set_own_scale, SAVED: saves(folder)}, **settings)
        resumed = train({STEPS: state_of}, folder, **settings)[STEPS]
        return [differing(whole, resumed), differing(mean_of(whole), whole) != []]

    assert worlds.values(ranks, body) == [[[], True]] * ranks


def recognize(trainer: Trainer) -> dict[str, Any]:
    own = state_of(trainer)
    shown = {"weights": trainer.state_dict(), "loss": trainer.evaluate(OTHERS), "outputs": trainer.predict(OTHERS)}
    with trainer.ema_weights():
        shown["ema"] = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
        shown["ema_loss"] = trainer.evaluate(OTHERS)
    return {**shown, "changed": differing(own, state_of(trainer)), "mean": mean_of(own)}


def loss_of(model: nn.Module, **weights: Tensor) -> tuple[Tensor, float]:
    model.load_state_dict({**model.state_dict(), **weights})
    inputs, targets = OTHERS.tensors
    outputs = model.eval()(inputs)
    return outputs, nn.functional.cross_entropy(outputs, targets).item()


def test_evaluations_and_state_dicts_are_of_the_mean_and_leave_the_run_as_it_was() -> None:
    def body() -> list[Any]:
        untouched = train({STEPS: state_of})[STEPS]
        looked = train({SAVED: recognize, STEPS: state_of}, val=OTHERS, eval_every=1)
        seen, model = looked[SAVED], with_norm()
        mean = weights_in(seen["mean"])
        torch.testing.assert_close(seen["weights"], mean)
        outputs, loss = loss_of(model, **mean)
        torch.testing.assert_close(seen["outputs"], outputs.detach())
        averaged = {name: seen["mean"][f"ema/{name}"] for name in seen["ema"]}
        torch.testing.assert_close(seen["ema"], averaged)
        assert [seen["loss"], seen["ema_loss"]] == pytest.approx([loss, loss_of(model, **averaged)[1]], rel=1e-5)
        return seen["changed"] + differing(untouched, looked[STEPS])

    assert worlds.values(2, body) == [[], []]


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Of a checkpoint of replicated parameters."""
    return {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}


def test_a_checkpoint_holds_the_mean_and_what_each_replica_had(tmp_path: Path) -> None:
    def body() -> Any:
        mean = train({SAVED: lambda each: (saves(tmp_path / "between")(each), mean_of(state_of(each)))})[SAVED][1]
        train({SAVED: saves(tmp_path / "weights", include_optimizer=False), 2 * EVERY: saves(tmp_path / "round")})
        if dist.rank():
            return None
        saved = tensors_in(tmp_path / "between")
        averaged = in_checkpoint(mean)
        torch.testing.assert_close({name: saved[name] for name in averaged}, averaged)
        export(locate(tmp_path / "between"), "safetensors", tmp_path / "exported.safetensors")
        torch.testing.assert_close(load_file(tmp_path / "exported.safetensors"), weights_in(mean))
        assert not [name for name in tensors_in(tmp_path / "weights") if name.startswith(("replicas/", "outer/"))]
        own = [name.split("/") for name in tensors_in(tmp_path / "round") if name.startswith("replicas/")]
        return [sorted({parts[1] for parts in own}), sorted({parts[2] for parts in own})]

    # Right after a round weights are equal, and stored once.
    assert worlds.values(2, body)[0] == [["0", "1"], ["ema", "optimizer", "outer"]]


@pytest.mark.parametrize("ranks", [1, 3])
def test_on_another_number_of_replicas_all_start_from_the_mean(tmp_path: Path, ranks: int) -> None:
    folder = tmp_path / "c"

    def load() -> list[str]:
        trainer = trainer_of(quiet=False)
        trainer.load_checkpoint(folder)
        steps, saved = trainer._engine.features.local_steps, tensors_in(folder)
        loaded = in_checkpoint(state_of(trainer))
        if steps is not None:
            assert not any(value.any() for value in steps.local_state()["feedback"].values())
            for kind, tensors in steps.state_dict().items():
                loaded |= {f"outer/{kind}/{name}": value.clone() for name, value in tensors.items()}
        trainer.train(tiny.blobs(), max_steps=STEPS)
        return differing(loaded, {name: saved[name] for name in loaded})

    worlds.values(2, lambda: train({SAVED: saves(folder)}) and None)
    ended = worlds.run(ranks, load)
    assert [each.value for each in ended] == [[]] * ranks, ended
    assert "the checkpoint is of 2 replicas that trained apart" in ended[0].output


def test_a_checkpoint_without_local_steps_starts_a_round(tmp_path: Path) -> None:
    folder = tmp_path / "c"

    def body() -> list[Any]:
        train({SAVED: saves(folder)}, sync=None)
        dist.barrier()
        used, fresh = trainer_of(), trainer_of()
        used.train(tiny.blobs(), max_steps=STEPS)  # it has outer weights and momentum, of another run
        results = []
        for trainer in (used, fresh):
            trainer.load_checkpoint(folder)
            trainer.train(tiny.blobs(), max_steps=STEPS)
            results.append(state_of(trainer))
        return differing(*results)

    assert worlds.values(2, body) == [[], []]


def run_in(folder: Path, fail: Callable[[], Any] | None = None) -> Callable[[], Any]:
    """A run that saves in the middle of each round, and fails after another step."""

    def body() -> Any:
        after = After({STEPS: state_of} | ({} if fail is None else {SAVED + 1: lambda trainer: fail()}))
        settings = {"save_every": SAVED, "checkpoint": {"background": fail is None}, "log_every": 1, "quiet": False}
        run = {"run": str(folder / "r"), "resume": "auto", "callbacks": [after]}
        after.trainer = trainer = trainer_of(**settings, **run)
        began = trainer.step_count
        trainer.train(tiny.blobs(), max_steps=STEPS)
        return [began, {name: checksum(value) for name, value in after.results[STEPS].items()}]

    return body


def kill_second() -> None:
    if dist.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def raise_mine() -> None:
    raise ValueError("mine")


def saved_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "r" / "checkpoints").glob("step-*"))


def test_an_error_saves_the_mean_of_all_replicas_or_nothing_and_the_run_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "_ON_ERROR_SECONDS", 0.2)
    whole, killed, raised = tmp_path / "whole", tmp_path / "killed", tmp_path / "raised"
    states = [state for _, state in worlds.values(2, run_in(whole))]

    ended = worlds.run(2, run_in(killed, kill_second))
    assert (ended[0].status, ended[1].status) == (1, -signal.SIGKILL)
    assert "was not saved: replicas train apart (sync.every), and not all ranks reached the save" in ended[0].output
    assert saved_in(killed) == [f"step-{SAVED:06}"]
    assert worlds.values(2, run_in(killed)) == [[SAVED, state] for state in states]

    monkeypatch.undo()  # all ranks reach this one, however slow the machine is
    ended = worlds.run(2, run_in(raised, raise_mine))
    assert [each.kind for each in ended] == ["ValueError", "ValueError"]
    assert saved_in(raised) == [f"step-{SAVED:06}", f"step-{SAVED + 1:06}"]
    assert worlds.values(2, run_in(raised)) == [[SAVED + 1, state] for state in states]
