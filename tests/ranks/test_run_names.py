"""One run, one folder: whatever its name comes from, however many Trainers it has, and if a start fails."""

from __future__ import annotations

from pathlib import Path

import pytest

import forked
from paceline.run import ledger
from paceline.run.folder import RunFolder
from paceline.run.lock import RunLock

SCRIPT = """
import os, sys, torch, paceline
data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
settings = {name: value for name, _, value in (each.partition("=") for each in sys.argv[1:])}
if "early" in settings: raise RuntimeError("before the Trainer")
def loss(model, batch):
    assert "fails" not in settings or model.training is None
    return model(batch[0]).square().mean()
steps = int(settings.pop("steps", 2))
kept = {name: value for name, value in settings.items() if name in ("run", "resume")}
trainer = paceline.Trainer(torch.nn.Linear(2, 1), loss_fn=loss, batch=8, save_every=1, **kept)
print("began at", trainer.step_count)
trainer.train(data, max_steps=steps)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return tmp_path


def runs_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs").iterdir())


def launched(folder: Path, *args: str, ranks: int = 1) -> str:
    done = forked.paceline("launch", "-n", str(ranks), *args, cwd=folder)
    return f"{done.stdout}{done.stderr}"


def test_a_launch_has_the_name_that_its_script_asks_for(script: Path) -> None:
    said = launched(script, "mine.py", "run=a", ranks=2)
    assert runs_in(script) == ["a"] and said.endswith("run folder: runs/a\n")
    folder = RunFolder(script / "runs" / "a")
    names = [event["event"] for event in ledger.events(folder)]
    assert (names[0], names[-1]) == ("launched", "ended") and "opened" in names
    assert "began at 0" in folder.rank_log(0).read_text() and folder.rank_log(1).exists()
    assert "finished" in forked.paceline("ls", cwd=script).stdout
    launched(script, "mine.py", "run=a")
    assert runs_in(script) == ["a", "a-2"]


def test_run_on_the_command_line_overrides_the_script(script: Path) -> None:
    said = launched(script, "--run", "b", "mine.py", "run=a")
    assert runs_in(script) == ["b"] and "--run names the run, not run='a' of the script" in said


def test_a_script_that_resumes_logs_to_the_run(script: Path) -> None:
    launched(script, "mine.py", "run=a")
    for option, args, began in (("--cpu", ("resume=auto",), 2), ("--resume", (), 3)):
        said = launched(script, option, "mine.py", "run=a", f"steps={began + 1}", *args)
        assert f"began at {began}" in said and runs_in(script) == ["a"]
    logs = [path.read_text() for path in sorted((script / "runs" / "a").glob("logs*/rank-0.log"))]
    assert [text.count("began at") for text in logs] == [1, 1, 1]


@pytest.mark.parametrize("how", ["fails=", "early="])
def test_a_start_that_fails_before_its_first_step_uses_up_no_name(script: Path, how: str) -> None:
    for _ in range(2):
        assert "failed first (log: runs/" in launched(script, "mine.py", "run=mine", how)
        assert runs_in(script) == ["mine"] and "failed (" in forked.paceline("ls", cwd=script).stdout
    launched(script, "mine.py", "run=mine")
    assert runs_in(script) == ["mine"] and "failed" not in (script / "runs/mine/ledger.jsonl").read_text()


def test_nor_does_one_without_a_launcher(script: Path) -> None:
    for _ in range(2):
        assert forked.script(Path("mine.py"), "run=a", "fails=", cwd=script).returncode
        assert runs_in(script) == ["a"]
    assert not forked.script(Path("mine.py"), "run=a", cwd=script).returncode
    assert runs_in(script) == ["a"] and (script / "runs/a/metrics.jsonl").exists()


def test_a_failed_start_does_not_hide_the_run_before_it(script: Path) -> None:
    launched(script, "mine.py", "run=a")
    launched(script, "mine.py", "run=a", "fails=")
    assert runs_in(script) == ["a", "a-2"]
    done = forked.paceline("checkpoint", "export", "runs/a-2", "--to", "torch", "-o", "x.pt", cwd=script)
    assert done.returncode and "pass runs/a, which has one" in done.stderr
    assert "began at 2" in launched(script, "mine.py", "run=a", "resume=auto", "steps=3")


DIES = """
import os, sys, torch, paceline
data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
trainer = paceline.Trainer(torch.nn.Linear(2, 1), criterion=torch.nn.MSELoss(), batch=8, save_every=1, run=sys.argv[1])
print("began at", trainer.step_count)
trainer.train(data, max_steps=2)
if not int(os.environ["TORCHELASTIC_RESTART_COUNT"]): os._exit(9)
"""


def test_a_restart_continues_under_the_name_of_the_script(script: Path) -> None:
    (script / "dies.py").write_text(DIES)
    said = launched(script, "--max-restarts", "1", "dies.py", "a", ranks=2)
    assert runs_in(script) == ["a"] and "start 2: resuming runs/a from step-000002" in said
    names = [event["event"] for event in ledger.events(RunFolder(script / "runs" / "a"))]
    assert names.count("launched") == 2 and names[-1] == "ended"


def failed(folder: Path) -> RunFolder:
    forked.script(Path("mine.py"), "run=a", "fails=", cwd=folder)
    return RunFolder(folder / "runs" / "a")


def test_a_failed_start_that_holds_more_is_kept(script: Path) -> None:
    folder = failed(script)
    before = folder.ledger.read_text()
    for path in (folder.path / "notes.txt", folder.metrics, folder.checkpoints / "step-000001"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("1")
        assert RunFolder.create(str(folder)).path.name == "a-2" and folder.ledger.read_text() == before
        path.unlink()
        (script / "runs" / "a-2" / "logs").rmdir()
    lock = RunLock(folder)
    lock.take()  # by a start that has not ended
    assert RunFolder.create(str(folder)).path.name == "a-2"
    lock.release()
    assert RunFolder.create(str(folder)) == folder and [path.name for path in folder.path.iterdir()] == ["logs"]


def test_what_a_script_without_a_trainer_did_is_kept(script: Path) -> None:
    (script / "plain.py").write_text("import sys\nsys.exit(int(sys.argv[1]))")
    for status, expected in ((0, ["plain"]), (1, ["plain", "plain-2"]), (1, ["plain", "plain-2"])):
        launched(script, "plain.py", str(status))
        assert runs_in(script) == expected


PAIR = """
import os, sys, torch, paceline
names, stop, first, every = sys.argv[1].split(","), int(sys.argv[2]), *(int(each) for each in sys.argv[3].split(","))
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 2))
def make(name, index):
    loss = lambda model, batch: model(batch[0]).square().mean()
    about = {"run": name} if name else {}
    return paceline.Trainer(torch.nn.Linear(2, 1), {"name": "sgd", "lr": 0.01}, loss_fn=loss, batch=2,
                            save_every=every[index] if isinstance(every, list) else every, resume="auto", **about)
