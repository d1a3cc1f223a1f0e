"""Programs that are unusual and right train as in a plain loop, without a word."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import paceline
from heard import of_training
from programs.legitimate import LEGITIMATE, SAMPLES, STEPS, plain_training
from samples import ALL
from worlds import run_on_ranks

GROUPS = 6  # of programs; each trains on the same ranks
LAYOUTS = ["ddp", *(["fsdp"] if ALL else [])]
NOT_SHARDED = {"a scale without dims"}  # refused by name: FSDP shards along the first dim


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.addFilter(of_training)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.getMessage().startswith("data: training waits for data"):  # depends on the machine
            self.lines.append(record.getMessage())


def trained_on_ranks(name: str, layout: str) -> dict[str, torch.Tensor]:
    program = LEGITIMATE[name]
    torch.manual_seed(0)
    model, data = program.model(), program.rows()
    trainer = paceline.Trainer(
        model,
        program.optimizer(model),
        loss_fn=program.loss,
        criterion=program.criterion() if program.criterion else None,
        strategy=layout,
        precision="fp64",
        device="cpu",
        run=False,
        quiet=True,
        batch=None if isinstance(data, list | IterableDataset) else SAMPLES,
        **program.settings,
    )
    is_loader = isinstance(data, list | IterableDataset)  # else a dataset
    trainer.train(DataLoader(data, SAMPLES, collate_fn=program.collate) if is_loader else data, max_steps=STEPS)
    return trainer.state_dict()


def failures(names: list[str], layout: str) -> dict[str, str]:
    found: dict[str, str] = {}
    logger = logging.getLogger("paceline")
    for name in names:
        said = Said()
        logger.addHandler(said)
        try:
            weights = trained_on_ranks(name, layout)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
            continue
        finally:
            logger.removeHandler(said)
        expected = plain_training(LEGITIMATE[name]) if weights else {}  # rank 0 has all of them
        apart = max([(weights[key] - value).abs().max().item() for key, value in expected.items()], default=0.0)
        if said.lines or not apart < 1e-9:
            found[name] = f"{apart:.2g} away; {said.lines}"
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("group", range(GROUPS))
def test_an_unusual_program_trains_as_in_a_plain_loop(group: int, layout: str) -> None:
    names = [name for name in list(LEGITIMATE)[group::GROUPS] if layout == "ddp" or name not in NOT_SHARDED]

    def on_ranks() -> None:
        assert failures(names, layout) == {}

    run_on_ranks(2, on_ranks)


def test_there_are_sixty() -> None:
    assert len(LEGITIMATE) >= 60
