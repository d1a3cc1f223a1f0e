"""`paceline launch` and `paceline train`, as a person types them."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

import forked
import nodes
from samples import ALL, sample

PACELINE = [sys.executable, "-m", "paceline"]


def in_a_new_interpreter(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The tests of each verb that come first are done as a user does it, the others in a fork of this process."""
    return subprocess.run([*PACELINE, *args], cwd=cwd, capture_output=True, text=True, timeout=110)


def on_two_ranks(folder: Path, script: str, *options: str) -> tuple[int, str]:
    """Exit status and output of a launch on two ranks; forked from this process, which has imported torch."""
    with nodes.launchers(folder) as launch:
        launcher = launch("launch", "-n", "2", *options, write(folder, script))
        return launcher.end(), launcher.said


def write(folder: Path, text: str, name: str = "script.py") -> str:
    (folder / name).write_text(text)
    return name


HELLO = """
import argparse, os, sys
import torch, torch.distributed as dist
from beside import word
parser = argparse.ArgumentParser()
parser.add_argument("--value", type=int)
args = parser.parse_args()
dist.init_process_group("gloo")
tensor = torch.tensor([args.value * (dist.get_rank() + 1)])
dist.all_reduce(tensor)
print(word, "rank", dist.get_rank(), "of", dist.get_world_size(), "sum", tensor.item(), flush=True)
print("to stderr", dist.get_rank(), file=sys.stderr, flush=True)
assert __name__ == "__main__" and os.path.isabs(__file__) and os.path.basename(__file__) == "script.py"
assert os.environ["LOCAL_RANK"] == os.environ["RANK"] and os.environ["MASTER_ADDR"] == "127.0.0.1"
dist.destroy_process_group()
"""


