"""The Trainer on one rank, in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

import paceline
import tiny
from paceline.checkpoint.local_store import locate
from paceline.checkpoint.reader import open_checkpoint
from paceline.errors import PacelineError


def points(n: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, generator=generator)
    return TensorDataset(x, (x @ torch.tensor([[1.0], [2.0], [-1.0]]) + 0.5))


def inputs() -> TensorDataset:
    return TensorDataset(points().tensors[0])


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def test_training_equals_the_hand_written_loop() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = paceline.Trainer(model, optimizer, criterion=nn.MSELoss(), batch=8, shuffle=False, run=False, quiet=True)
    history = trainer.train(points(), epochs=2)
    reference = linear()
    batches = [list(range(start, start + 8)) for start in range(0, 40, 8)] * 2
    tiny.hand_written_loop(reference, torch.optim.SGD(reference.parameters(), lr=0.1), points(), batches)
    assert torch.allclose(model.weight, reference.weight, rtol=1e-6)
    assert [record["step"] for record in history.steps] == list(range(1, 11))
    assert [record["epoch"] for record in history.steps] == [0] * 5 + [1] * 5
    assert {record["lr"] for record in history.steps} == {0.1}
    assert trainer.model is model and trainer.optimizer is optimizer
    assert (trainer.step_count, trainer.epoch, trainer.is_main_process) == (10, 2, True)


def test_an_optimizer_over_a_part_of_the_model_leaves_the_rest_alone(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model[1].parameters(), lr=1e-6)
    trainer = paceline.Trainer(model, optimizer, criterion=nn.MSELoss(), batch=40, clip_norm=1e9, run=False)
    norms = [record["grad_norm"] for record in trainer.train(points(), max_steps=6).steps]
    assert torch.equal(model[0].weight, before)
    assert norms[-1] == pytest.approx(norms[0], rel=1e-3)  # gradients that nobody uses do not pile up
    assert "0.weight, 0.bias" in capsys.readouterr().out


def test_a_second_call_and_a_resume_use_the_learning_rate_that_they_print(tmp_path: Path) -> None:
    def one_step(lr: float, resume: bool) -> float:
        trainer = paceline.Trainer(linear(), {"name": "sgd", "lr": lr}, criterion=nn.MSELoss(), run=False, quiet=True)
        if resume:
            trainer.load_checkpoint(tmp_path / "c")
        rate = trainer.train(points(), max_steps=2 if resume else 1).steps[0]["lr"]
        if not resume:
            trainer.save_checkpoint(tmp_path / "c")
        return float(rate)

    assert one_step(0.1, resume=False) == 0.1
    assert one_step(0.01, resume=True) == 0.01


def test_a_checkpoint_of_another_optimizer_or_model_has_a_code(tmp_path: Path) -> None:
    paceline.Trainer(linear(), {"name": "sgd"}, run=False, quiet=True).save_checkpoint(tmp_path / "c")
    with pytest.raises(PacelineError) as optimizer:
        paceline.Trainer(linear(), {"name": "adamw"}, run=False).load_checkpoint(tmp_path / "c")
    with pytest.raises(PacelineError) as model:
        paceline.Trainer(nn.Linear(4, 1), {"name": "sgd"}, run=False).load_checkpoint(tmp_path / "c")
    assert (optimizer.value.code, model.value.code) == ("checkpoint.other-optimizer", "checkpoint.other-model")


def test_evaluation_gives_back_the_mode_of_every_part() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].eval()
    trainer = paceline.Trainer(model, criterion=nn.MSELoss(), batch=8, run=False, quiet=True)
    trainer.train(points(), points(), epochs=1)
    assert [part.training for part in model] == [True, False, True]
    model.eval()
    trainer.evaluate(points())
    assert not model.training


def test_a_criterion_with_weights_follows_the_models_numbers() -> None:
    data = TensorDataset(torch.randn(8, 3), torch.tensor([0, 1] * 4))
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))
    trainer = paceline.Trainer(nn.Linear(3, 2), criterion=criterion, precision="fp64", batch=8, run=False, quiet=True)
    assert len(trainer.train(data, max_steps=2).steps) == 2


def test_a_stream_is_evaluated_once_an_epoch() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([points()[index] for index in range(20)])

    trainer = paceline.Trainer(linear(), criterion=nn.MSELoss(), batch=8, run=False, quiet=True)
    history = trainer.train(Stream(), points(), epochs=3)
    assert [record["step"] for record in history.evaluations] == [3, 6, 9]


def test_ready_batches_know_their_size_before_training_begins(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = points().tensors
    trainer = paceline.Trainer(linear(), criterion=nn.MSELoss(), micro_batch=5, run=False)
    batches = ((x[start : start + 20], y[start : start + 20]) for start in (0, 20))
    assert len(trainer.train(batches, epochs=1).steps) == 2
    assert "20" in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  batch"))


def test_trainers_under_one_launcher_are_parts_of_one_run(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    given = in_folder / "runs" / "script"
    (given / "logs").mkdir(parents=True)
    monkeypatch.setenv("PACELINE_RUN", str(given))

    def run(name: str | None) -> str | None:
        trainer = paceline.Trainer(linear(), criterion=nn.MSELoss(), batch=8, run=name)
        return trainer.train(points(), max_steps=1).run

    assert run("mine") == str(in_folder / "runs" / "mine")
    parts = {run(None), run(None)}
    assert len(parts) == 2 and all(Path(part or "").parent == in_folder / "runs" / "mine" for part in parts)
    assert "run folder:" not in capsys.readouterr().out  # the launcher has named its own


def test_a_nan_loss_is_null_in_the_file_and_never_the_best(tmp_path: Path) -> None:
    def bad(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).mean() * float("nan")

    trainer = paceline.Trainer(linear(), loss_fn=bad, batch=8, quiet=True, run=str(tmp_path / "r"), nonfinite="skip")
    history = trainer.train(points(), points(), max_steps=1)
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["loss"] is None for line in lines)
    assert history.best is None


def test_a_recipe_runs_from_python_as_the_command_line_runs_it(in_folder: Path) -> None:
    recipe = {key: value for key, value in tiny.recipe("mlp", batch=10).items() if key not in {"run", "quiet"}}
    (in_folder / "mine.yaml").write_text(yaml.safe_dump(recipe))
    config = paceline.Config.from_file("mine.yaml", ["train.max_steps=5", "log_every=2"])
    model = paceline.get_model("mlp")(config)
    trainer = paceline.Trainer.from_config(config, model)
    history = trainer.train()
    assert len(history.steps) == 5 and trainer.model is model


def test_a_run_leaves_its_recipe_derived_values_metrics_and_checkpoint(in_folder: Path) -> None:
    values = {key: value for key, value in tiny.recipe("mlp", batch=10, log_every=3).items() if key != "run"}
    config = paceline.Config.from_dict(values)
    history = paceline.Trainer.from_config(config).train()
    run = Path(history.run or "")
    assert run == in_folder / "runs" / "mlp"
    assert paceline.Config.from_file(run / "config.yaml").to_dict() == config.to_dict()
    assert json.loads((run / "derived.json").read_text())["batch"] == {"value": 10, "reason": "requested"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "evaluation" not in line]
    assert [line["loss"] for line in steps] == history.losses
    assert [line["loss"] for line in lines if "evaluation" in line] == [r["loss"] for r in history.evaluations]
    assert (run / "checkpoints" / "step-000020" / "manifest.json").is_file()
    again = paceline.Trainer.from_config(config).train()
    assert again.run == str(in_folder / "runs" / "mlp-2")


def test_run_false_writes_nothing(in_folder: Path) -> None:
    history = paceline.Trainer.from_config(paceline.Config.from_dict(tiny.recipe("mlp", batch=10))).train()
    assert history.run is None and list(in_folder.iterdir()) == []


def test_a_run_may_be_a_path(tmp_path: Path) -> None:
    recipe = tiny.recipe("mlp", batch=10, run=str(tmp_path / "here"))
    assert paceline.Trainer.from_config(paceline.Config.from_dict(recipe)).train().run == str(tmp_path / "here")


def test_a_checkpoint_resumes_as_if_training_had_not_stopped(tmp_path: Path) -> None:
    config = paceline.Config.from_dict(tiny.recipe("vae", batch=10, precision="fp64", clip_norm=10.0))
    whole = paceline.Trainer.from_config(config)
    expected = whole.train().losses
    first = paceline.Trainer.from_config(config)
    first.train(max_steps=7)
    first.save_checkpoint(tmp_path / "at-7", metadata={"note": "half way"})
    second = paceline.Trainer.from_config(config)
    assert second.load_checkpoint(tmp_path / "at-7") == {"note": "half way"}
    history = second.train(max_steps=20)
    assert [record["step"] for record in history.steps] == list(range(8, 21))
    assert history.losses == expected[7:]
    assert all(
        torch.equal(a, b) for a, b in zip(whole.state_dict().values(), second.state_dict().values(), strict=True)
    )


def test_a_run_that_repeats_a_step_keeps_both_of_its_checkpoints(tmp_path: Path) -> None:
    trainer = paceline.Trainer(linear(), criterion=nn.MSELoss(), batch=8, quiet=True, run=str(tmp_path / "r"))
    trainer.train(points(), max_steps=2)
    trainer.save_checkpoint(tmp_path / "early")
    trainer.train(points(), max_steps=4)
    trainer.load_checkpoint(tmp_path / "early")
    trainer.train(points(), max_steps=4)
    names = sorted(path.name for path in (tmp_path / "r" / "checkpoints").iterdir())
    assert names == ["latest", "step-000002", "step-000004", "step-000004-2"]


def test_training_that_is_already_done_does_nothing_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = paceline.Trainer.from_config(paceline.Config.from_dict(tiny.recipe("mlp", batch=10, quiet=True)))
    trainer.train()
    assert "took no step" not in "".join(capsys.readouterr())
    assert trainer.train().steps == []
    assert trainer.step_count == 20
    assert "train() took no step: the run is at step 20 (epochs and max_steps" in "".join(capsys.readouterr())


def test_a_checkpoint_without_optimizer_holds_weights_only(tmp_path: Path) -> None:
    trainer = paceline.Trainer(linear(), criterion=nn.MSELoss(), run=False, quiet=True, batch=8)
    trainer.save_checkpoint(tmp_path / "w", include_optimizer=False)
    assert not [
        name for name in open_checkpoint(locate(tmp_path / "w")).manifest.tensors if name.startswith("optimizer")
    ]
    other = paceline.Trainer(nn.Linear(3, 1), criterion=nn.MSELoss(), run=False, quiet=True, batch=8)
    other.load_checkpoint(tmp_path / "w")
    assert torch.equal(other.model.weight, trainer.model.weight)


def test_warm_up_and_cosine_are_seen_in_the_records() -> None:
    recipe = tiny.recipe("mlp", batch=10, schedule={"name": "cosine", "warmup": 4, "floor": 0.1})
    recipe["optimizer"] = {"name": "sgd", "lr": 1.0}
    rates = [r["lr"] for r in paceline.Trainer.from_config(paceline.Config.from_dict(recipe)).train().steps]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[12] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates == sorted(rates[:5]) + sorted(rates[5:], reverse=True)


def test_clipping_bounds_the_step_and_records_the_norm() -> None:
    model = linear()
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = paceline.Trainer(
        model, optimizer, criterion=nn.MSELoss(), batch=40, clip_norm=0.01, run=False, quiet=True
    )
    history = trainer.train(points(), max_steps=1)
    assert history.steps[0]["grad_norm"] > 1
    assert (model.weight - before).norm() <= 0.01


def test_evaluation_is_the_mean_over_all_samples_and_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    trainer = paceline.Trainer(model, criterion=nn.MSELoss(), batch=7, run=False, quiet=True)
    x, y = points().tensors
    model.eval()
    expected = nn.functional.mse_loss(model(x), y).item()
    model.train()
    assert trainer.evaluate(points()) == pytest.approx(expected, rel=1e-6)
    assert trainer.evaluate(DataLoader(points(), batch_size=6, shuffle=True, drop_last=True)) == pytest.approx(expected)
    assert model.training and all(parameter.grad is None for parameter in model.parameters())


def test_history_knows_its_best_evaluation() -> None:
    trainer = paceline.Trainer(linear(), criterion=nn.MSELoss(), batch=8, run=False, quiet=True)
    history = trainer.train(points(), points(), epochs=3)
    assert len(history.evaluations) == 3
    assert history.best == min(history.evaluations, key=lambda record: record["loss"])


def test_the_best_evaluation_of_a_history_is_that_of_save_best(in_folder: Path) -> None:
    metrics = {"score": lambda outputs, targets: {1: 0.1, 2: 0.7}.get(trainer.epoch, 0.3)}
    trainer = paceline.Trainer(
        linear(), criterion=nn.MSELoss(), batch=8, save_best="score", metrics=metrics, quiet=True
    )
    history = trainer.train(points(), points(), epochs=4)
    assert history.best is not None and history.best["score"] == pytest.approx(0.7)
    assert paceline.History.from_json(history.to_json()).best == history.best


def test_the_trainer_knows_its_device() -> None:
    trainer = paceline.Trainer(linear(), criterion=nn.MSELoss(), batch=8, run=False, quiet=True)
    assert trainer.device == torch.device("cpu")


def test_the_start_table_shows_the_rate_after_a_warm_up_and_what_was_described(capsys: Any) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 10, 1.0))
    settings: dict[str, Any] = {"criterion": nn.MSELoss(), "batch": 8, "run": False}
    paceline.Trainer(model, optimizer, scheduler=warm_up, **settings).train(points(), max_steps=1)
    paceline.Trainer(linear(), {"lr": 0.25}, **settings).train(points(), max_steps=1)
    said = capsys.readouterr().out
    assert "learning rate  0.5" in said
    assert "no optimizer was passed" not in said


def test_small_losses_are_not_printed_as_zero(capsys: Any) -> None:
    trainer = paceline.Trainer(
        linear(), loss_fn=lambda model, batch: 1e-6 * model(batch[0]).square().mean(), batch=8, run=False
    )
    trainer.train(points(), points(), epochs=1)
    [line] = [line for line in capsys.readouterr().out.splitlines() if "validation loss" in line]
    assert 0 < float(line.rpartition(" ")[2]) < 1e-3


def test_ready_loaders_train_with_their_batch_as_the_global_batch() -> None:
    trainer = paceline.Trainer(linear(), criterion=nn.MSELoss(), run=False, quiet=True)
    assert len(trainer.train(DataLoader(points(), batch_size=20), epochs=2).steps) == 4


def test_a_wrapped_model_is_unwrapped_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    model = linear()
    trainer = paceline.Trainer(nn.DataParallel(model), criterion=nn.MSELoss(), run=False)
    assert trainer.model is model
    assert "DataParallel" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None])
def test_device_takes_every_form(device: Any) -> None:
    assert paceline.Trainer(linear(), device=device, run=False).world.device == torch.device("cpu")


def test_in_plain_python_it_says_how_to_start_more_and_where_its_folder_is(in_folder: Path, capsys: Any) -> None:
    paceline.Trainer(linear(), criterion=nn.MSELoss(), batch=8).train(points(), max_steps=1)
    said = capsys.readouterr().out
    assert "\nrun folder: runs/linear\n" in said
    assert "paceline launch -n 2" in said
    assert "criterion(model(input), target)" in said
    assert "requested" in said


def test_a_model_that_can_not_take_the_batch_says_how_it_got_it() -> None:
    with pytest.raises(TypeError) as caught:
        paceline.Trainer(linear(), run=False, quiet=True).train(points(), max_steps=1)
    assert "criterion=" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: paceline.Trainer(linear(), precision="fp12"), "config.bad-value"),  # type: ignore[arg-type]
        (lambda: paceline.Trainer(linear(), bacth=3), "config.unknown-key"),  # type: ignore[call-arg]
        (lambda: paceline.Trainer(nn.ReLU(), run=False), "train.nothing-to-train"),
        (
            lambda: paceline.Trainer(linear(), torch.optim.SGD(linear().parameters()), run=False),
            "train.other-parameters",
        ),
        (lambda: paceline.Trainer(linear(), device="gpu7"), "world.bad-device"),
        (lambda: paceline.Trainer(linear(), device="cuda:31"), "world.no-such-gpu"),
        (lambda: paceline.Trainer(linear(), run=False, quiet=True).train(inputs(), max_steps=1), "train.no-loss"),
        (lambda: paceline.Trainer(linear(), run=False, quiet=True).train(points()), "config.no-end"),
        (lambda: paceline.Trainer(linear(), run=False).load_checkpoint("nowhere"), "checkpoint.missing"),
    ],
)
def test_bad_input_has_a_code(make: Any, code: str) -> None:
    with pytest.raises(PacelineError) as caught:
        make()
    assert caught.value.code == code


def test_deterministic_gives_the_same_bits_twice() -> None:
    def train() -> torch.Tensor:
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 2))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        trainer = tiny.classifier_trainer(model, deterministic=True)
        trainer.train(tiny.blobs(), epochs=2)
        return tiny.weights(trainer)

    try:
        assert torch.equal(train(), train())
    finally:
        torch.use_deterministic_algorithms(False)


def test_dp_without_several_gpus_says_what_it_does_instead(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = tiny.classifier_trainer(strategy="dp", quiet=False)
    trainer.train(tiny.blobs(), max_steps=1)
    assert 'strategy="ddp"' in capsys.readouterr().out


class Growing(Sampler[int]):
    """Ten samples in the first epoch, and ten more in each of the next."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(10 * (self.epoch + 1)))

    def __len__(self) -> int:
        return 10 * (self.epoch + 1)


def test_epochs_of_a_growing_sampler_end_where_it_says_also_after_a_resume(tmp_path: Path) -> None:
    def train(*ends: int | None) -> list[Any]:
        seen: list[Any] = []
        for end in ends:
            torch.manual_seed(0)
            trainer = paceline.Trainer(
                nn.Linear(1, 1), criterion=nn.MSELoss(), run=str(tmp_path / f"{ends}"), resume="auto", quiet=True,
                schedule={"name": "cosine"},
            )  # fmt: skip
            data = TensorDataset(torch.arange(30.0).unsqueeze(1) / 30, torch.zeros(30, 1))
            loader = DataLoader(data, batch_size=10, sampler=Growing())
            history = trainer.train(loader, data, max_steps=end, epochs=3 if end is None else None)
            seen += [(step["step"], step["epoch"], step["loss"]) for step in history.steps]
        return [seen, [evaluation["step"] for evaluation in history.evaluations]]

    whole, stopped = train(None), train(4, None)
    assert [(step, epoch) for step, epoch, _ in whole[0]] == [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2)]
    assert whole[1] == [1, 3, 6]
    assert [record[:2] for record in stopped[0]] == [record[:2] for record in whole[0]]
    assert stopped[1] == [6]
