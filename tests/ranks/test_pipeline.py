"""A model cut into stages gives the same losses, gradients, weights and evaluations as one rank, in float64."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
import tiny
from heard import heard
from samples import ALL
from worlds import launch, ranks

BOUND = 1e-9
GPT4 = {"name": "gpt", "layers": 4, "width": 32, "heads": 2, "context": 16}
Case = tuple[str, dict[str, Any]]


def sequential() -> nn.Sequential:
    """Of the user's, with layers without weights in between; and one layer that stands at two places."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        twice = nn.Linear(16, 16)
        return nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), twice, nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), twice, nn.Linear(16, 2)
        )


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(-1) == targets).double()


def results(case: Case) -> dict[str, Any]:
    name, changes = case
    # A batch that no number of ranks or micro-batches divides, a short one at the end, and a bound that clips.
    settings = {"batch": 11, "precision": "fp64", "clip_norm": 0.3, "ema": 0.9, "train": {"max_steps": 5}, **changes}
    if name == "sequential":
        settings.pop("train")
        model = sequential()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        criterion = nn.CrossEntropyLoss()
        trainer = paceline.Trainer(
            model, optimizer, criterion=criterion, metrics={"accuracy": accuracy}, run=False, quiet=True, **settings
        )
        val = tiny.blobs(13, first=1)
        history = trainer.train(tiny.blobs(), val, max_steps=5)
    else:
        trainer = paceline.Trainer.from_config(paceline.Config.from_dict(tiny.recipe(name, **settings)))
        history = trainer.train()
        val = build_val(trainer)
    with trainer.ema_weights():
        averages = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    evaluations = [value for record in history.evaluations for value in record.values()]
    return {
        "losses": torch.tensor(history.losses, dtype=torch.float64),
        "norms": torch.tensor([record["grad_norm"] for record in history.steps], dtype=torch.float64),
        "evaluations": torch.tensor(evaluations, dtype=torch.float64),
        "predictions": trainer.predict(val),
        **{f"average of {name}": tensor for name, tensor in averages.items()},
        **trainer.state_dict(),
    }


def build_val(trainer: paceline.Trainer) -> Any:
    from paceline.train.recipe_objects import build_data

    return build_data(trainer.config)[1]


def all_results(cases: list[Case]) -> list[dict[str, Any]]:
    return [results(case) for case in cases]


def require_same(cases: list[Case], ranks: int) -> None:
    """Every case on `ranks` ranks beside one rank without the layout."""
    layout = ("layout", "strategy", "pipeline")
    alone = [(name, {key: value for key, value in changes.items() if key not in layout}) for name, changes in cases]
    different: list[Case] = [case for number, case in enumerate(alone) if case not in alone[:number]]
    known = launch(all_results, ranks=1, cases=different)
    for case, plain, found in zip(cases, alone, launch(all_results, ranks=ranks, cases=cases), strict=True):
        one = known[different.index(plain)]
        assert one["losses"][-1] < one["losses"][0], case
        assert one.keys() == found.keys(), case
        for name, expected in one.items():
            scale = expected.abs().max()
            assert (found[name] - expected).abs().max() <= BOUND * scale, (case, name)


@pytest.mark.timeout(200)
def test_every_schedule_on_two_ranks_agrees_with_one_rank() -> None:
    schedules = [{"schedule": "gpipe"}, {"schedule": "interleaved"}, {"schedule": "zero-bubble", "stages": 2}]
    pp = {"strategy": "pp"}
    cases: list[Case] = [("gpt", {**pp, "model": GPT4, "pipeline": pipeline}) for pipeline in schedules]
    cases += [("padded-gpt", {**pp, "accumulate": 3, "pipeline": {"balance": ["blocks.0", "blocks.1"]}})]
    cases += [("mlp", {**pp, "pipeline": {"microbatches": 7}})]
    cases += [("sequential", {**pp, "accumulate": 3})]
    if ALL:  # on four ranks in `make test`
        cases += [("padded-gpt", {**pp, "accumulate": 3, "pipeline": {"schedule": "zero-bubble"}})]
    require_same(cases, 2)


@pytest.mark.nightly  # an interleaved schedule on two ranks has stages between the first and the last as well
@pytest.mark.timeout(200)
def test_three_stages_agree_with_one_rank() -> None:
    require_same([("gpt", {"strategy": "pp", "model": GPT4}), ("sequential", {"strategy": "pp"})], 3)


