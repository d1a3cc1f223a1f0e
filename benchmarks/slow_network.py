"""Training over a slow network: every way to communicate less, compared with plain DDP and with torch's own hooks.

    python benchmarks/slow_network.py --quick              throughput and bytes, once
    python benchmarks/slow_network.py --rounds 3           the same, medians of 3 rounds
    python benchmarks/slow_network.py --loss               loss after 1,000 steps; 2 to 3 minutes each
    python benchmarks/slow_network.py --write-docs         only write the tables into docs/slow-networks.md

Needs root: two ranks train in two network namespaces, joined by a link of 1 Gb/s, and then of 200 Mb/s (slow_link.py).
Results are kept in benchmarks/slow_network.json: a run replaces the rows that it measures (`--models`, `--methods`) and
prints the tables and the verdicts of all of them.

Bytes per step are those of rank 0's interface, with the headers of TCP. Rows that begin with `torch` are a loop written
by hand around DDP with torch's hooks, which does not synchronize batch norms; the others are the Trainer. `compute` is
a step of one rank on half of the batch, while another one keeps the second core as busy. The ideal ratio to DDP is

    (compute + bytes of DDP / rate of the link) / (compute + bytes of the method / rate of the link).

Loss does not depend on the link and is that of held-out data, after the same samples in the same order. Throughput and
bytes of rounds are those after the warm-up; for the loss, it takes 200 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from datetime import date
from functools import partial
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from slow_link import Pair, limit_rate, measure_link, on_both, sent_bytes, two_machines
from slow_network_cases import CASES, EVERY, LOSS_STEPS, LOSS_WARM_UP, METHODS, Case, Method
from slow_network_report import RATES, render, write_docs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline
import paceline.train.trainer  # once, before ranks are forked
from paceline.train.recipe_objects import build_model

RESULTS = Path(__file__).with_suffix(".json")
WARM_UP = 3  # steps after a start or a change of the link that are not counted


class Course(list[Any]):
    """Batches that measure segments of a training: each sets the rate of the link, and counts time and bytes of steps.

    A step is over when the next batch is requested. Trainer and hand-written loop iterate over them alike.
    """

    def __init__(
        self, batches: Sequence[Any], segments: Sequence[tuple[int | None, int]], *, whole: bool = False
    ) -> None:
        """`segments`: a rate and a number of steps each. `whole`: their mean time, not the median: steps differ."""
        super().__init__(islice(cycle(batches), sum(WARM_UP + steps for _, steps in segments) + 1))
        self._segments, self._whole = segments, whole
        self.measured: list[dict[str, Any]] = []

    def __iter__(self) -> Iterator[Any]:
        items = super().__iter__()
        self.measured = []
        for rate, steps in self._segments:
            limit_rate(rate)
            yield from islice(items, WARM_UP)
            sent, cpu, times = sent_bytes(), time.process_time(), [time.perf_counter()]
            for item in islice(items, steps):
                yield item
                times.append(time.perf_counter())
            taken, total = [after - before for before, after in pairwise(times)], sent_bytes() - sent
            seconds = statistics.mean(taken) if self._whole else statistics.median(taken)
            row = {"rate": rate, "seconds": seconds, "cpu": (time.process_time() - cpu) / steps}
            self.measured.append({**row, "bytes": total / steps, "steps": steps})
        yield from items


SILENT = ("run=false", "quiet=true", "device=cpu")


def train(case: Case, method: Method, course: Course, *overrides: str) -> list[dict[str, Any]]:
    """On a rank: by the Trainer."""
    config = case.config((*SILENT, "data.sharded=false", *method.sync, *overrides))
    history = paceline.Trainer.from_config(config).train(course, max_steps=len(course))
    # A whole number of periods of EVERY steps, if there is one: rounds are rare and large.
    last = len(course) // EVERY * EVERY or len(course)
    counted = [record["sent_mb"] for record in history.steps if "sent_mb" in record and record["step"] <= last]
    own = {"counted": statistics.mean(counted) * 1e6} if counted else {}
    return [{**segment, **own} for segment in course.measured]


def train_by_hand(case: Case, method: Method, course: Course) -> list[dict[str, Any]]:
    """On a rank: DDP as an expert writes it, with torch's hook."""
    config = case.config(())
    assert config.model is not None
    torch.manual_seed(0)
    model = paceline.get_model(config.model.name)(config)
    # With several buckets, torch's PowerSGD starts its collectives in different orders on the ranks: gloo aborts.
    size = 1000 if "powersgd" in method.name else None
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=size)
    if method.hook is not None:
        wrapped.register_comm_hook(*method.hook())
    if config.optimizer.name == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)
    half = case.batch // 2
    own = slice(dist.get_rank() * half, (dist.get_rank() + 1) * half)
    for batch in course:
        optimizer.zero_grad()
        output = wrapped(**{name: rows[own] for name, rows in batch.items()})
        (output if isinstance(output, Tensor) else output["loss"]).backward()
        if config.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
    return course.measured


def measure_compute(pair: Pair, case: Case, seconds: float) -> float:
    """Seconds of a step of one rank on its half of a batch, without communication."""
    half = case.batch // 2
    batches = case.batches(half)

    def alone() -> list[dict[str, Any]]:
        first = train(case, METHODS[0], Course(batches, [(None, 5)]), f"batch={half}")
        steps = max(8, int(seconds / first[0]["seconds"]))
        return train(case, METHODS[0], Course(batches, [(None, steps)]), f"batch={half}")

    return float(on_both(pair, alone, joined=False)[0]["seconds"])


