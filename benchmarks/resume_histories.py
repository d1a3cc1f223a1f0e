"""The tables of "Resume" in docs/reliability.md.

    python benchmarks/resume_histories.py --positions 10000     # histories of data positions, without a model
    python benchmarks/resume_histories.py --trainings 300       # training histories, compared with an uninterrupted run
    python benchmarks/resume_histories.py --peer                # torch + DCP: 2 ranks, stopped, resumed on 3

Exit status 1 if a history can be distinguished from an uninterrupted run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import torch
import torch.distributed as torch_dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import histories
import positions
from histories import BATCH, BOUNDS, CASES, SAMPLES, STEPS, STEPS_PER_EPOCH, Tokens
from paceline.models.gpt import GPT
from paceline.tools.testing.runner import run_on_ranks

AT_ONCE = 20  # histories that share worlds
STOP = 7  # step after which the peer stops: the second of its second epoch


def live_positions(number: int) -> bool:
    began = time.perf_counter()
    # Raises an error that shows the smallest failing history.
    check = given(positions.data(), positions.starts())(positions.check)
    settings(max_examples=number, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))(check)()
    print(f"{number} histories of positions, identical to an uninterrupted run ({time.perf_counter() - began:.0f} s)")
    return True


def live_trainings(number: int, folder: Path) -> bool:
    began, wrong = time.perf_counter(), 0
    references = {case.name: histories.unbroken(case, folder) for case in CASES}
    worst = {case.name: [0, 0, 0.0, 0.0] for case in CASES}  # histories, stops, loss, evaluation
    layouts: Counter[str] = Counter()
    for first in range(0, number, AT_ONCE):
        lived = [histories.drawn(each) for each in range(first, min(number, first + AT_ONCE))]
        for history, told in zip(lived, histories.live(lived, folder / "lived"), strict=True):
            found, row = histories.compare(references[history.case.name], told), worst[history.case.name]
            layouts.update(leg.layout for leg in history.legs)
            row[:2] = row[0] + 1, row[1] + len(history.legs) - 1
            row[2:] = max(row[2], found.loss), max(row[3], found.evaluation)
            if found.wrong or not max(found.loss, found.evaluation) <= BOUNDS[history.case.precision]:
                wrong += 1
                print(f"VISIBLE: {history}: {found}", flush=True)
        shutil.rmtree(folder / "lived")
    print("| training | histories | stops | loss differs by | evaluations by | bound |\n|---|---|---|---|---|---|")
    for case in CASES:
        count, stops, loss, evaluation = worst[case.name]
        told_evaluation = f"{evaluation:.0e}" if case.evaluates else "-"
        print(f"| {case.name} | {count} | {stops} | {loss:.0e} | {told_evaluation} | {BOUNDS[case.precision]:.0e} |")
    print(f"legs by layout: {', '.join(f'{name} {count}' for name, count in sorted(layouts.items()))}")
    print(f"{number} histories, {wrong} of them visible ({time.perf_counter() - began:.0f} s)")
    return wrong == 0


def peer_table(folder: Path) -> None:
    print(f"{SAMPLES} samples, batch {BATCH}, stopped after step {STOP}, the second of an epoch of {STEPS_PER_EPOCH}")
    print("| resumed by | ranks | repeated in that epoch | skipped | loss differs by |\n|---|---|---|---|---|")
    for kind in ("ddp", "fsdp2"):
        reference = _launch(2, kind=kind, until=STEPS)
        for how in ("restarts the epoch", "skips batches"):
            for ranks in (2, 3):
                saved = folder / f"{kind} {how} {ranks}"
                first = _launch(2, kind=kind, until=STOP, save=saved)
                second = _launch(ranks, kind=kind, load=saved, skips=how == "skips batches")
                seen = Counter(index for epoch, index in first["samples"] + second["samples"] if epoch == 1)
                repeated = sum(count - 1 for count in seen.values())
                pairs = zip(reference["losses"][STOP:], second["losses"], strict=False)
                apart = max(abs(a - b) / abs(a) for a, b in pairs)
                print(f"| {kind}, {how} | 2 → {ranks} | {repeated} | {SAMPLES - len(seen)} | {apart:.0e} |", flush=True)


def _launch(ranks: int, **arguments: Any) -> dict[str, Any]:
    """In an existing process group, created by the rank runner."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"

        def body() -> None:
            told = peer(**arguments)
            if torch_dist.get_rank() == 0:
                result.write_text(json.dumps(told))

        run_on_ranks(ranks, body, timeout=120.0)
        told: dict[str, Any] = json.loads(result.read_text())
        return told


def peer(
    kind: str, until: int = STEPS, save: Path | None = None, load: Path | None = None, skips: bool = False
) -> dict[str, Any]:
    """A hand-written training loop: DistributedSampler with set_epoch, dcp.save and dcp.load."""
    ranks = torch_dist.get_world_size()
    torch.manual_seed(5)
    model = GPT(layers=2, width=16, heads=2, vocabulary=64, context=8).double()
    if kind == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
    wrapped = fully_shard(model) if kind == "fsdp2" else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    sampler = DistributedSampler(Tokens(), seed=0)
    loader = DataLoader(_Numbered(), batch_size=BATCH // ranks, sampler=sampler)
    progress = {"step": 0, "epoch": 0}
    if load is not None:
        weights, state = get_state_dict(wrapped, optimizer)
        stored = {"model": weights, "optimizer": state, "progress": progress}
        dcp.load(stored, checkpoint_id=load)
        set_state_dict(wrapped, optimizer, model_state_dict=weights, optim_state_dict=state)
        progress = stored["progress"]
    step, first_epoch = progress["step"], progress["epoch"]
    losses, samples = [], []
    for epoch in range(first_epoch, STEPS // STEPS_PER_EPOCH + 1):
        sampler.set_epoch(epoch)
        skipped = step % STEPS_PER_EPOCH if skips and epoch == first_epoch else 0
        for batch in islice(loader, skipped, None):
            if step == until:
                break
            optimizer.zero_grad()
            loss = wrapped(batch["inputs"], batch["targets"])["loss"]
            loss.backward()
            optimizer.step()
            step += 1
            total = torch.stack([loss.detach() * len(batch["index"]), torch.tensor(len(batch["index"])).double()])
            torch_dist.all_reduce(total)
            losses.append(float(total[0] / total[1]))
            samples += [[epoch, index] for index in batch["index"].tolist()]
        if step == until:
            break
    if save is not None:
        weights, state = get_state_dict(wrapped, optimizer)
        dcp.save({"model": weights, "optimizer": state, "progress": {"step": step, "epoch": epoch}}, checkpoint_id=save)
    everybody: list[Any] = [None] * ranks
    torch_dist.all_gather_object(everybody, samples)
    return {"losses": losses, "samples": [each for own in everybody for each in own]}


class _Numbered(Tokens):
    """Returns the index of the sample and draws with a per-sample seed, so that only the order can differ."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(index)
            return {**super().__getitem__(index), "index": torch.tensor(index)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, metavar="HISTORIES")
    parser.add_argument("--trainings", type=int, metavar="HISTORIES")
    parser.add_argument("--peer", action="store_true")
    asked = parser.parse_args()
    good = True
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="paceline-histories-") as folder:
        if asked.positions:
            good &= live_positions(asked.positions)
        if asked.trainings:
            good &= live_trainings(asked.trainings, Path(folder))
        if asked.peer:
            peer_table(Path(folder))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
