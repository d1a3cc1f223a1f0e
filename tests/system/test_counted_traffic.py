"""The bytes that a training counts are those that leave the machine: two ranks in two network namespaces, whose
interfaces count them too."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forked
from nodes import reserve_ports
from paceline import Trainer
from system import namespaces
from system.namespaces import Machine

pytestmark = pytest.mark.skipif(
    os.environ.get("PACELINE_SYSTEM_TESTS") != "1", reason="makes network namespaces: set PACELINE_SYSTEM_TESTS=1"
)

STEPS, EVERY = 30, 10
CASES: dict[str, dict[str, Any]] = {
    "fp16": {"compress": "fp16"},
    "int8": {"compress": "int8"},
    "powersgd": {"compress": "powersgd", "rank": 32},  # a lower one sends so little that headers count
    "local steps": {"every": 10, "warmup": 20},
    "DiLoCo": {"every": 10, "compress": "int8", "outer": "nesterov"},
}


def sent_bytes(interface: str) -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return int(next(line for line in lines if interface in line).partition(":")[2].split()[8])


class Meter:
    """Counted and sent bytes at every log point: the first one begins, so that only steps are between them."""

    def __init__(self, interface: str) -> None:
        self.interface, self.counted, self.sent = interface, list[float](), list[int]()

    def on_log(self, record: dict[str, Any]) -> None:
        self.counted.append(record["sent_mb"] * 1e6 * EVERY)
        self.sent.append(sent_bytes(self.interface))


def train(sync: dict[str, Any], meter: Meter) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 8))
    inputs = torch.randn(256, 64)
    settings: dict[str, Any] = {"log_every": EVERY, "run": False, "quiet": True, "device": "cpu"}
    trainer = Trainer(model, "adamw", batch=32, criterion=nn.MSELoss(), sync=sync, callbacks=[meter], **settings)
    trainer.train(torch.utils.data.TensorDataset(inputs, inputs[:, :8]), max_steps=STEPS + EVERY)


def train_all(rank: int, here: Machine, first: Machine, port: int) -> None:
    """On a rank: write what was counted and sent to a file."""
    here.enter()
    torch.set_num_threads(1)
    names = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ |= {"MASTER_ADDR": first.address, "GLOO_SOCKET_IFNAME": here.interface}
    found = {}
    for name, sync in CASES.items():
        meter = Meter(here.interface)
        train(sync, meter)
        found[name] = [sum(meter.counted[1:]), meter.sent[-1] - meter.sent[0]]
    Path(f"rank-{rank}.json").write_text(json.dumps(found))


@pytest.mark.nightly
def test_counted_bytes_are_those_of_the_interface(tmp_path: Path) -> None:
    with namespaces.joined() as machines, (tmp_path / "said").open("ab") as said:
        port = reserve_ports()
        ranks = [
            forked.start(partial(train_all, rank, here, machines[0], port), tmp_path, said.fileno(), said.fileno())
            for rank, here in enumerate(machines)
        ]
        try:
            status = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        except BaseException:  # the time of the test is over
            for pid in ranks:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            raise
    assert status == [0, 0], (tmp_path / "said").read_text()
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    for name in CASES:
        counted, sent = first[name][0], (first[name][1] + second[name][1]) / 2  # records have the mean of ranks
        assert abs(counted - sent) <= 0.05 * sent + 64 * 1024, f"{name}: counted {counted:.0f} of {sent:.0f} bytes"
