"""A rank that does not exit when the others have ended. Each takes the limit of that phase, a minute, so all but one of
the node's launcher (unit/launcher/local/test_hang_detector.py) run in `make test-all`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nodes import launchers, reserve_ports

HUNG = 79  # the exit status of a launch whose ranks made no progress
BLOCKS = {
    "lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "thread": "threading.Thread(target=threading.Event().wait, name='uploader').start()",
    "handler": "atexit.register(threading.Event().wait)",
}
SCRIPT = """
import atexit, threading, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.zeros(1))
rank = dist.get_rank()
dist.destroy_process_group()
if rank == 1:
    {block}
"""
SEEN = {"lock": "it is at script.py:8", "thread": "it waits for the thread uploader", "handler": "its code returned"}


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_rank_that_blocks_after_the_others_have_ended_is_named_and_ended(
    block: str, nodes: int, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(block=BLOCKS[block]))
    options = ("launch", "-n", str(2 // nodes), "--on-hang", "stop")
    with launchers(tmp_path) as launch:
        if nodes == 1:
            started = [launch(*options, "script.py")]
        else:
            meet = ("--nodes", "2", "--master", f"127.0.0.1:{reserve_ports()}")
            started = [launch(*options, *meet, "--node-rank", str(node), "script.py") for node in range(2)]
        statuses = [each.end() for each in started]
        assert statuses == [HUNG] * nodes, started[0].said
        for each in started:
            assert re.search(r"rank 1.* has not exited, idle for 1 min", each.said), each.said
            assert SEEN[block] in each.said
