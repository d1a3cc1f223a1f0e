"""The tutorial: its script, notebook and page are equal, and each of the ways to run it works.

`make test` runs the script on the ranks of one launcher; the notebook has its cells, so that they are run as well.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

import forked
from nodes import reserve_ports

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "examples" / "tutorial"
SCRIPT = TUTORIAL / "distributed_training.py"
REBUILD = "python examples/tutorial/build.py"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tutorial_{name}", TUTORIAL / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def build() -> Any:
    return module("build")


def check(printed: str, kinds: set[str]) -> None:
    """Each kind of parallelism ended with the loss of the plain loop, and sharding divided the memory."""
    off = {
        name.strip(): float(value)
        for name, value in re.findall(r"^(.+?) last loss .+, at most (\S+) off", printed, re.M)
    }
    assert {*off} == kinds and max(off.values()) < 1e-5
    held = dict(re.findall(r"^(\w+), 2 ranks +bytes by rank: \[(\d+),", printed, re.M))
    assert int(held["fsdp"]) == pytest.approx(int(held["ddp"]) / 2, rel=0.01)
    assert len(re.findall(r"\d % idle|\d% idle", printed)) == 3


EVERYWHERE = {"by hand", "ddp", "ddp, 4 micro-batches", "pp, 1f1b", "fsdp", "tp", "shard × tensor"}
ALONE = {"dp", "split", "ddp on 3 ranks"}


def test_the_notebook_has_the_cells_of_the_script(build: Any) -> None:
    written = nbformat.read(build.NOTEBOOK, as_version=4)
    for cell in written.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    assert written == build.read_source(), REBUILD


def test_the_page_and_its_pictures_are_those_of_the_notebook(build: Any) -> None:
    page, pictures = build.to_page(nbformat.read(build.NOTEBOOK, as_version=4))
    assert build.PAGE.read_text() == page, REBUILD
    pictures |= module("drawing").diagrams()
    written = {path.stem: path.read_text() for path in build.PAGE.parent.glob("*.svg")}
    assert written == pictures, f"{REBUILD}; python examples/tutorial/drawing.py docs/tutorial"
    assert {*re.findall(r"\((\w+)\.svg\)", page)} == {*pictures}


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_notebook_runs_from_top_to_bottom(build: Any) -> None:
    notebook = build.read_source()
    build.execute(notebook)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    check("".join(output.text for output in outputs if output.output_type == "stream"), EVERYWHERE | ALONE)
    assert {*build.to_page(notebook)[1]} == {"bubble", "memory"}


@pytest.mark.timeout(300)
def test_all_sections_run_on_the_ranks_of_one_launcher(tmp_path: Path) -> None:
    done = forked.paceline("launch", "-n", "2", str(SCRIPT), "--distributed", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout, EVERYWHERE)


@pytest.mark.nightly  # 10 CPU seconds
@pytest.mark.timeout(300)
def test_the_script_starts_its_ranks_and_writes_its_figures(tmp_path: Path) -> None:
    done = forked.script(SCRIPT, "--figures", "figures", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout, EVERYWHERE | ALONE)
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"bubble.svg", "memory.svg"}


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_the_script_starts_one_launcher_for_all_sections(tmp_path: Path) -> None:
    done = forked.script(SCRIPT, "--distributed", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout, EVERYWHERE)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 1)])
def test_torchrun_runs_it_on_one_node_and_on_two(nodes: int, ranks: int, tmp_path: Path) -> None:
    port = reserve_ports()
    head = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", str(ranks)]
    head += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    started = []
    for node in range(nodes):
        command = [*head, "--node-rank", str(node), str(SCRIPT), "--distributed"]
        with (tmp_path / f"{node}.log").open("w") as log:
            started.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path, env=os.environ))
    try:
        statuses = [process.wait(timeout=280) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    printed = [(tmp_path / f"{node}.log").read_text() for node in range(nodes)]
    assert statuses == [0] * nodes, "\n".join(printed)
    check(printed[0], EVERYWHERE)