pair = [make(name, index) for index, name in enumerate(names)]
print("began at", *(each.step_count for each in pair), flush=True)
order = pair if first == 0 else pair[::-1]
for batch in order[0].loader(data, ):
    for each in order:
        each.training_step(batch)
        if each is order[0] and each.step_count == stop: os._exit(9)
total = sum(parameter.double().sum().item() for each in pair for parameter in each.model.parameters())
print("ended with", *(each.step_count for each in pair), total)
"""


def pair(folder: Path, names: str, stop: int, first: int = 0, every: int = 8) -> str:
    (folder / "pair.py").write_text(PAIR)
    done = forked.script(Path("pair.py"), names, str(stop), f"{first},{every}", cwd=folder)
    return f"{done.stdout}{done.stderr}"


@pytest.mark.parametrize("names", [",", "gan,gan", "g,d"])
@pytest.mark.parametrize("first", [0, 1])
def test_trainers_that_train_together_resume_at_a_common_step(tmp_path: Path, names: str, first: int) -> None:
    unbroken = pair(tmp_path, names.replace("g", "whole-g").replace("d", "whole-d"), 0, first)
    if names == ",":
        (tmp_path / "runs" / "pair").rename(tmp_path / "runs" / "whole")
    pair(tmp_path, names, 24, first)  # one has saved step 24, the other one step 16
    again = pair(tmp_path, names, 0, first)
    assert "began at 16 16" in again
    assert again.splitlines()[-1] == unbroken.splitlines()[-1]


def test_every_trainer_of_a_script_is_in_its_run(tmp_path: Path) -> None:
    pair(tmp_path, "gan,gan", 0)
    assert runs_in(tmp_path) == ["gan"]
    assert {path.parents[2].name for path in tmp_path.rglob("manifest.json")} == {"gan", "trainer-2"}
    done = forked.paceline("checkpoint", "inspect", "runs/gan", cwd=tmp_path)
    assert "runs/gan/checkpoints/step-000032" in done.stdout


def test_trainers_without_a_common_checkpoint_do_not_resume(tmp_path: Path) -> None:
    pair(tmp_path, "gan,gan", 24)
    for path in (tmp_path / "runs" / "gan" / "trainer-2" / "checkpoints").glob("step-*"):
        path.rename(path.with_name(f".{path.name}"))
    said = pair(tmp_path, "gan,gan", 0)
    assert "[checkpoint.no-common-step]" in said and "runs/gan has [24, 16, 8]" in said


def test_they_start_over_if_only_one_of_them_has_saved(tmp_path: Path) -> None:
    pair(tmp_path, "gan,gan", 8)
    said = pair(tmp_path, "gan,gan", 0)
    assert "began at 0 0" in said and "not all Trainers of runs/gan have saved yet" in said


def test_a_failure_does_not_concern_a_run_that_has_finished(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, paceline\n"
        "from torch.utils.data import TensorDataset\n"
        "data = TensorDataset(torch.ones(16, 4), torch.ones(16, 1))\n"
        "for name in ('first', 'second'):\n"
        "    model, mse = torch.nn.Linear(4, 1), torch.nn.MSELoss()\n"
        "    paceline.Trainer(model, criterion=mse, batch=8, run=name, quiet=True).train(data, epochs=1)\n"
        "raise ValueError('later')\n"
    )
    assert forked.paceline("launch", "-n", "1", "--cpu", str(script), cwd=tmp_path).returncode == 1
    events = {name: list(ledger.events(RunFolder(tmp_path / "runs" / name))) for name in ("first", "second")}
    assert ledger.find_end(events["second"]).state == "finished"
    # The folder of the launch, which has its end as well, once.
    assert [event["event"] for event in events["first"] if event["event"] in ("failed", "ended")] == ["failed", "ended"]