@pytest.mark.timeout(200)
def test_stages_that_are_copied_or_sharded_agree_with_one_rank() -> None:
    copied, sharded = {"layout": {"pipeline": 2, "replicate": 2}}, {"layout": {"pipeline": 2, "shard": 2}}
    cases: list[Case] = [
        ("padded-gpt", {**copied, "batch": 3}),  # one rank has no samples now and then
        ("padded-gpt", {**sharded, "batch": 3, "pipeline": {"schedule": "zero-bubble"}}),
    ]
    if ALL:
        cases += [
            ("padded-gpt", {**copied, "accumulate": 3}),
            ("gpt", {**sharded, "model": GPT4, "pipeline": {"schedule": "interleaved"}}),
            ("padded-gpt", {**sharded, "accumulate": 3, "pipeline": {"schedule": "zero-bubble"}}),
            ("padded-gpt", {**sharded, "batch": 3}),
        ]
    require_same(cases, 4)


def half_precision(precision: str) -> list[float]:
    recipe = tiny.recipe("gpt", batch=10, precision=precision, clip_norm=1.0, train={"max_steps": 4})
    if paceline.dist.world() > 1:
        recipe["strategy"] = "pp"
    return list(paceline.Trainer.from_config(paceline.Config.from_dict(recipe)).train().losses)


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.nightly), "fp16"])
def test_half_precision_agrees_within_its_rounding(precision: str) -> None:
    one, two = (launch(half_precision, ranks=ranks, precision=precision) for ranks in (1, 2))
    assert two == pytest.approx(one, rel=5e-3) and two != one


def own_loop(folder: str, load: str | None) -> list[Any]:
    """A run of training steps by hand, from a checkpoint of another layout; the state, whole."""
    strategy = "pp" if paceline.dist.world() > 1 else "single"
    recipe = tiny.recipe("gpt", batch=10, precision="fp64", ema=0.9, strategy=strategy)
    recipe["optimizer"] = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1}
    trainer = paceline.Trainer.from_config(paceline.Config.from_dict(recipe))
    if load is not None:
        trainer.load_checkpoint(load)
    losses = []
    for batch in trainer.loader(build_val(trainer)):
        losses.append(trainer.training_step(batch).loss.item())
    said = None
    if strategy == "pp":
        with pytest.raises(paceline.errors.LayoutError) as found:
            trainer.forward(batch)
        said = found.value.code
    trainer.save_checkpoint(folder)
    every = paceline.dist.all_gather_object(losses)
    return [every[-1], said, trainer.state_dict()]


def test_a_checkpoint_of_a_custom_loop_moves_from_one_rank_to_stages_and_back(tmp_path: Path) -> None:
    first, second, third, fourth, fifth = (str(tmp_path / name) for name in "abcde")
    launch(own_loop, ranks=1, folder=first, load=None)
    one_losses, _, one = launch(own_loop, ranks=1, folder=second, load=first)
    two_losses, said, two = launch(own_loop, ranks=2, folder=third, load=first)
    assert said == "layout.pipeline-forward"
    assert two_losses == pytest.approx(one_losses, rel=BOUND)
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=0, atol=BOUND)
    _, _, after_one = launch(own_loop, ranks=1, folder=fourth, load=second)
    _, _, after_two = launch(own_loop, ranks=1, folder=fifth, load=third)
    for name, weight in after_one.items():
        torch.testing.assert_close(after_two[name], weight, rtol=0, atol=BOUND)


def training_around_an_evaluation() -> list[float]:
    trainer, losses = tiny.gpt_trainer(strategy="pp", batch=8), []
    for samples in (4, 8):
        losses.append(float(trainer.training_step(tiny.Sequences(samples)[:]).loss))
        trainer.evaluate(tiny.Sequences(8, tokens=4))
    return losses


def test_evaluating_sequences_of_another_length_leaves_training_alone() -> None:
    trainer = tiny.gpt_trainer(batch=8)
    expected = [float(trainer.training_step(tiny.Sequences(samples)[:]).loss) for samples in (4, 8)]
    assert launch(training_around_an_evaluation, ranks=2) == pytest.approx(expected, rel=1e-9)


