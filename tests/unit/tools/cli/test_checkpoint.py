"""`paceline checkpoint`, as a person types it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint.checkpoint_store import step_name
from paceline.checkpoint.local_store import LocalStore
from paceline.tools.cli import main
from small_checkpoints import flip_a_bit, write


@pytest.fixture
def run(in_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a command prints on both streams, and its exit status."""

    def run(*arguments: object) -> tuple[str, int]:
        monkeypatch.setattr("sys.argv", ["paceline", "checkpoint", *(str(argument) for argument in arguments)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        streams = capsys.readouterr()
        return streams.out + streams.err, int(ended.value.code or 0)

    return run


@pytest.fixture
def checkpoints(in_folder: Path) -> Path:
    """Two of a run: the first without an optimizer and the best one, the second the latest."""
    folder = in_folder / "runs" / "gpt" / "checkpoints"
    layout = {"ranks": 4, "replicate": 1, "shard": 2, "tensor": 2, "precision": "bf16"}
    for step in (100, 200):
        tensors = {"model/a": torch.full((8, 4), float(step)), "model/b": torch.zeros(3).bfloat16()}
        described = {"step": step, "optimizer": step == 200, "layout": layout, "metadata": {"note": "mine"}}
        write(folder / step_name(step), tensors, aliases={"model/z": "model/a"}, **described)
    LocalStore(folder).point("latest", ["step-000200"])
    LocalStore(folder).point("best", ["step-000100"])
    return folder


def test_ls_shows_the_newest_first_with_what_each_is(run: Any, checkpoints: Path) -> None:
    text, status = run("ls")
    title, newest, oldest = text.splitlines()
    assert status == 0 and title.split()[:2] == ["checkpoint", "step"]
    for line, parts in (
        (newest, ("runs/gpt/checkpoints/step-000200", " 200 ", "full", "latest")),
        (oldest, ("runs/gpt/checkpoints/step-000100", " 100 ", "weights only", "best")),
    ):
        assert all(part in line for part in (*parts, "4 ranks, shard 2, tensor 2, bf16", "sizes ok"))


@pytest.mark.parametrize("path", ["runs", "runs/gpt", "runs/gpt/checkpoints", "gpt"])
def test_ls_takes_runs_a_run_or_its_checkpoints(run: Any, checkpoints: Path, path: str) -> None:
    text, _ = run("ls", path, "--json")
    assert [(each["step"], each["marks"], each["problem"]) for each in json.loads(text)] == [
        (200, ["latest"], None),
        (100, ["best"], None),
    ]


def test_ls_says_why_one_is_damaged(run: Any, checkpoints: Path) -> None:
    with (checkpoints / "step-000200" / "rank-0.safetensors").open("ab") as file:
        file.write(b"more")
    text, status = run("ls", checkpoints / "step-000200")
    assert status == 0 and "corrupted: rank-0.safetensors has " in text


def test_ls_reports_that_there_are_no_checkpoints(run: Any, in_folder: Path) -> None:
    assert run("ls") == ("No checkpoints found in runs.\n", 0)
    (in_folder / "empty").mkdir()
    assert run("ls", "empty") == ("No checkpoints found in empty.\n", 0)
    assert run("ls", "empty", "--json") == ("[]\n", 0)


def test_inspect_fits_on_a_screen(run: Any, checkpoints: Path) -> None:
    tensors = {f"model/layer{n}.{part}": torch.zeros(n + 1) for n in range(40) for part in ("weight", "bias")}
    tensors |= {f"optimizer/layer{n}.weight/exp_avg": torch.zeros(n + 1) for n in range(40)}
    write(checkpoints / "step-000300", tensors, step=300, metadata={"note": "x" * 500})
    text, status = run("inspect", "runs/gpt")
    assert status == 0 and "step-000300" in text
    lines = text.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert ["model/layer39", "2", "80", "F32"] in [line.split()[:4] for line in lines]
    assert lines[-1].startswith("120 tensors")


@pytest.mark.parametrize(
    "words", [("runs/gpt", "--best"), ("runs/gpt/checkpoints/best",), ("runs/gpt/checkpoints", "--best")]
)
def test_the_best_checkpoint_can_be_chosen(run: Any, checkpoints: Path, words: tuple[str, ...]) -> None:
    text, status = run("inspect", *words)
    assert status == 0 and "step-000100" in text and "step-000200" not in text
    text, status = run("export", *words, "--to", "torch", "-o", "best.pt")
    assert status == 0 and torch.load("best.pt")["a"].unique().tolist() == [100.0]


def test_a_run_without_a_best_checkpoint_has_a_code(run: Any, checkpoints: Path) -> None:
    (checkpoints / "best").unlink()
    text, status = run("inspect", "runs/gpt", "--best")
    assert status == 2 and "[checkpoint.no-pointer]" in text


def test_inspect_lists_facts_and_tensors_of_the_newest(run: Any, checkpoints: Path) -> None:
    text, status = run("inspect", "runs/gpt", "--all")
    assert status == 0
    assert "step-000200" in text and '{"note": "mine"}' in text
    assert ["model/a", "F32", "[8,", "4]", "1", "128"] in [line.split() for line in text.splitlines()]
    assert "model/z is an alias of model/a" in text
    described = json.loads(run("inspect", checkpoints / "step-000100", "--json")[0])
    assert described["step"] == 100 and described["aliases"] == {"model/z": "model/a"}
    assert described["tensors"]["model/b"] == {"dtype": "BF16", "shape": [3], "chunks": 1, "bytes": 6}


def test_inspect_names_an_unreadable_one_that_it_passes_over(run: Any, checkpoints: Path) -> None:
    (checkpoints / "step-000200" / "manifest.json").write_text("{}")
    text, status = run("inspect", "runs/gpt")
    assert status == 0 and "Skipping it." in text and "step-000100" in text


def test_verify_reads_every_byte_and_names_what_differs(run: Any, checkpoints: Path) -> None:
    good = [f"runs/gpt/checkpoints/step-000{step}: ok\n" for step in (200, 100)]
    assert run("verify", "runs/gpt") == ("".join(good), 0)
    flip_a_bit(checkpoints / "step-000200")
    text, status = run("verify", "runs/gpt")
    assert status == 1 and good[1] in text
    assert "step-000200: corrupted: model/b in rank-0.safetensors, block at byte " in text
    assert run("verify", checkpoints / "step-000100")[1] == 0
    found = json.loads(run("verify", "runs/gpt", "--json")[0])
    assert [each["good"] for each in found] == [False, True] and "model/b" in found[0]["problem"]


def test_export_takes_the_newest_of_a_run_and_overwrites_nothing(run: Any, checkpoints: Path) -> None:
    arguments = ("export", "runs/gpt", "--to", "torch", "-o", "model.pt")
    text, status = run(*arguments)
    assert status == 0 and "step-000200 -> model.pt: 35 weights" in text
    assert torch.load("model.pt", weights_only=True)["z"].unique().tolist() == [200.0]
    text, status = run(*arguments)
    assert status == 2 and "[checkpoint.exists]" in text


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["export", "--to", "torch", "-o", "out"]])
def test_a_missing_checkpoint_has_a_code(run: Any, checkpoints: Path, command: list[str]) -> None:
    shutil.rmtree(checkpoints)
    for path in ("runs", "nowhere"):
        text, status = run(*command, path)
        assert status == 2 and "[checkpoint.missing]" in text
