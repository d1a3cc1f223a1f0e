from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from paceline.data.adopt import adopt
from reading import Numbers, micros, spec_for


class Growing(Sampler[int]):
    """Ten samples more in every epoch, up to forty."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return 10 * min(self.epoch + 1, 4)


class GrowingBatches(BatchSampler):
    """set_epoch is that of the sampler inside it."""

    def __len__(self) -> int:
        return super().__len__()


class GrowingShare(DistributedSampler[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return 10 * min(self.epoch + 1, 4)


LOADERS = {
    "sampler": lambda: DataLoader(Numbers(40), batch_size=10, sampler=Growing()),
    "batch sampler": lambda: DataLoader(Numbers(40), batch_sampler=GrowingBatches(Growing(), 10, False)),
    "distributed": lambda: DataLoader(Numbers(40), batch_size=10, sampler=GrowingShare(Numbers(40), 1, 0)),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_run_resumes_in_the_epoch_in_which_it_stopped_if_epochs_grow(kind: str) -> None:
    build = LOADERS[kind]
    whole = [(m.epoch, m.step, m.batch.tolist()) for m in micros(build(), spec_for(), epochs=5)]
    assert [epoch for epoch, *_ in whole] == [0, 1, 1, 2, 2, 2, *[3] * 4, *[4] * 4]
    for first in range(len(whole)):
        rest = micros(build(), spec_for(), first=first, epochs=5)
        assert [(m.epoch, m.step, m.batch.tolist()) for m in rest] == whole[first:]


def test_steps_per_epoch_are_unknown_if_they_change() -> None:
    lengths = adopt(LOADERS["sampler"](), spec_for(), lambda text: None).lengths
    assert (lengths.per_epoch, lengths.before(3), lengths.locate(4)) == (None, 6, (2, 1))
    fixed = adopt(Numbers(40), spec_for(), lambda text: None).lengths
    assert (fixed.per_epoch, fixed.before(3), fixed.locate(9), fixed.before(None)) == (4, 12, (2, 1), None)


def test_a_sampler_may_reject_epochs_beyond_its_plan() -> None:
    class Planned(Growing):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = [0, 0, 1][epoch]

    loader = DataLoader(Numbers(40), batch_size=10, sampler=Planned())
    assert [m.epoch for m in micros(loader, spec_for(), first=1, epochs=3)] == [1, 2, 2]


def test_a_sampler_that_does_not_know_its_length_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    class Estimated(Growing):
        set_epoch = None  # type: ignore[assignment]

        def __iter__(self) -> Iterator[int]:
            return iter(range(25))

        def __len__(self) -> int:
            return 40

    loader = DataLoader(Numbers(40), batch_size=10, sampler=Estimated())
    assert len(micros(loader, spec_for(), epochs=2)) == 6
    assert capsys.readouterr().out.count("yielded 3 batches in epoch 0, but its length says 4") == 1
