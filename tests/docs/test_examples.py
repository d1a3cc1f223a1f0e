"""Every example runs on two ranks, learns what it is about, and is short enough to be read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import forked

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = {
    path.relative_to(EXAMPLES).as_posix(): path
    for path in sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("cookbook/*.py")])
}

# Arguments that make an example small, where its defaults are those of a real run.
SMALL = {
    "cifar10.py": ["--epochs", "2", "--samples", "64", "--batch-size", "32", "--use-amp", "--use-ema"],
    "vae.py": ["--epochs", "2", "--samples", "512"],
    "gpt.py": ["--steps", "8", "--size", "100000", "--batch", "8", "--width", "32", "--layers", "2", "--context", "32",
               "--strategy", "fsdp"],
    "finetune_huggingface.py": ["--strategy", "fsdp", "--epochs", "3"],
}  # fmt: skip
# Values that an example compares, "BEFORE -> AFTER", and that grow; in all others they fall.
GROW = {"cookbook/freezing.py", "cookbook/resume_own_loop.py"}


def launched(name: str, cwd: Path, *args: str, ranks: int = 2) -> str:
    done = forked.paceline("launch", "-n", str(ranks), str(SCRIPTS[name]), *args, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compared(output: str) -> tuple[float, float]:
    (found,) = re.findall(r"(-?[\d.]+) -> (-?[\d.]+\d)", output)
    return float(found[0]), float(found[1])


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_runs_on_two_ranks(name: str, tmp_path: Path) -> None:
    before, after = compared(launched(name, tmp_path, *SMALL.get(name, [])))
    assert after > before if name in GROW else after < before


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_is_short_and_says_how_to_run_it(name: str) -> None:
    text = SCRIPTS[name].read_text()
    assert len(text.splitlines()) < 120
    assert re.match(r'""".+?\n\n(?:.*\n)*?.*paceline launch', text), "the docstring shows a command"


def test_every_example_is_in_the_list_and_every_recipe_of_the_cookbook_in_its_guide() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    assert [name for name in SCRIPTS if f"]({name})" not in listed] == []
    guide = (ROOT / "docs" / "guides" / "cookbook.md").read_text()
    assert [name for name in SCRIPTS if name.startswith("cookbook/") and f"`examples/{name}`" not in guide] == []


def test_there_are_examples_of_all_kinds() -> None:
    assert len(SCRIPTS) >= 14 and {"cifar10.py", "own_loop.py", "cookbook/contrastive.py"} <= {*SCRIPTS}


def test_cifar10_starts_ranks_by_itself_and_resumes(tmp_path: Path) -> None:
    args = ["--samples", "64", "--batch-size", "32", "--save-dir", "out/first"]
    first = forked.script(
        SCRIPTS["cifar10.py"], "--distributed", "--world-size", "2", "--epochs", "1", *args, cwd=tmp_path
    )
    assert first.returncode == 0, first.stdout + first.stderr
    assert re.search(r"world +2 ", first.stdout) and (tmp_path / "out/first/metrics.jsonl").exists()
    again = forked.script(SCRIPTS["cifar10.py"], "--epochs", "2", *args, "--resume", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    steps = [int(step) for step in re.findall(r'"step": (\d+)', (tmp_path / "out/first/metrics.jsonl").read_text())]
    assert {*steps} == {1, 2, 3, 4} and not (tmp_path / "out/first-2").exists()


def test_cifar10_reads_the_files_of_cifar_10_where_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for name in [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]:
        (folder / name).write_bytes(b"".join(bytes([label, *[25 * label] * 3072]) for label in range(10)))
    done = forked.script(SCRIPTS["cifar10.py"], "--epochs", "1", "--batch-size", "25", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "evaluation on CIFAR-10" in done.stdout and re.search(r"total steps +2 ", done.stdout)


@pytest.mark.nightly
def test_the_fine_tuned_model_is_a_folder_of_transformers(tmp_path: Path) -> None:
    output = launched("finetune_huggingface.py", tmp_path, "--epochs", "1")
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "finetuned").iterdir()}
    assert re.search(r"accuracy 0\.\d+, perplexity \d", output) and "'import " in output


@pytest.mark.nightly
def test_a_contrastive_loss_does_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    one, three = (
        compared(launched("cookbook/contrastive.py", tmp_path, "--steps", "5", ranks=ranks)) for ranks in (1, 3)
    )
    assert one == pytest.approx(three, abs=2e-4)


@pytest.mark.nightly
def test_an_own_loop_that_is_resumed_on_more_ranks_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    name = "cookbook/resume_own_loop.py"
    launched(name, tmp_path, "--stop-after", "10")
    resumed = launched(name, tmp_path, ranks=3)
    assert "step 10 -> 32" in resumed
    whole = launched(name, tmp_path, "--folder", "nothing", ranks=1)
    ends = [re.findall(r"-> 32: loss ([\d.]+), best ([\d.]+)", output)[0] for output in (resumed, whole)]
    assert [float(value) for value in ends[0]] == pytest.approx([float(value) for value in ends[1]], abs=2e-4)


@pytest.mark.parametrize("manifest", sorted(EXAMPLES.glob("k8s/*.yaml")), ids=lambda path: path.stem)
def test_a_manifest_is_what_its_command_prints(manifest: Path) -> None:
    first, _, rest = manifest.read_text().partition("\n")
    program, *args = first.removeprefix("# ").split()
    assert program == "paceline" and "--k8s" in args
    assert forked.paceline(*args, cwd=ROOT).stdout == rest


def test_the_batch_script_has_what_requeueing_needs_and_launches_its_arguments(tmp_path: Path) -> None:
    batch = EXAMPLES / "slurm" / "train.sbatch"
    options = [*re.findall(r"^#SBATCH (\S+)$", batch.read_text(), re.M)]
    printed = forked.paceline(
        "launch", "--slurm", "nodes=2,gpus=4,time=2h", "--dry-run", str(SCRIPTS["gpt.py"]), cwd=ROOT
    )
    needed = [
        line.split()[1]
        for line in printed.stdout.splitlines()
        if re.match(r"#SBATCH --(nodes|ntasks|gpus|time|signal|requeue|open)", line)
    ]
    assert len(needed) == 7 and {*needed} <= {*options}
    program = tmp_path / "paceline"  # instead of SLURM and a launch: what the script would have started
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", str(batch), "train.py", "a b"], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "launch train.py a b\n"