def measure(pair: Pair, case: Case, method: Method, compute: float, seconds: float) -> list[dict[str, Any]]:
    """Rows of a method, for each rate; of PowerSGD also without a limit, which leaves its computation."""
    segments: list[tuple[int | None, int]] = []
    unlimited = (None,) if method.name == "DDP" or "powersgd" in method.name else ()
    for rate in (*unlimited, *RATES):
        transfer = case.parameters * 4 * method.share / (rate * 1e6 / 8) if rate else 0.0
        steps = EVERY if method.is_local else max(5, min(60, int(seconds / (compute + transfer))))
        segments.append((rate, steps))
    course = Course(case.batches(case.batch), segments, whole=method.is_local)
    rows = on_both(pair, partial(train_by_hand if method.by_hand else train, case, method, course))
    return [{"model": case.name, "method": method.name, **row} for row in rows]


def loss_after(pair: Pair, case: Case, method: Method, steps: int) -> dict[str, Any]:
    """Loss on held-out data after `steps` steps, without a limit."""
    training, validation = case.data()

    def by_trainer() -> dict[str, Any]:
        warm_up = (f"sync.warmup={LOSS_WARM_UP}",) if method.is_local else ()
        config = case.config((*SILENT, f"eval_every={steps}", *method.sync, *warm_up))
        started = time.perf_counter()
        history = trainer_with_hook(config, method).train(training, validation, max_steps=steps)
        took = time.perf_counter() - started
        last = statistics.mean(record["loss"] for record in history.steps[-100:])
        return {"loss": history.evaluations[-1]["loss"], "training": last, "took": took}

    return {"model": case.name, "method": method.name, "steps": steps, **on_both(pair, by_trainer)}


def trainer_with_hook(config: paceline.Config, method: Method) -> paceline.Trainer:
    if method.hook is None:
        return paceline.Trainer.from_config(config)
    settings = config.model_dump(exclude_unset=True, exclude={"model", "data", "train"})
    state, hook = method.hook()
    ddp = {"bucket_mb": 1000} if "powersgd" in method.name else {}  # one bucket: see train_by_hand
    return paceline.Trainer(build_model(config), comm_hook=hook, comm_state=state, ddp=ddp, **settings)


class Results:
    """Rows of all runs, by what they measure. A newer row replaces the older one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.kept: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def add(self, kind: str, key: str, row: dict[str, Any]) -> None:
        rows = self.kept.setdefault(kind, {})
        rows[key] = row
        places = {name: place for place, name in enumerate(each.name for each in (*CASES, *METHODS))}
        self.kept[kind] = dict(
            sorted(rows.items(), key=lambda item: [places.get(part, 0) for part in item[0].split("/")])
        )
        self._path.write_text(json.dumps(self.kept, indent=1) + "\n")


def run_throughput(pair: Pair, options: argparse.Namespace, results: Results) -> None:
    links = on_both(pair, lambda: {str(rate): measure_link(rate) for rate in RATES})
    for rate, link in links.items():
        results.add("link", rate, link)
        print(f"link of {rate} Mb/s: {link['goodput'] * 8e-6:.0f} Mb/s, latency {link['latency'] * 1e6:.0f} µs")
    rounds: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for case in options.cases:
            compute = measure_compute(pair, case, options.seconds)
            rounds.setdefault(case.name, []).append({"model": case.name, "seconds": compute})
            print(f"{case.name}: compute {compute * 1e3:.1f} ms", flush=True)
            for method in options.chosen:
                try:
                    rows = measure(pair, case, method, compute, options.seconds)
                except RuntimeError as error:
                    print(f"{case.name}, {method.name}: {error}", flush=True)
                    continue
                for row in rows:
                    rounds.setdefault(f"{case.name}/{method.name}/{row['rate']}", []).append(row)
                    print(json.dumps(row), flush=True)
    for key, rows in rounds.items():
        middle = {
            name: statistics.median(row[name] for row in rows) for name in ("seconds", "bytes") if name in rows[0]
        }
        results.add("throughput" if "/" in key else "compute", key, {**rows[0], **middle, "rounds": len(rows)})


def run_loss(pair: Pair, options: argparse.Namespace, results: Results) -> None:
    for case in options.cases:
        for method in options.chosen:
            if method.by_hand and method.hook is None:  # the same as DDP
                continue
            try:
                row = loss_after(pair, case, method, options.steps)
            except RuntimeError as error:
                print(f"{case.name}, {method.name}: {error}", flush=True)
                continue
            results.add("loss", f"{case.name}/{method.name}", row)
            print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of short runs")
    parser.add_argument("--rounds", type=int, default=0, help="of throughput and bytes")
    parser.add_argument("--loss", action="store_true")
    parser.add_argument("--steps", type=int, default=LOSS_STEPS, help="of --loss")
    parser.add_argument("--models", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--methods", nargs="*", default=[method.name for method in METHODS])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--write-docs", action="store_true")
    options = parser.parse_args()
    options.cases = [case for case in CASES if case.name in options.models]
    options.chosen = [method for method in METHODS if method.name in options.methods]
    options.seconds, options.rounds = (1.0, 1) if options.quick else (5.0, options.rounds)
    results = Results(options.results)
    if options.rounds or options.loss:
        for case in options.cases:
            case.data()  # once, before ranks are forked
        with two_machines() as pair:
            if options.rounds:
                run_throughput(pair, options, results)
            if options.loss:
                run_loss(pair, options, results)
        load = f"{os.cpu_count()} cores, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
        for kind in [kind for kind, ran in (("throughput", options.rounds), ("loss", options.loss)) if ran]:
            results.add("machine", kind, {"date": str(date.today()), "machine": load})
    print(render(results.kept))
    if options.write_docs:
        write_docs(results.kept)


if __name__ == "__main__":
    main()