@pytest.mark.parametrize("options", [[], pytest.param(["--fresh"], marks=pytest.mark.nightly)])
def test_a_script_that_torchrun_runs(tmp_path: Path, options: list[str]) -> None:
    write(tmp_path, "word = 'hello'", "beside.py")
    start = forked.paceline if options else in_a_new_interpreter  # --fresh starts two new ones anyway
    done = start("launch", "-n", "2", *options, write(tmp_path, HELLO), "--value", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "hello rank 0 of 2 sum 15\n"
    assert done.stderr == "ranks: 2 (requested); logs in runs/script/logs\nto stderr 0\n"
    logs = tmp_path / "runs" / "script" / "logs"
    assert "hello rank 0 of 2 sum 15" in (logs / "rank-0.log").read_text()
    assert (logs / "rank-1.log").read_text() == "hello rank 1 of 2 sum 15\nto stderr 1\n"


def test_a_module(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    write(package, "", "__init__.py")
    write(package, "import sys, os; print(sys.argv[1:], os.environ['RANK'])", "work.py")
    done = forked.paceline("launch", "-n", "2", "-m", "pack.work", "-x", "y", cwd=tmp_path)
    assert done.stdout == "['-x', 'y'] 0\n", done.stderr


def test_a_program_of_any_kind(tmp_path: Path) -> None:
    done = forked.paceline(
        "launch", "-n", "2", "--no-python", "sh", "-c", 'echo "$RANK of $WORLD_SIZE $0"', "a b", cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "0 of 2 a b\n"), done.stderr
    assert (tmp_path / "runs" / "sh" / "logs" / "rank-1.log").read_text() == "1 of 2 a b\n"


FAILING = """
import sys, paceline
from paceline import dist
dist.barrier()
print("before")
if dist.rank() == 1:
    raise RuntimeError("rank one had enough")
dist.barrier()
"""


@pytest.mark.parametrize("options", [[], pytest.param(["--fresh"], marks=pytest.mark.nightly)])
def test_the_first_failure_is_the_last_thing_on_screen_once(tmp_path: Path, options: list[str]) -> None:
    done = forked.paceline("launch", "-n", "2", *options, write(tmp_path, FAILING), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == "before\n"
    *_, last, place = done.stderr.rstrip().splitlines()
    assert last == "RuntimeError: rank one had enough" and place.startswith("  at: script.py:")
    assert done.stderr.count("Traceback") == 1
    assert "rank 1 failed first (log: runs/script/logs/rank-1.log)" in done.stderr
    assert "rank one had enough" in (tmp_path / "runs/script/logs/rank-1.log").read_text()


def test_a_script_that_changes_its_folder_keeps_its_traceback(tmp_path: Path) -> None:
    done = forked.paceline(
        "launch", "-n", "1", write(tmp_path, "import os; os.chdir('/'); raise ValueError('far')"), cwd=tmp_path
    )
    assert "\nValueError: far\n  at: script.py:1, " in done.stderr


def test_standard_input_reaches_rank_zero(tmp_path: Path) -> None:
    script = write(tmp_path, "import sys; print('got', sys.stdin.read())")
    write(tmp_path, "hello", "typed")

    def launch() -> None:
        os.dup2(os.open("typed", os.O_RDONLY), 0)
        forked.command("launch", "-n", "2", script)

    done = forked.function(launch, tmp_path)
    assert done.stdout == "got hello\n", done.stderr


def test_a_rank_that_ends_is_gone_for_those_who_wait_for_it(tmp_path: Path) -> None:
    script = """
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.barrier()
"""
    done = forked.paceline("launch", "-n", "2", write(tmp_path, script), cwd=tmp_path)
    assert done.returncode == 76 and "rank 1 exited with status 0" in done.stderr


def test_a_rank_that_is_slow_to_exit_is_reported_as_the_one_that_exited(tmp_path: Path) -> None:
    """The launcher sends SIGTERM half a second after rank 0 failed, while rank 1 is still exiting."""
    script = """
import atexit, time
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.barrier()
atexit.register(time.sleep, 1.5)
atexit.register(dist.destroy_process_group)
"""
    done = forked.paceline("launch", "-n", "2", write(tmp_path, script), cwd=tmp_path)
    assert done.returncode == 76 and "rank 1 exited with status 0" in done.stderr


LEAVES = """
import os, signal, subprocess, sys
def leave(setsid):
    if os.fork() == 0:
        if setsid:
            os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"left-{os.getpid()}", "w").close()
        signal.pause()
if os.environ["RANK"] == "1":
    leave(True)
    leave(False)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    while len([name for name in os.listdir() if name.startswith("left-")]) < 2:
        pass
"""


@pytest.mark.parametrize(("end", "status"), [("", 0), ("os.kill(os.getpid(), 9)", 137)])
def test_processes_that_ranks_left_behind_are_ended(tmp_path: Path, end: str, status: int) -> None:
    """They hold every pipe that the rank had; one of them ignores SIGTERM."""
    returned, said = on_two_ranks(tmp_path, f"{LEAVES}    {end}")
    assert (returned, "note: ended 3 child processes of ranks that had exited" in said) == (status, True), said
    assert not any(psutil.pid_exists(int(path.name[5:])) for path in tmp_path.glob("left-*"))


def test_a_killed_rank_is_named_not_those_that_missed_it(tmp_path: Path) -> None:
    script = "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(100)"
    for options in ([], ["--fresh"]):
        done = forked.paceline("launch", "-n", "3", *options, write(tmp_path, script), cwd=tmp_path)
        assert (done.returncode, "rank 1 was killed by SIGKILL" in done.stderr) == (137, True), done.stderr


def test_a_rank_that_answers_the_launchers_signal_is_not_the_cause(tmp_path: Path) -> None:
    script = """
import os, signal, sys, time
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    open("ready", "w").close()  # a pipe, which opens once the other rank reads
    time.sleep(100)
open("ready").read()
raise ValueError("the real cause")
"""
    os.mkfifo(tmp_path / "ready")
    done = forked.paceline("launch", "-n", "2", write(tmp_path, script), cwd=tmp_path)
    assert "\nValueError: the real cause\n  at: " in done.stderr
    assert "rank 1 failed first" in done.stderr


def test_exit_functions_run_also_when_a_rank_fails(tmp_path: Path) -> None:
    for end in ("sys.exit(3)", "1 / 0"):
        script = write(tmp_path, f"import atexit, sys; atexit.register(print, 'tidied'); {end}")
        assert "tidied" in forked.paceline("launch", "-n", "1", script, cwd=tmp_path).stdout


def test_streams_that_are_closed_are_no_obstacle(tmp_path: Path) -> None:
    write(tmp_path, "import sys; sys.stdin.read(); print('said'); open('done', 'w').close()")
    command = f"exec {' '.join(PACELINE)} launch -n 1 script.py <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, timeout=110)
    assert done.returncode == 0 and (tmp_path / "done").exists()
    assert "said" in (tmp_path / "runs/script/logs/rank-0.log").read_text()


def test_in_a_terminal_a_bar_stays_live_and_its_last_state_is_logged(tmp_path: Path) -> None:
    script = """
import sys
assert sys.stdout.isatty()
for frame in range(3000):
    sys.stdout.write(f"\\r\\x1b[2Kframe {frame} " + "." * 1000)
print("\\nend")
"""
    ours, theirs = pty.openpty()
    name = write(tmp_path, script)
    process = forked.start(lambda: forked.command("launch", "-n", "1", name), tmp_path, theirs, theirs)
    os.close(theirs)
    screen = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # Linux's way to say that the other side is closed
            break
        screen += data
    os.close(ours)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert b"frame 17 " in screen and b"frame 2999 " in screen
    logged = (tmp_path / "runs/script/logs/rank-0.log").read_text().splitlines()
    assert logged[-1] == "end" and logged[-2].startswith("frame 2999 ") and len(logged) == 2


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ("import sys; sys.exit(7)", 7, "sys.exit(7)"),
        ("import os; os._exit(5)", 5, "exited with status 5"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 139, "SIGSEGV"),
        ("import paceline; paceline.get_model('x')", 1, "[model.unknown-name]"),
        ("def f(:", 1, "SyntaxError"),
    ],
)
def test_every_exit_of_a_rank_has_its_status_and_message(tmp_path: Path, body: str, status: int, words: str) -> None:
    done = forked.paceline("launch", "-n", "1", write(tmp_path, body), cwd=tmp_path)
    assert (done.returncode, words in done.stderr) == (status, True), done.stderr
    if "SIGSEGV" not in words:  # a crash below Python is dumped with every frame, which is right
        assert "launcher/" not in done.stderr


SECOND_NODE = ("launch", "--nodes", "2", "--node-rank", "1", "-n", "1", "--master")


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["launch", "-n", "2", "none.py"], "launch.no-script"),
        (["launch", "-n", "0", "x.py"], "launch.bad-number"),
        (["launch", "-n", "1", "--port", "99999", "x.py"], "launch.bad-number"),
        (["launch", "-n", "1", "--node-rank", "1", "x.py"], "launch.bad-number"),
        (
            [*SECOND_NODE, "[1:2]:29500", "x.py"],
            "launch.unknown-host",
        ),  # no name server is asked for a name with a colon
        ([*SECOND_NODE, "a" * 64, "x.py"], "launch.unknown-host"),
        (["train", "empty.yaml"], "config.missing-section"),
        (["train", "model.layer=3", "-n", "1"], "model.unknown-option"),
        (["train", "micro_batch=3", "accumulate=7", "-n", "1"], "config.contradiction"),
        (["train", "device=cuda", "-n", "1"], "world.no-such-gpu"),
        (["launch", "-n", "1", "-m", "--no-python", "x.py"], "launch.bad-options"),
        (["launch", "-n", "1", "--no-python", "no-such-program"], "launch.no-program"),
        (["train", "none.yaml"], "config.missing-file"),
        (["train", "bach=3"], "config.unknown-key"),
        (["train", "model.name=gtp", "-n", "1"], "model.unknown-name"),
        (["train", "data.name=shape", "-n", "1"], "data.unknown-name"),
        (["train", "data.size=5000", "batch=10000", "-n", "1"], "data.smaller-than-batch"),
        (["config", "show", "batch=x"], "config.bad-value"),
        (["explain", "nonsense"], "paceline.unknown-code"),
    ],
)
def test_bad_input_gets_a_code_and_no_traceback(tmp_path: Path, args: list[str], code: str) -> None:
    write(tmp_path, "", "x.py")
    write(tmp_path, "batch: 4", "empty.yaml")
    done = forked.paceline(*args, cwd=tmp_path)
    assert done.returncode != 0
    if code not in ("data.smaller-than-batch", "launch.no-program"):  # these are found by the ranks
        assert not list(tmp_path.glob("runs/*"))
    assert f"[{code}]" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_has_a_code(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = forked.paceline("launch", "-n", "1", "--port", port, write(tmp_path, ""), cwd=tmp_path)
    assert "[launch.port-in-use]" in done.stderr and port in done.stderr


def test_an_interrupted_launch_leaves_no_process(tmp_path: Path) -> None:
    script = """
import os, pathlib, time
pathlib.Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(600)
"""
    name = write(tmp_path, script)
    with nodes.launchers(tmp_path) as launch:
        launcher = launch("launch", "-n", "2", name)
        pids = [tmp_path / f"pid-{rank}" for rank in range(2)]
        _until(lambda: all(path.exists() and path.read_text() for path in pids))
        os.killpg(launcher.pid, signal.SIGINT)  # what a terminal's Ctrl-C does
        assert launcher.end() == 130, launcher.said
    assert launcher.said.rstrip().endswith("interrupted; partial results are in runs/script")
    assert "Traceback" not in launcher.said and "death signal" not in launcher.said
    for path in pids:
        assert not Path(f"/proc/{path.read_text()}").exists()


def test_train_runs_a_recipe_on_two_ranks_and_fills_the_run_folder(tmp_path: Path) -> None:
    recipe = {
        "model": {"name": "mlp", "inputs": 64, "width": 16},
        "data": {"name": "shapes", "size": 8, "channels": 1, "length": 64, "val_length": 16},
        "batch": 16,
        "train": {"epochs": 5},
        "env": {"MY_VARIABLE": "there"},
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(recipe))
    done = forked.paceline("train", "small.yaml", "train.epochs=2", "-n", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "small"
    for words in ("replicate=2", "initial loss", "final loss", "validation loss", "run folder: runs/small"):
        assert words in done.stdout
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "evaluation" not in line]) == 8
    assert (run / "logs" / "rank-1.log").exists()
    assert (run / "checkpoints" / "step-000008" / "manifest.json").exists()


