"""The same recipe gives the same loss at each step, on any number of ranks. `make parity` runs the whole table."""

from __future__ import annotations

import pytest

import parity
from parity import Case
from samples import ALL, sample

STEPS = 10  # two epochs; on one rank 20, in which they learn
SECOND_EPOCH = 6  # its first step
MODELS = ["mlp", "vae", "resnet", "padded-gpt", "hf-gpt2"]
WHOLE = MODELS if ALL else MODELS[1:4]  # trained without accumulation as well
# fp32 amplifies rounding in a small-batch BatchNorm, so a resnet's is compared at its first step.
CASES = [
    *(Case(model, "fp64", 3) for model in MODELS),
    *(Case(model, "fp64") for model in WHOLE),
    *(Case(model, "fp32") for model in (MODELS if ALL else MODELS[1:3])),
    Case("gpt", "bf16", 3),
    Case("gpt", "fp16", 3),
]


@pytest.fixture(scope="module")
def reference() -> dict[Case, object]:
    return dict(zip(CASES, parity.run(CASES, 1), strict=True))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.nightly), 3])  # four are in `make parity`
def test_loss_gradient_and_evaluation_are_those_of_one_rank(ranks: int, reference: dict[Case, object]) -> None:
    # Two ranks divide a batch, but not its three parts. Three divide neither: in `make test`, one model has whole ones.
    whole = {Case(model, "fp64") for model in (MODELS if ALL else ["padded-gpt"])}
    whole |= {case for case in CASES if case.precision == "fp32"}
    cases = [case for case in CASES if case.accumulate == 3 or (ranks > 2 and case in whole)]
    for case, history in zip(cases, parity.run(cases, ranks, steps=STEPS), strict=True):
        one, bound = reference[case], parity.LOSS_BOUND[case.precision]
        assert parity.fall(one) > 0.3, case
        if case.model == "resnet" and case.precision == "fp32":
            assert parity.first_step_difference(one, history, "loss") < 1e-6, case
            assert parity.first_step_difference(one, history, "grad_norm") < 1e-5, case
            continue
        assert parity.difference(one.losses, history.losses) < bound, case
        assert parity.evaluation_difference(one, history) < bound, case
        assert parity.skipped(history) <= parity.skipped(one), case


def test_accumulation_changes_nothing_but_batch_norms_statistics(reference: dict[Case, object]) -> None:
    for model in WHOLE:
        whole, cut = (reference[Case(model, "fp64", accumulate)] for accumulate in (1, 3))
        if model == "resnet":
            assert parity.difference(whole.losses, cut.losses) > 1e-6
        else:
            assert parity.difference(whole.losses, cut.losses) < 1e-9, model


@pytest.mark.parametrize("fault", list(parity.FAULTS)[: sample(1, 3)])
def test_the_comparison_bites_when_a_fault_is_built_in(fault: str, reference: dict[Case, object]) -> None:
    cases = [Case(model, "fp64") for model in WHOLE]
    for case, broken in zip(cases, parity.run(cases, 3, fault, SECOND_EPOCH), strict=True):
        assert parity.difference(reference[case].losses, broken.losses) > 1e-5, (case, fault)
