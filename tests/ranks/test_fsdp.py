"""Weights, gradients and optimizer state cut over ranks: the user's own optimizer, odd models, checkpoints, memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import paceline
import tiny
from odd_models import Branches, Net, frozen, shared_by_blocks
from paceline.errors import PacelineError
from samples import ALL
from worlds import launch, ranks

CLOSE = {"fp64": 1e-12, "fp32": 1e-5, "fp16": 5e-3}


class Hasty(optim.Optimizer):
    """A user's own: momentum by hand, and each step as long as the learning rate says (it needs the whole's norm)."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad.data)
                parameter.data.add_(momentum / (momentum.norm() + 1.0), alpha=-group["lr"])


class Mixing(Hasty):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.numel() > 1:
                    parameter.data.add_(torch.ones(parameter.shape, dtype=parameter.dtype) * parameter.grad)


def two_groups(kind: Callable[..., optim.Optimizer], **settings: Any) -> Callable[[nn.Module], optim.Optimizer]:
    """Matrices and the rest at different rates; the head's bias is in no group and stays as it is."""

    def build(model: nn.Module) -> optim.Optimizer:
        named = [(name, p) for name, p in model.named_parameters() if name != "head.bias" and p.requires_grad]
        matrices = {"params": [p for _, p in named if p.dim() > 1], "lr": 0.05}
        rest = {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.1}
        return kind([matrices, rest], **settings)

    return build


def over_all(kind: Callable[..., optim.Optimizer], **settings: Any) -> Callable[[nn.Module], optim.Optimizer]:
    return lambda model: kind(model.parameters(), **settings)


def stepped(model: nn.Module) -> optim.Optimizer:
    """AdamW after three steps on the plain model."""
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    for inputs, targets in [tiny.blobs(12)[:]] * 3:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return optimizer


KINDS: dict[str, tuple[Callable[..., optim.Optimizer], dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.1}),
    "nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (optim.Adam, {"lr": 0.01}),
    "adamw": (optim.AdamW, {"lr": 0.01}),
    "adagrad": (optim.Adagrad, {"lr": 0.1}),
}
WAYS: dict[str, dict[str, Any]] = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}

# Name: (model, optimizer, settings of the Trainer)
Case = tuple[Callable[[], nn.Module], Any, dict[str, Any]]
CASES: dict[str, Case] = {
    f"{name} {way} {precision}": (
        Net,
        two_groups(kind, **settings, **WAYS[way]),
        # Low enough that no layout overflows: which steps are skipped is a matter of rounding.
        {"precision": precision, "clip_norm": 0.3, "scaler": {"initial": 64.0}},
    )
    for name, (kind, settings) in KINDS.items()
    for way in WAYS
    for precision in ("fp64", "fp16")
    if precision == "fp64" or way == "fused" or name == "sgd"
}
CASES |= {
    "adamw in fp32": (Net, two_groups(optim.AdamW, lr=0.01, fused=True), {"precision": "fp32", "clip_norm": 0.3}),
    "rmsprop": (Net, over_all(optim.RMSprop, lr=0.01), {}),
    "nadam": (Net, over_all(optim.NAdam, lr=0.01), {}),
    "asgd": (Net, over_all(optim.ASGD, lr=0.1), {}),
    "own optimizer": (Net, over_all(Hasty, lr=0.1), {"clip_norm": 0.3}),
    "stepped before": (Net, stepped, {"precision": "fp32"}),
    "clip value": (Net, over_all(optim.SGD, lr=0.1), {"clip_value": 0.02, "clip_norm": 0.1}),
    "accumulation": (Net, over_all(optim.SGD, lr=0.1), {"accumulate": 3}),
    "frozen": (frozen, two_groups(optim.AdamW, lr=0.01), {"clip_norm": 0.3, "ema": 0.9}),
    "shared by blocks": (shared_by_blocks, over_all(optim.AdamW, lr=0.01), {"clip_norm": 0.3}),
    "kept whole": (Net, over_all(optim.SGD, lr=0.1), {"fsdp": {"reshard": False}}),
    "prefetched": (Net, over_all(optim.SGD, lr=0.1), {"fsdp": {"prefetch": 2}}),
}


