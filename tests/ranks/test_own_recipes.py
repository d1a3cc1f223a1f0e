"""Recipes that name a model, data and metrics of the user's own code; evaluation of a run; starting from weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import forked
import paceline
from nodes import Job, ended, launchers
from own_project import write_project
from paceline.data.datasets import RECORD, TEST_FILES, TRAIN_FILES
from paceline.errors import CheckpointError, PacelineError
from paceline.launcher.local import agent as _agent  # noqa: F401
from paceline.testing import parity
from worlds import ranks

ROOT = Path(__file__).parents[2]


def run(*args: str, cwd: Path) -> str:
    done = forked.paceline(*args, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def evaluations(run_folder: Path) -> list[dict[str, Any]]:
    records = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [{key: each[key] for key in ("loss", "accuracy", "first_class")} for each in records if "evaluation" in each]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a project, and runs of it on one and on two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    write_project(folder)
    for number in ("1", "2"):
        run("train", "project/recipe.yaml", "-n", number, f"run=on-{number}", cwd=folder)
    return folder


def test_own_model_data_and_metrics_train_alike_on_one_and_two_ranks(trained: Path) -> None:
    one, two = (evaluations(trained / "runs" / f"on-{number}") for number in (1, 2))
    assert len(one) == 3
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    assert one[-1]["loss"] < one[0]["loss"]


def test_the_recipe_of_a_run_says_where_its_code_was(trained: Path) -> None:
    recipe = paceline.Config.from_file(trained / "runs" / "on-1" / "config.yaml")
    assert recipe.code == "project" and recipe.metrics == ["accuracy", "mine_on_ranks:first_class"]


def test_commands_that_build_no_model_never_import_the_code_of_a_recipe(trained: Path) -> None:
    before = (trained / "imported.txt").read_text()
    assert before
    checkpoint = next(path for path in (trained / "runs/on-1/checkpoints").iterdir() if path.is_dir())
    for args in (
        ["ls"],
        ["show", "on-1"],
        ["compare", "on-1", "on-2"],
        ["explain", "runs/on-1/logs"],
        ["checkpoint", "ls", "runs/on-1"],
        ["checkpoint", "verify", str(checkpoint)],
        ["checkpoint", "inspect", str(checkpoint)],
        ["checkpoint", "export", str(checkpoint), "--to", "torch", "-o", "exported.pt"],
        ["config", "keys", "model"],
    ):
        run(*args, cwd=trained)
    paceline.Config.from_file(trained / "project" / "recipe.yaml", ["model.name=mine_on_ranks:Nothing"])
    assert (trained / "imported.txt").read_text() == before


def test_config_show_imports_the_code_and_finds_errors_in_its_options(trained: Path) -> None:
    assert "name: mine_on_ranks:Net" in run("config", "show", "project/recipe.yaml", cwd=trained)
    done = forked.paceline("config", "show", "project/recipe.yaml", "model.wdth=3", cwd=trained)
    assert done.returncode == 2 and "[model.unknown-option]" in done.stderr and "'width'" in done.stderr


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("model.name=mine_on_ranks:Nett", "config.no-such-name"),
        ("model.width=-1", "model.build-failed"),
        ("data.smples=1", "data.unknown-option"),
        ("metrics=mine_on_ranks:second_class", "config.no-such-name"),
        ("init_from=runs/no-such-run", "checkpoint.missing"),
    ],
)
def test_errors_in_the_names_of_a_recipe_are_found_before_ranks_start(trained: Path, override: str, code: str) -> None:
    done = forked.paceline("train", "project/recipe.yaml", "-n", "2", "run=refused", override, cwd=trained)
    assert done.returncode == 2 and f"[{code}]" in done.stderr, done.stdout + done.stderr


def test_two_nodes_import_the_code_of_a_recipe_and_refuse_other_code(trained: Path, tmp_path: Path) -> None:
    project = write_project(tmp_path)
    with launchers(tmp_path) as launch:
        job = Job(tmp_path, launch)
        nodes = [job.launch("train", "project/recipe.yaml", "-n", "1", *job.meet(number)) for number in (0, 1)]
        assert ended(*nodes) == [0, 0], nodes[0].said + nodes[1].said
    assert evaluations(tmp_path / "runs" / "recipe")[-1] == pytest.approx(
        evaluations(trained / "runs" / "on-1")[-1], rel=1e-5
    )
    with launchers(tmp_path) as launch:
        job = Job(tmp_path, launch)
        first = job.launch("train", "project/recipe.yaml", "-n", "1", *job.meet(0))
        (tmp_path / "other").mkdir()
        for file in project.glob("*.py"):
            (tmp_path / "other" / file.name).write_text(file.read_text() + "\n# another version")
        second = job.launch("train", "project/recipe.yaml", "-n", "1", *job.meet(1), "code=other")
        assert second.end() == 2 and "[launch.node-differs]" in second.said, second.said
        assert "code: mine_on_ranks.py differs" in second.said and first.status is None


def test_parity_of_a_recipe_with_own_code(trained: Path) -> None:
    said = run("parity", "project/recipe.yaml", "--layouts", "ddp:2", "--steps", "2", cwd=trained)
    assert "ddp:2" in said


@pytest.mark.parametrize("number", ["1", "2"])
def test_evaluate_gives_the_values_of_training_and_changes_nothing(trained: Path, number: str) -> None:
    before = contents(trained / "runs")
    args = ["evaluate", "project/recipe.yaml", "--from", "on-1", "-n", number, "--json"]
    newest = json.loads(run(*args, cwd=trained))
    assert newest["metrics"] == pytest.approx(evaluations(trained / "runs" / "on-1")[-1], rel=1e-6)
    assert (newest["step"], Path(newest["checkpoint"]).name) == (21, "step-000021")
    assert contents(trained / "runs") == before


def test_evaluate_takes_the_best_checkpoint_overrides_and_the_recipe_of_the_run(trained: Path) -> None:
    records = evaluations(trained / "runs" / "on-1")
    best = max(records, key=lambda each: each["accuracy"])
    args = ["evaluate", "--from", "runs/on-1", "--best", "-n", "2", "metrics=[accuracy, perplexity]", "strategy=fsdp"]
    said = dict(line.split(maxsplit=1) for line in run(*args, cwd=trained).splitlines() if "  " in line)
    assert float(said["accuracy"]) == pytest.approx(best["accuracy"], rel=1e-5)
    assert float(said["perplexity"]) == pytest.approx(np.exp(best["loss"]), rel=1e-4)
    assert "first_class" not in said and "(step " in said["checkpoint"]


def test_evaluate_skips_a_damaged_checkpoint_and_still_prints_only_json(trained: Path) -> None:
    shutil.copytree(trained / "runs" / "on-1", trained / "runs" / "damaged")
    file = next((trained / "runs/damaged/checkpoints/step-000021").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    found = json.loads(run("evaluate", "--from", "damaged", "-n", "2", "--json", cwd=trained))
    assert found["step"] < 21


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--from", "on-3"], "checkpoint.no-run"),
        (["--from", "on-1", "data.evaluated=false"], "train.no-evaluation"),
        (["--from", "on-1", "model.width=5"], "checkpoint.other-model"),
        (["--from", "on-1", "metrics=mse"], "train.metric-unfit"),
    ],
)
def test_evaluate_refuses_what_it_cannot_measure(trained: Path, args: list[str], code: str) -> None:
    done = forked.paceline("evaluate", "project/recipe.yaml", "-n", "1", *args, cwd=trained)
    assert done.returncode != 0 and f"[{code}]" in done.stderr, done.stdout + done.stderr


def small(seed: int, width: int = 6) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))


def write_weights(folder: Path) -> None:
    """A run, and files with the weights of its checkpoint."""
    trainer = paceline.Trainer(small(1), criterion=nn.CrossEntropyLoss(), batch=8, run=str(folder / "run"), quiet=True)
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randint(3, (16,)))
    trainer.train(data, epochs=2)
    weights = trainer.state_dict()
    torch.save({"model": weights, "epoch": 2}, folder / "weights.pt")
    save_file(weights, folder / "weights.safetensors")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("weights")
    ranks(1)(lambda: write_weights(folder))()
    found = {"run": folder / "run", "pt": folder / "weights.pt", "safetensors": folder / "weights.safetensors"}
    found["checkpoint"] = next(path for path in (folder / "run" / "checkpoints").iterdir() if path.is_dir())
    return found


@pytest.mark.parametrize(
    ("kind", "world", "strategy"),
    [("run", 2, "fsdp"), ("checkpoint", 2, "pp"), ("pt", 2, "fsdp"), ("safetensors", 2, "ddp"), ("pt", 1, "single")],
)
def test_training_starts_from_weights_at_step_0(
    weights: dict[str, Path], kind: str, world: int, strategy: str, tmp_path: Path
) -> None:
    @ranks(world)
    def body() -> None:
        settings: dict[str, Any] = {"strategy": strategy, "batch": 8, "quiet": True, "optimizer": "sgd"}
        trainer = paceline.Trainer(
            small(2), criterion=nn.CrossEntropyLoss(), run=False, init_from=weights[kind], **settings
        )
        saved, loaded = torch.load(weights["pt"], weights_only=True)["model"], trainer.state_dict()
        assert trainer.step_count == 0 and not trainer.optimizer.state_dict()["state"]
        if paceline.dist.is_main():
            assert all(torch.equal(saved[name], tensor) for name, tensor in loaded.items())

    body()


@ranks(2)
def test_deferred_weights_start_from_a_file(tmp_path: Path) -> None:
    model = {"name": "gpt", "layers": 1, "width": 8, "heads": 2, "context": 8, "vocabulary": 32}
    config = {"model": model, "run": False, "quiet": True, "batch": 4, "strategy": "fsdp"}
    reference = paceline.get_model("gpt")(paceline.Config.from_dict({**config, "seed": 5})).state_dict()
    file = tmp_path.parent / "gpt.safetensors"
    if paceline.dist.is_main():
        save_file({name: value for name, value in reference.items() if name != "head.weight"}, file)
    paceline.dist.barrier()
    trainer = paceline.Trainer.from_config(paceline.Config.from_dict({**config, "init_from": str(file)}))
    found = trainer.state_dict()
    assert all(torch.equal(found[name], value) for name, value in reference.items() if name in found)


@pytest.mark.parametrize("kind", ["checkpoint", "pt"])
def test_weights_of_another_model_are_listed(weights: dict[str, Path], kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Identity(), nn.Linear(7, 3), nn.Linear(3, 3))
    with pytest.raises(CheckpointError) as caught:
        paceline.Trainer(model, criterion=nn.CrossEntropyLoss(), run=False, quiet=True, init_from=weights[kind])
    text = str(caught.value)
    assert caught.value.code == "checkpoint.other-model"
    assert "missing: 3.bias, 3.weight, 4.bias, 4.weight" in text and "unexpected: 2.bias, 2.weight" in text
    assert "of another shape: 0.bias (6,) instead of (7,), 0.weight (6, 4) instead of (7, 4)" in text


@ranks(1)
def test_a_resumed_run_does_not_start_from_its_initial_weights_again(weights: dict[str, Path], tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randint(3, (16,)))
    settings: dict[str, Any] = {"batch": 8, "quiet": True, "run": str(tmp_path / "mine"), "resume": "auto"}
    trained: list[Any] = []
    for steps in (2, 4):
        trainer = paceline.Trainer(small(2), criterion=nn.CrossEntropyLoss(), init_from=str(weights["pt"]), **settings)
        trained.append((trainer.step_count, trainer.state_dict()["0.weight"].clone()))
        trainer.train(data, max_steps=steps)
    start = torch.load(weights["pt"], weights_only=True)["model"]["0.weight"]
    assert [step for step, _ in trained] == [0, 2]
    assert torch.equal(trained[0][1], start) and not torch.equal(trained[1][1], start)


def test_a_started_project_trains_on_two_ranks_both_ways(tmp_path: Path) -> None:
    said = run("init", "my project", cwd=tmp_path)
    project = tmp_path / "my project"
    before = contents(project)
    *_, enter, first, second = said.splitlines()
    assert enter.split() == ["cd", "'my", "project'"]
    for command in (first, second):
        _, *args = command.split()
        done = forked.paceline(*args, cwd=project)
        assert done.returncode == 0, done.stdout + done.stderr
    for name in ("recipe", "train"):
        records = map(json.loads, (project / "runs" / name / "metrics.jsonl").read_text().splitlines())
        assert [record["accuracy"] for record in records if "evaluation" in record][-1] > 0.9
    again = forked.paceline("init", cwd=project)
    assert again.returncode == 2 and "[config.file-exists]" in again.stderr
    assert before.items() <= contents(project).items()


def test_init_says_why_it_can_not_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = forked.paceline("init", "file/below", cwd=tmp_path)
    assert done.returncode == 2 and "[config.not-writable]" in done.stderr


def write_cifar(folder: Path) -> None:
    random = np.random.default_rng(0)
    folder.mkdir()
    for name in (*TRAIN_FILES, *TEST_FILES):
        data = random.integers(0, 256, (4, RECORD), dtype=np.uint8)
        data[:, 0] %= 10
        data.tofile(folder / name)


def test_the_override_that_the_resnet_recipe_documents_trains_on_cifar10(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar-10-batches-bin")
    recipe = (ROOT / "recipes" / "resnet.yaml").read_text()
    documented = next(line for line in recipe.splitlines() if "With real data:" in line)
    overrides = documented.partition("With real data: ")[2].replace("PATH", str(tmp_path)).split()
    args = [str(ROOT / "recipes" / "resnet.yaml"), *overrides, "train.max_steps=1", "batch=4", "device=cpu"]
    done = forked.paceline("train", *args, "-n", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data.name=cifar10 drops data.length, data.val_length of the recipe" in done.stdout + done.stderr
    shown = forked.paceline("config", "show", *args, cwd=tmp_path)
    assert "val_length" not in shown.stdout and "drops data.length, data.val_length" in shown.stderr


def test_an_override_of_a_name_keeps_options_that_both_have_and_refuses_given_ones() -> None:
    values = {"model": {"name": "resnet20", "classes": 4}, "data": {"name": "shapes", "length": 8, "val_length": 4}}
    config = paceline.Config.from_dict(values, ["model.name=resnet18", "data.name=cifar10"])
    trainer = paceline.Trainer.from_config(
        config.model_copy(update={"run": False, "quiet": True, "strategy": "single"})
    )
    assert trainer.config.model is not None and trainer.config.model.options() == {"classes": 4}
    assert trainer.config.data is not None and trainer.config.data.options() == {}
    model = paceline.get_model("mlp")(paceline.Config.from_dict(values, ["model.name=mlp"]))
    assert sum(1 for _ in model.parameters())
    given = paceline.Config.from_dict(values, ["model.name=vae", "model.clases=3"])
    with pytest.raises(PacelineError) as caught:
        paceline.Trainer.from_config(given)
    assert caught.value.code == "model.unknown-option"


def test_parity_without_options_of_a_model_that_an_override_replaced() -> None:
    values = {
        "model": {"name": "gpt", "layers": 2},
        "data": {"name": "shapes", "length": 16, "val_length": 4, "size": 8},
    }
    overrides = ["model.name=mlp", "model.inputs=192", "model.width=8", "batch=4", "train.max_steps=1"]
    config = paceline.Config.from_dict(values, overrides)
    assert parity(config, layouts=["ddp:2"], steps=1).holds
