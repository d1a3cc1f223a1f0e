"""Run folders made by somebody who means harm: under each name a link, a pipe, a device or a folder.

    template = make_run(folder)                      # a run with everything that runs write
    for case in cases(template):
        problem = attempt(case, template, scratch)   # None if nothing outside was touched, and nothing blocked

Each attempt continues a copy of the run, or reads it, in a forked process. It may succeed, or fail with a code.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import stat
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

from paceline.config.launch import LaunchSpec
from paceline.diagnose import goodput
from paceline.errors import PacelineError
from paceline.launcher.local.start import open_logs
from paceline.run import failures, heartbeat, ledger
from paceline.run.folder import RunFolder
from paceline.tools.cli.checkpoint import app
from paceline.train.trainer import Trainer  # here, not in every forked process

KINDS = ("link to a file", "link to a folder", "dangling link", "pipe", "device", "folder", "socket")
SECONDS = 120  # in which every attempt ends, also on a busy machine; most take 0.1
RANKS = 2


@dataclass(frozen=True)
class Case:
    name: str  # in the run folder
    kind: str
    action: str


def train(run: str, epochs: int, **settings: object) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.ones(16, 2), torch.ones(16, 1))
    trainer = Trainer(
        nn.Linear(2, 1), criterion=nn.MSELoss(), batch=8, run=run, save_every=2, save_best="loss", quiet=True,
        preflight=False, loggers=["csv"], **settings,
    )  # fmt: skip
    trainer.train(data, data, epochs=epochs)


def make_run(folder: Path) -> Path:
    """A run of two epochs, with every file that a run declares."""
    status = _in_fork(lambda: train(str(folder), 2))
    assert status == 0
    run = RunFolder(folder)
    for path in run.folders:
        path.mkdir(exist_ok=True)
    for path in declared(run):
        if not path.exists():
            path.write_bytes(b"")
    return folder


def declared(run: RunFolder) -> list[Path]:
    per_rank = (run.rank_stats, run.trace, run.rank_log, run.heartbeat, run.suspects, run.failure, run.failure_space)
    ranks = [files(rank) for files in per_rank for rank in range(RANKS)]
    return sorted({*run.files(), *ranks})


def names(template: Path) -> list[str]:
    run = RunFolder(template)
    checkpoint = max(run.checkpoints.glob("step-*"))
    paths = [*run.folders, *declared(run), checkpoint, *sorted(checkpoint.iterdir())]
    return [path.relative_to(template).as_posix() for path in paths]


def cases(template: Path) -> Iterator[Case]:
    kinds = [kind for kind in KINDS if kind != "device" or os.geteuid() == 0]
    return (Case(name, kind, action) for name in names(template) for kind in kinds for action in ACTIONS)


def attempt(case: Case, template: Path, scratch: Path) -> str | None:
    """What went wrong, if anything: a file outside was changed, or the attempt blocked or failed without a code."""
    outside, run = scratch / "outside", scratch / "run"
    for path in (outside, run):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(template, run)
    (outside / "folder").mkdir(parents=True)
    for name in ("file", "folder/file", "folder/step-000002", "folder/rank-0.log"):
        (outside / name).write_text("my only copy\n")
    before = _contents(outside)
    _put(case.kind, run / case.name, outside)
    status = _in_fork(lambda: ACTIONS[case.action](run))
    if _contents(outside) != before:
        return f"{case}: a file outside of the run folder was changed"
    return (
        None if status == 0 else f"{case}: {'it blocked' if status == -signal.SIGALRM else 'an error without a code'}"
    )


def _put(kind: str, path: Path, outside: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    targets = {"link to a file": "file", "link to a folder": "folder", "dangling link": "nothing"}
    if kind in targets:
        path.symlink_to(outside / targets[kind])
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    else:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero never ends


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _in_fork(work: Callable[[], None]) -> int:
    """The exit status of a process that does some work; an error with a code is a success."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        sys.stdout = sys.stderr = io.StringIO()
        try:
            work()
            status = 0
        except PacelineError:
            status = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _resume(run: Path) -> None:
    train(str(run), 3, resume=str(run))


def _start_launch(run: Path) -> None:
    """What a launcher does in the folder before and after its ranks."""
    with open_logs(LaunchSpec(run=str(run), resume=str(run))) as logs:
        failures.clear(logs.folder, range(RANKS), everything=True)
        for rank in range(RANKS):
            failures.reserve(logs.folder, rank)
            failures.FailureRecord(rank, 0.0, 1, "failed").write(logs.folder)
        _read_as_launcher(logs.folder)


def _read(run: Path) -> None:
    _read_as_launcher(RunFolder(run))
    commands = (["ls"], ["inspect"], ["verify"], ["export", "--to", "torch", "-o", str(run / "model.pt")])
    for command, *options in commands:
        result = CliRunner().invoke(app, [command, str(run), *options])
        if not isinstance(result.exception, (PacelineError, SystemExit, type(None))):
            raise result.exception


def _read_as_launcher(folder: RunFolder) -> None:
    ledger.events(folder)
    goodput.summarize(folder)
    heartbeat.read(folder)
    heartbeat.read_suspects(folder)
    failures.read(folder)
    for rank in range(RANKS):
        failures.tail(folder, rank)


ACTIONS: dict[str, Callable[[Path], None]] = {"resume": _resume, "launch": _start_launch, "read": _read}