def build(case: Case, strategy: str, **changes: Any) -> paceline.Trainer:
    make_model, optimizer, settings = case
    model = make_model()
    silent = {"criterion": nn.CrossEntropyLoss(), "batch": 10, "quiet": True, "run": False, "precision": "fp64"}
    wanted = silent | settings | changes
    if wanted["precision"] == "fp64":  # before the optimizer: adagrad makes its state at once
        model.double()
    given = optimizer(model) if callable(optimizer) else optimizer
    return paceline.Trainer(model, given, strategy=strategy, **wanted)


def flat(state: Any) -> Tensor:
    return torch.cat([value.double().flatten() for value in state.values()]) if state else torch.zeros(0)


def _train_all(strategy: str, names: list[str]) -> dict[str, Any]:
    results, checked = {}, set()
    for name in names:
        make_model, _, settings = CASES[name]
        alike = (make_model, settings.get("precision"), "fsdp" in settings, settings.get("accumulate"))
        trainer = build(CASES[name], strategy, preflight=alike not in checked)  # it has no step of the optimizer
        checked.add(alike)
        history = trainer.train(tiny.blobs(40), tiny.blobs(3, first=1), max_steps=3)
        evaluation = history.evaluations[-1]
        results[name] = {
            "losses": [*history.losses, evaluation["loss"], evaluation.get("ema_loss", 0.0)],
            "weights": flat(trainer.state_dict()),
        }
    return results


# On more than two ranks, which do not divide the widths either: all of it would take minutes.
CORE = ["nesterov foreach fp64", "adamw fused fp64", "adamw fused fp16", "own optimizer", "accumulation", "frozen"]
# One of each kind of state and of each way through the code: torch's other optimizers keep what these do.
USUAL = [
    *CORE, "sgd fused fp64", "adagrad fused fp64", "nadam", "stepped before", "clip value", "shared by blocks",
    "kept whole", "prefetched",
]  # fmt: skip


@functools.cache
def trained(strategy: str, ranks: int) -> dict[str, Any]:
    names = CORE if ranks > 2 else list(CASES) if ALL else USUAL
    results: dict[str, Any] = launch(_train_all, ranks=ranks, strategy=strategy, names=names)
    return results


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("fsdp", 2),
        pytest.param("fsdp", 3, marks=pytest.mark.nightly),
        pytest.param("hsdp", 4, marks=pytest.mark.nightly),
    ],
)
def test_every_optimizer_and_model_trains_as_on_one_rank(strategy: str, ranks: int) -> None:
    reference, results = trained("auto", 1), trained(strategy, ranks)
    differences = {}
    for name, result in results.items():
        precision = name.split()[-1] if name.split()[-1] in CLOSE else CASES[name][2].get("precision", "fp64")
        pairs = zip(reference[name]["losses"], result["losses"], strict=True)
        worst = max(
            float((reference[name]["weights"] - result["weights"]).abs().max()), *(abs(a - b) for a, b in pairs)
        )
        if worst > CLOSE[precision]:
            differences[name] = worst
    assert not differences


@ranks(2)
def test_tied_weights_are_one_tensor_in_the_full_state() -> None:
    state = tiny.gpt_trainer(strategy="fsdp").state_dict()
    if paceline.dist.is_main():
        assert state["tokens.weight"] is state["head.weight"]
        assert state["tokens.weight"].shape == (32, 16)


def test_the_comparison_notices_a_single_wrong_step() -> None:
    weights = {name: trained("auto", 1)[name]["weights"] for name in ("nesterov foreach fp64", "sgd fused fp64")}
    first, second = weights.values()
    assert float((first - second).abs().max()) > 1e-3