@ranks(2)
def test_the_other_stages_train_when_all_weights_of_one_are_frozen() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 2))
    model[:2].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    history = tiny.classifier_trainer(model, optimizer=optimizer, strategy="pp").train(tiny.blobs(), max_steps=3)
    assert history.losses[-1] < history.losses[0]


@ranks(2)
def test_recomputation_enabled_on_the_trainer_is_refused_under_zero_bubble_as_in_a_recipe() -> None:
    trainer = tiny.gpt_trainer(strategy="pp", pipeline={"schedule": "zero-bubble"})
    with pytest.raises(paceline.errors.LayoutError) as caught:
        trainer.enable_gradient_checkpointing()
    assert caught.value.code == "layout.zero-bubble-and-recompute"


def refused() -> list[str]:
    codes = []
    pair = {"strategy": "pp", "run": False, "quiet": True, "batch": 8}
    for give in (
        {"model": tiny.classifier(), "loss_fn": lambda model, batch: model(batch[0]).sum()},
        {"model": nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), "criterion": nn.MSELoss()},
        {"model": nn.Sequential(nn.Linear(8, 2)), "criterion": nn.MSELoss()},
    ):
        with pytest.raises(paceline.errors.LayoutError) as found:
            paceline.Trainer(**{**pair, **give})
        codes.append(found.value.code)
    return codes


def test_what_no_pipeline_can_run_is_refused() -> None:
    assert launch(refused, ranks=2) == [
        "layout.pipeline-and-loss-fn",
        "layout.pipeline-and-batchnorm",
        "layout.too-few-blocks",
    ]


def broken(fault: str) -> dict[str, Any]:
    from paceline.parallel.pipeline.schedule_runner import PipelineRunner
    from paceline.train.pipeline_step import PipelineStep

    if fault == "copies of the tied weight keep their own gradients":
        PipelineRunner.reduce_tied = lambda self, tensors: None  # type: ignore[method-assign]
    else:
        exact = PipelineStep._loss

        def padded(self: Any, micro: Any, rows: int, counts: bool, outputs: Any, number: int) -> Any:
            start = min(number * len(outputs), rows - 1)
            return exact(self, micro, rows, counts, outputs, start // len(outputs))

        PipelineStep._loss = padded  # type: ignore[method-assign]
    return results(("gpt", {"strategy": "pp", "pipeline": {"microbatches": 6}}))


@functools.cache
def gpt_on_one_rank() -> dict[str, Any]:
    """On one rank."""
    results: dict[str, Any] = launch(all_results, ranks=1, cases=[("gpt", {})])[0]
    return results


@pytest.mark.parametrize("fault", ["copies of the tied weight keep their own gradients", "padding counts"])
def test_the_comparison_bites_when_a_fault_is_built_in(fault: str) -> None:
    one = gpt_on_one_rank()
    found = paceline.launch(broken, ranks=2, fault=fault)
    assert (found["losses"] - one["losses"]).abs().max() > 1e-6


class NamedTargets(torch.nn.Module):
    """Calls its inputs and targets by names of its own."""

    model_spec = paceline.ModelSpec(
        pipeline=paceline.PipelineSpec(
            first="embed", blocks="layers", last="read", loss="loss", first_modules=("into",), last_modules=("out",),
            targets="y",
        )
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.into(x))

    def read(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.out(hidden))

    def loss(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, y)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.loss(self.read(hidden), y)


class Named(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x, y = tiny.blobs(24)[index]
        return {"x": x, "y": y}


def named_losses(strategy: str) -> list[float]:
    data = Named()
    model = NamedTargets()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = paceline.Trainer(model, optimizer, batch=8, run=False, quiet=True, strategy=strategy)
    return trainer.train(data, max_steps=3).losses


def test_the_targets_of_a_spec_may_have_any_name() -> None:
    found = launch(named_losses, ranks=2, strategy="pp")
    assert found == pytest.approx(named_losses("auto"), rel=1e-5)


@ranks(2)
def test_the_hooks_of_a_pipeline_are_not_taken_for_those_of_the_user() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    trainer = paceline.Trainer(
        model, criterion=nn.CrossEntropyLoss(), strategy="pp", batch=8, run=False, quiet=True, device="cpu"
    )
    with heard() as said:
        trainer.train(tiny.blobs(16), max_steps=2)
    assert said == []
