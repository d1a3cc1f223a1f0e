"""`paceline.launch` in a notebook: a real Jupyter kernel, and what a person sees in the cells."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

IMPORTS = """
import os, time, torch, paceline
import paceline.train.trainer  # before the fork, so that ranks need not
from paceline import dist
"""

# The kernel has run threads before it forks: the pool of a parent is what forked ranks hang in.
TRAIN = """
torch.set_num_threads(2)
torch.randn(300, 300) @ torch.randn(300, 300)

def fit(epochs):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    print("rank", dist.rank(), "begins")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = paceline.Trainer(model, optimizer, criterion=torch.nn.MSELoss(), batch=8, run=False)
    return trainer.train(data, epochs=epochs)

alone, history = [paceline.launch(fit, ranks=ranks, epochs=2) for ranks in (1, 2)]
print("same:", torch.allclose(torch.tensor(history.losses), torch.tensor(alone.losses)), len(history.losses))
"""

FAIL = """
def fail():
    dist.barrier()
    if dist.rank() == 1:
        paceline.get_model("nonsense")
    dist.barrier()

paceline.launch(fail, ranks=2)
"""

WAIT = """
def wait():
    dist.barrier()
    print("both are here", flush=True)
    while True:
        time.sleep(0.01)

paceline.launch(wait, ranks=2)
"""

USED_GPU = """
from unittest.mock import patch

with patch("torch.cuda.is_initialized", lambda: True):
    paceline.launch(dist.world, ranks=2)
"""


@dataclass
class Cell:
    """What a person sees of a cell that ran."""

    printed: str = ""
    result: str = ""
    error: str = ""  # the name of its class
    message: str = ""


@dataclass
class Notebook:
    manager: KernelManager
    client: BlockingKernelClient

    def run(self, code: str, interrupt_at: str | None = None) -> Cell:
        """Run a cell; with `interrupt_at`, press the stop button once it has printed that."""
        cell = Cell()

        def show(message: dict[str, Any]) -> None:
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                cell.printed += content["text"]
                if interrupt_at is not None and interrupt_at in content["text"]:
                    self.manager.interrupt_kernel()
            elif kind == "execute_result":
                cell.result = content["data"]["text/plain"]
            elif kind == "error":
                cell.error, cell.message = content["ename"], content["evalue"]

        self.client.execute_interactive(code, output_hook=show, timeout=50)
        return cell

    def children(self) -> list[str]:
        found = self.run("import pathlib\npathlib.Path(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read_text()")
        return found.result.strip("'").split()


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A kernel that listens on no port and writes nothing into the person's home."""
    folder = tmp_path_factory.mktemp("kernel")
    manager = KernelManager(transport="ipc", ip=str(folder / "ipc"), connection_file=str(folder / "kernel.json"))
    environment = {**os.environ, "IPYTHONDIR": str(folder)}
    environment.pop("PYTEST_CURRENT_TEST", None)  # with it, a kernel leaves the output of its children to pytest
    manager.start_kernel(env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=100)
        made = Notebook(manager, client)
        assert made.run(IMPORTS) == Cell()
        yield made
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        client.context.destroy(linger=0)
        manager.context.destroy(linger=0)


def test_a_function_of_a_cell_trains_on_two_ranks_and_its_history_comes_back(notebook: Notebook) -> None:
    cell = notebook.run(TRAIN)
    assert cell.error == "", cell
    assert "same: True 8\n" in cell.printed


def test_rank_zeros_output_is_seen_in_the_cell_and_the_others_is_not(notebook: Notebook) -> None:
    cell = notebook.run("paceline.launch(lambda: print('rank', dist.rank(), 'of', dist.world()), ranks=2)")
    assert cell == Cell(printed="rank 0 of 2\n")


def test_an_error_on_a_rank_is_the_cells_error_with_its_code(notebook: Notebook) -> None:
    cell = notebook.run(FAIL)
    assert cell.error == "ModelError"
    assert cell.message.startswith("[model.unknown-name] Unknown model 'nonsense'")


def test_the_stop_button_ends_the_ranks_and_the_next_launch_works(notebook: Notebook) -> None:
    cell = notebook.run(WAIT, interrupt_at="both are here")
    assert cell.error == "KeyboardInterrupt"
    assert notebook.children() == []
    assert notebook.run("paceline.launch(dist.world, ranks=2)").result == "2"


def test_a_gpu_that_the_notebook_has_used_is_an_error_with_a_code(notebook: Notebook) -> None:
    cell = notebook.run(USED_GPU)
    assert cell.error == "LaunchError"
    assert cell.message.startswith("[launch.gpu-already-open]")