def _codes() -> dict[str, str]:
    class Scalar(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))

    class Sparse(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 4, sparse=True)

    codes = {}
    for name, make, optimizer in [
        ("adafactor", Net, over_all(optim.Adafactor, lr=0.1)),
        ("muon", Net, {"name": "muon", "lr": 0.1}),
        ("scalar", Scalar, over_all(optim.SGD, lr=0.1)),
        ("sparse", Sparse, over_all(optim.SGD, lr=0.1)),
        ("mixing", Net, over_all(Mixing, lr=0.1)),
        ("by itself", Net, over_all(optim.SGD, lr=0.1)),
    ]:
        try:
            trainer = build((make, optimizer, {}), "fsdp")
            trainer.train(tiny.blobs(20), max_steps=1)
            trainer.model(tiny.blobs(4)[:][0])
        except PacelineError as error:
            codes[name] = error.code
    return codes


def test_what_cannot_be_sharded_is_refused_with_a_code() -> None:
    assert launch(_codes, ranks=2) == {
        "adafactor": "layout.optimizer-needs-whole-weights",
        "muon": "layout.optimizer-needs-whole-weights",
        "scalar": "layout.scalar-parameter",
        "sparse": "layout.sparse-gradients",
        "mixing": "layout.optimizer-mixes-tensors",
        "by itself": "layout.called-by-itself",
    }


@ranks(2)
def test_a_loss_of_sharded_parameters_has_a_code() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        return model(batch[0]).square().mean() + 1e-3 * sum(p.square().sum() for p in model.parameters())

    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    trainer = tiny.classifier_trainer(model, loss_fn=loss_fn, strategy="fsdp")
    with pytest.raises(PacelineError) as caught:
        trainer.train(tiny.blobs(20), max_steps=1)
    assert caught.value.code == "layout.loss-of-shards"


@ranks(2)
def test_a_block_that_one_rank_does_not_use_is_named_before_gradients_are_mixed() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 2) for _ in range(3))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs = [block(inputs) for block in self.blocks]  # all run, in the same order
            return outputs[0] + outputs[1 + int(inputs[0, 0] > 0)]

    inputs = torch.ones(16, 8)
    inputs[4:8] = -1  # the first batch of rank 1
    data = torch.utils.data.TensorDataset(inputs, torch.zeros(16, dtype=torch.long))
    trainer = tiny.classifier_trainer(Chosen(), batch=8, shuffle=False, strategy="fsdp")
    with pytest.raises(PacelineError) as caught:
        trainer.train(data, max_steps=1)
    assert caught.value.code == "train.unused-parameters" and "blocks." in str(caught.value)


@ranks(2)
def test_a_layer_can_be_unfrozen_if_parameters_may_be_unused() -> None:
    model = tiny.classifier()
    first = next(model.parameters()).requires_grad_(False)
    before = first.detach().clone()
    thaw = type("Thaw", (), {"on_epoch": lambda self, record: next(model.parameters()).requires_grad_(True)})()
    trainer = tiny.classifier_trainer(model, strategy="fsdp", unused_parameters="allow", callbacks=[thaw])
    trainer.train(tiny.blobs(40), epochs=2)
    after = trainer.state_dict()
    assert paceline.dist.rank() > 0 or not torch.equal(next(iter(after.values())), before)


def _with_one_infinite_gradient(nonfinite: str, precision: str) -> list[Any]:
    trainer = build((Net, over_all(optim.SGD, lr=0.1), {}), "fsdp", nonfinite=nonfinite, precision=precision)
    # One element, which lies on rank 0: the others see finite pieces only.
    before = flat(trainer.state_dict())
    hand_over = trainer._engine.bound.held.assign_gradients

    def spoilt() -> None:
        hand_over()
        held = trainer._engine.bound.held.held_of(trainer.model.gain)
        if held.numel():
            held.grad.fill_(float("inf"))

    trainer._engine.bound.held.assign_gradients = spoilt
    code = "none"
    try:
        trainer.train(tiny.blobs(40), max_steps=2)
    except PacelineError as error:
        code = error.code
    state = trainer.state_dict()
    return [code, float((flat(state) - before).abs().max()) if paceline.dist.rank() == 0 else 0.0]


def _with_infinite_gradients(cases: list[tuple[str, str]]) -> list[list[Any]]:
    return [_with_one_infinite_gradient(*case) for case in cases]