def test_a_run_resumes_in_its_own_folder_on_another_number_of_ranks(tmp_path: Path) -> None:
    recipe = {
        "model": {"name": "mlp", "inputs": 64, "width": 16},
        "data": {"name": "shapes", "size": 8, "channels": 1, "length": 64, "val_length": 16},
        "batch": 16,
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(recipe))
    first = forked.paceline("train", "small.yaml", "train.max_steps=5", "-n", "2", cwd=tmp_path)
    second = forked.paceline("train", "small.yaml", "train.max_steps=8", "resume=auto", "-n", "1", cwd=tmp_path)
    assert (first.returncode, second.returncode) == (0, 0), second.stderr
    assert "resuming runs/small from step-000005 (step 5)" in second.stdout
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["small"]
    lines = [json.loads(line) for line in (tmp_path / "runs" / "small" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "evaluation" not in line] == list(range(1, 9))


def test_train_without_a_recipe_takes_the_embedded_one(tmp_path: Path) -> None:
    start = in_a_new_interpreter if ALL else forked.paceline
    done = start("train", "train.max_steps=3", "model.layers=1", "model.width=32", "data.size=20000", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("bigram model", "sample text:", "run folder: runs/gpt"):
        assert words in done.stdout
    assert "ranks: 2 (no GPU)" in done.stderr


def test_run_false_leaves_nothing(tmp_path: Path) -> None:
    done = forked.paceline(
        "train", "run=false", "train.max_steps=2", "model.layers=1", "model.width=32", "data.size=20000", "-n", "1",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_config_show_and_schema(tmp_path: Path) -> None:
    shown = in_a_new_interpreter("config", "show", "batch=64", "micro_batch=8", "-n", "4", cwd=tmp_path)
    assert yaml.safe_load(shown.stdout)["batch"] == 64
    assert "override batch=64" in shown.stdout
    assert "batch 64 / (8 per rank × 4 data ranks), rounded up" in shown.stdout
    schema = json.loads(forked.paceline("config", "schema", cwd=tmp_path).stdout)
    assert "samples per optimizer step" in schema["properties"]["batch"]["description"]


@pytest.mark.parametrize("key", ["port", "backend"])
def test_fallback_continues_with_a_message(tmp_path: Path, key: str) -> None:
    small = ["train.max_steps=2", "model.layers=1", "model.width=32", "data.size=20000", "fallback=true", "-n", "2"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        change = f"port={taken.getsockname()[1]}" if key == "port" else "backend=nccl"
        done = forked.paceline("train", change, *small, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("continuing as a single rank" if key == "port" else "continuing with gloo") in done.stderr
    assert ("layout         one rank" if key == "port" else "replicate=2") in done.stdout


def test_fallback_continues_alone_when_the_others_never_join(tmp_path: Path) -> None:
    script = """
import torch, paceline
data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
trainer = paceline.Trainer(
    torch.nn.Linear(2, 1), criterion=torch.nn.MSELoss(), batch=4, run=False, fallback=True, timeout=2.0
)
print("world", trainer.world.size, "steps", len(trainer.train(data, epochs=1).steps))
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    write(tmp_path, script)
    done = forked.script(tmp_path / "script.py", cwd=tmp_path, env=alone)
    assert "world 1 steps 2" in done.stdout, done.stderr
    assert "continuing as a single rank" in done.stderr


def test_explain_shows_a_codes_page(tmp_path: Path) -> None:
    done = in_a_new_interpreter("explain", "[config.unknown-key]", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("config.unknown-key\n")


def test_ranks_that_were_asked_for_are_shown_with_their_number(tmp_path: Path) -> None:
    script = "import os\nprint('this is', os.environ['RANK'], flush=True)"
    done = forked.paceline("launch", "-n", "3", "--tee", "0,2", write(tmp_path, script), cwd=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] this is 0", "[rank 2] this is 2"], done.stderr
    assert (tmp_path / "runs/script/logs/rank-0.log").read_text() == "this is 0\n"


@pytest.mark.parametrize("options", [[], ["--fresh"]])
def test_a_script_for_the_older_launcher_gets_its_local_rank(tmp_path: Path, options: list[str]) -> None:
    script = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("rest")
args = parser.parse_args()
assert args.local_rank == int(os.environ["LOCAL_RANK"]) and args.rest == "word"
print("fine")
"""
    done = forked.paceline(
        "launch", "-n", "2", *options, "--pass-local-rank", write(tmp_path, script), "word", cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def test_a_failed_script_is_restarted_up_to_max_restarts(tmp_path: Path) -> None:
    script = """
import os
print("start", os.environ["TORCHELASTIC_RESTART_COUNT"], "of", os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] != "1":
    raise ValueError("once more")
"""
    name = write(tmp_path, script)
    done = forked.paceline("launch", "-n", "2", "--max-restarts", "2", name, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "start 0 of 2\nstart 1 of 2\n"), done.stderr
    assert done.stderr.count("restart 1 of 2: rank 1 raised ValueError") == 1 and "Traceback" not in done.stderr


def test_a_failure_of_an_earlier_start_is_not_reported_for_a_later_one(tmp_path: Path) -> None:
    script = """
import os
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise RuntimeError("of the first start")
if os.environ["RANK"] == "1":
    os._exit(9)
"""
    status, output = on_two_ranks(tmp_path, script, "--max-restarts", "1")
    assert status == 9 and "rank 1 exited with status 9" in output
    assert "first start" not in output.rpartition("fix")[0]


def test_ranks_that_exit_without_cleaning_up_have_succeeded(tmp_path: Path) -> None:
    assert on_two_ranks(tmp_path, "import os\nos._exit(0)") == (0, "ranks: 2 (requested); logs in runs/script/logs\n")


def test_an_environment_variable_of_the_command_reaches_the_ranks(tmp_path: Path) -> None:
    status, output = on_two_ranks(tmp_path, "import os; print(os.environ['OTHER'])", "--env", "OTHER=a b;c")
    assert (status, output.splitlines()[1]) == (0, "a b;c")


def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    script = """
import os, time
with open(f"pid-{os.environ['RANK']}.partial", "w") as file: file.write(str(os.getpid()))
os.rename(f"pid-{os.environ['RANK']}.partial", f"pid-{os.environ['RANK']}")
time.sleep(600)
"""
    for options in ([], ["--fresh"])[: sample(1, 2)]:
        name = write(tmp_path, script)
        with nodes.launchers(tmp_path) as launch:
            launcher = launch("launch", "-n", "2", *options, name)
            paths = [tmp_path / "pid-0", tmp_path / "pid-1"]
            _until(lambda paths=paths: all(path.exists() for path in paths))
            launcher.send(signal.SIGKILL)
            pids = [int(path.read_text()) for path in paths]
            _until(lambda pids=pids: not any(psutil.pid_exists(pid) for pid in pids))
        for path in paths:
            path.unlink()


def _until(reached: Callable[[], bool]) -> None:
    nodes.eventually(reached)