def test_an_infinite_piece_on_one_rank_keeps_all_ranks_weights() -> None:
    cases = [("raise", "fp16"), ("skip", "fp32"), ("stop", "fp32")]
    assert launch(_with_infinite_gradients, ranks=3, cases=cases) == [["none", 0.0]] * len(cases)


CHECKPOINTED: Case = (Net, two_groups(optim.AdamW, lr=0.01, fused=True), {"ema": 0.9, "clip_norm": 0.3})


def _steps(strategy: str, load: str | None, save: str | None, steps: int) -> Any:
    trainer = build(CHECKPOINTED, strategy)
    if load:
        trainer.load_checkpoint(load)
    history = trainer.train(tiny.blobs(40), tiny.blobs(5, first=1), max_steps=steps)
    if save:
        trainer.save_checkpoint(save)
        paceline.dist.barrier()
    return {"losses": history.losses, "ema": history.evaluations[-1]["ema_loss"], "weights": flat(trainer.state_dict())}


@functools.cache
def _unbroken() -> Any:
    return launch(_steps, ranks=1, strategy="auto", load=None, save=None, steps=6)


@pytest.mark.parametrize(
    "way",
    [
        [("fsdp", 3), ("auto", 1)],
        [("ddp", 2), ("fsdp", 3)],
        pytest.param([("hsdp", 4), ("fsdp", 2)], marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_checkpoint_resumes_in_another_layout(tmp_path: Path, way: list[tuple[str, int]]) -> None:
    whole = _unbroken()
    (first, few), (second, many) = way
    folder = str(tmp_path / "saved")
    launch(_steps, ranks=few, strategy=first, load=None, save=folder, steps=3)
    rest = launch(_steps, ranks=many, strategy=second, load=folder, save=None, steps=6)
    assert rest["losses"] == pytest.approx(whole["losses"][3:], rel=1e-12)
    assert rest["ema"] == pytest.approx(whole["ema"], rel=1e-12)
    torch.testing.assert_close(rest["weights"], whole["weights"], rtol=0, atol=1e-12)


def _own_loop(strategy: str, low: bool) -> Tensor:
    """One's own loop, of which the first attempt is given up in the middle of a step."""
    trainer = build((Net, over_all(optim.AdamW, lr=0.01), {"accumulate": 2}), strategy)
    loader = trainer.loader(tiny.blobs(40))
    for batch in loader:
        trainer.training_step(batch)
        break
    for number, batch in enumerate(loader):
        if low and number % 2 == 0:
            with trainer.no_sync():
                trainer.backward(trainer.forward(batch))
        elif low:
            trainer.backward(trainer.forward(batch))
            trainer.step()
        else:
            trainer.training_step(batch)
    return flat(trainer.state_dict())


def _own_loops(strategy: str, lows: list[bool]) -> list[Tensor]:
    return [_own_loop(strategy, low) for low in lows]


@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp", 3), pytest.param("hsdp", 4, marks=pytest.mark.nightly)])
def test_a_custom_loop_trains_as_on_one_rank(strategy: str, ranks: int) -> None:
    [reference] = launch(_own_loops, ranks=1, strategy="auto", lows=[False])
    for own in launch(_own_loops, ranks=ranks, strategy=strategy, lows=[False, True]):
        torch.testing.assert_close(own, reference, rtol=0, atol=1e-12)


def _branches(strategy: str) -> Tensor:
    trainer = build((Branches, over_all(optim.SGD, lr=0.1), {"unused_parameters": "allow"}), strategy, batch=2)
    trainer.train(tiny.blobs(12), max_steps=6)
    return flat(trainer.state_dict())


def test_ranks_may_use_different_parameters_where_that_is_allowed() -> None:
    reference = launch(_branches, ranks=1, strategy="auto")
    own = launch(_branches, ranks=2, strategy="fsdp")
    torch.testing.assert_close(own, reference, rtol=0, atol=1e-12)


def _late_branch() -> str:
    """All samples of the first steps go through both layers; then the ranks part."""

    class Late(Branches):
        def forward(self, inputs: Tensor) -> Tensor:
            if (inputs[:, 0] == 0).any():
                layer = self.up if paceline.dist.rank() else self.down
                return self.head(layer(self.hidden(inputs)))
            return self.head(self.up(self.hidden(inputs)) + self.down(self.hidden(inputs)) + self.never(inputs[:, :7]))

    inputs = torch.ones(8, 8)
    inputs[4:] = 0.0
    data = torch.utils.data.TensorDataset(inputs, torch.zeros(8, dtype=torch.long))
    trainer = build((Late, over_all(optim.SGD, lr=0.1), {"shuffle": False}), "fsdp", batch=4)
    with pytest.raises(PacelineError) as caught:
        trainer.train(data, max_steps=2)
    return f"{caught.value.code} {trainer.step_count}"


def test_ranks_that_part_later_are_named_rather_than_summed_up_wrongly() -> None:
    assert launch(_late_branch, ranks=2) == "train.unused-parameters 1"


def _another_method(strategy: str) -> dict[str, Any]:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        return model.head(model.hidden(batch[0])).logsumexp(1).mean() - model.head(model.hidden(batch[0]))[:, 0].mean()

    model = Net().double()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    trainer = paceline.Trainer(
        model, optimizer, strategy=strategy, loss_fn=loss_fn, scheduler=scheduler, batch=10, precision="fp64",
        quiet=True, run=False, metrics={"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).double()},
    )  # fmt: skip
    history = trainer.train(tiny.blobs(40), tiny.blobs(2, first=1), max_steps=5)
    return {
        "losses": history.losses,
        "rates": [record["lr"] for record in history.steps],
        "accuracy": history.evaluations[-1]["accuracy"],
        "outputs": trainer.predict(tiny.blobs(7)),
        "weights": flat(trainer.state_dict()),
    }


def test_a_loss_over_other_methods_with_scheduler_metrics_and_predictions() -> None:
    one = launch(_another_method, ranks=1, strategy="auto")
    three = launch(_another_method, ranks=3, strategy="fsdp")
    assert three["losses"] == pytest.approx(one["losses"], rel=1e-12)
    assert three["rates"] == one["rates"]
    assert min(one["rates"]) < max(one["rates"])
    assert three["accuracy"] == one["accuracy"]
    for key in ("outputs", "weights"):
        torch.testing.assert_close(three[key], one[key], rtol=0, atol=1e-12)


def _bytes_of_a_rank() -> list[list[int]]:
    settings = tiny.recipe("gpt", strategy="fsdp", optimizer={"name": "adamw", "lr": 1e-3}, batch=8)
    settings["model"] |= {"width": 64, "layers": 3}
    trainer = paceline.Trainer.from_config(paceline.Config.from_dict(settings | {"train": {"max_steps": 1}}))
    trainer.train()
    parameters = list(trainer.model.parameters())
    held = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    states = [value for p in held for value in trainer.optimizer.state[p].values() if value.dim()]
    gradients: list[Tensor] = []
    hand_over = trainer._engine.bound.held.assign_gradients

    def noting() -> None:
        hand_over()
        gradients.extend(p.grad for p in held)

    trainer._engine.bound.held.assign_gradients = noting
    trainer.train(max_steps=2)
    own = [
        sum(parameter.numel() * 4 for parameter in parameters),
        _bytes([parameter.to_local() for parameter in parameters]),
        _bytes(gradients),
        _bytes(states),
    ]
    everyone: list[list[int]] = paceline.dist.all_gather_object(own)
    return everyone


def _bytes(tensors: list[Tensor]) -> int:
    """Of the memory behind them, each piece of it once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_a_rank_holds_its_part_of_parameters_gradients_and_state() -> None:
    for whole, parameters, gradients, states in launch(_bytes_of_a_rank, ranks=4):
        assert parameters == pytest.approx(whole / 4, rel=0.03)
        assert gradients == pytest.approx(whole / 4, rel=0.03)
        assert states == pytest.approx(2 * whole / 4, rel=0.03)
