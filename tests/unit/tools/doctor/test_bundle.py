"""A bundle contains what a bug report needs, without secrets and without leaving the run folder."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny
from paceline.checkpoint import manifest
from paceline.errors import CheckpointError, PacelineError
from paceline.run.failures import FailureRecord
from paceline.run.folder import RunFolder
from paceline.tools.doctor import bundle
from paceline.tools.doctor.bundle import write_bundle
from paceline.tools.doctor.finding import Finding
from samples import sample
from unit.tools.doctor import fake_secrets
from unit.tools.doctor.fake_secrets import every
from unit.tools.doctor.planting import leaked

ENVIRONMENT = {"HOME": "/home/ada", "USER": "ada", "PATH": "/usr/bin", "NCCL_DEBUG": "INFO", "LOCAL_RANK": "3"}
FINDINGS = [Finding("shared memory", "fail", "/dev/shm has 64 MiB", fix="docker run --shm-size=8g")]


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """A pipe that blocks must not block the tests."""
    signal.alarm(100)
    yield
    signal.alarm(0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run as the Trainer and a launcher leave it."""
    path = tmp_path_factory.mktemp("trained") / "gpt"
    settings = tiny.recipe("mlp", run=str(path), save_every=3, train={"max_steps": 6})
    tiny.trainer_of(settings).train()
    folder = RunFolder(path)
    folder.logs.mkdir(exist_ok=True)
    folder.rank_log(0).write_text("step 1 | loss 2.3171 | 53211 tokens/s\n")
    folder.hang.write_text(json.dumps({"kind": "hang", "ranks": [1], "seconds": 60}))
    folder.stack(1).write_text('File "/work/train.py", line 12 in main\n')
    folder.target.write_text(json.dumps({"kind": "script", "name": "train.py", "args": ["--lr", "3e-4"]}))
    FailureRecord(1, 9.5, 1, "RuntimeError: a shape differs").write(folder)
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it to change."""
    return Path(shutil.copytree(trained, tmp_path / "gpt"))


def contents(path: Path) -> dict[str, bytes]:
    """The members of a bundle by name, without the folder that they are in."""
    with tarfile.open(path) as archive:
        found = {}
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            found[member.name.partition("/")[2]] = file.read()
        return found


def bundled(run: Path, environment: dict[str, str] | None = None) -> dict[str, bytes]:
    target = run.parent / f"bundle-{len(list(run.parent.iterdir()))}.tar.gz"
    return contents(write_bundle(run, target, FINDINGS, ENVIRONMENT if environment is None else environment))


def readme(members: dict[str, bytes]) -> str:
    return members["README.txt"].decode()


def test_a_bundle_has_what_the_run_recorded(trained: Path, tmp_path: Path) -> None:
    members = contents(write_bundle(trained, tmp_path / "x.tar.gz", FINDINGS, ENVIRONMENT))
    assert set(members) == {
        "README.txt",
        "doctor.json",
        "environment.json",
        "packages.txt",
        "config.yaml",
        "derived.json",
        "ledger.jsonl",
        "metrics.jsonl",
        "events/rank-00000.jsonl",
        "logs/rank-0.log",
        "logs/hang.json",
        "logs/stack-1.txt",
        "logs/failure-1.json",
        "logs/target.json",
        "checkpoints/step-000003/manifest.json",
        "checkpoints/step-000006/manifest.json",
    }
    folder = RunFolder(trained)
    for path in (folder.metrics, folder.rank_log(0), folder.rank_stats(0)):
        assert members[str(path.relative_to(trained))] == path.read_bytes()
    for path in (folder.derived, folder.hang, folder.failure(1), folder.target):
        assert json.loads(members[str(path.relative_to(trained))]) == json.loads(path.read_bytes())
    recipe, events = members["config.yaml"].decode(), members["ledger.jsonl"].decode().splitlines()
    assert set(folder.config.read_text().splitlines()) - set(recipe.splitlines()) <= {f"run: {trained}  # the caller"}
    for found, line in zip(events, folder.ledger.read_text().splitlines(), strict=True):
        event = json.loads(line)
        assert json.loads(found) | {"run": "", "name": ""} == event | {"run": "", "name": ""}
    saved = json.loads(members["checkpoints/step-000006/manifest.json"])
    whole = json.loads(folder.checkpoints.joinpath("step-000006", "manifest.json").read_bytes())
    assert {name: each["shape"] for name, each in saved["tensors"].items()} == {
        name: each["shape"] for name, each in whole["tensors"].items()
    }
    assert json.loads(members["doctor.json"]) == [FINDINGS[0].to_json()]
    assert "torch 2" in members["packages.txt"].decode()
    assert all(name in readme(members) for name in members if name != "README.txt")
    assert "before you share it" in readme(members)


def test_the_name_of_a_manifest_is_that_of_checkpoints() -> None:
    assert manifest.NAME == bundle.MANIFEST


def test_only_known_variables_are_named_and_only_known_values_shown(run: Path) -> None:
    job = {
        "SLURM_JOB_USER": "ada",
        "SLURM_JWT": "abc",
        "PACELINE_TOKEN": "abc",
        "WORLD_SIZE": "8",
        "DB": "x",
        "RANK": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "db7.acme.example",
        "MASTER_PORT": "29500",
    }
    found = json.loads(bundled(run, {**ENVIRONMENT, **job})["environment.json"])
    assert {name: "-" if "<#" in str(value) else value for name, value in found.items()} == {
        "HOME": "-",
        "PACELINE_TOKEN": "-",
        "LOCAL_RANK": "3",
        "MASTER_ADDR": "-",
        "MASTER_PORT": "29500",
        "NCCL_DEBUG": "INFO",
        "USER": "-",
        "NCCL_SOCKET_IFNAME": "lo",
        "PATH": "/usr/bin",
        "RANK": "1",
        "WORLD_SIZE": "8",
        "others": 3,
    }


@pytest.mark.parametrize("seed", range(sample(1, 40)))
def test_nothing_of_a_planted_secret_is_in_a_bundle(seed: int, run: Path) -> None:
    assert len(fake_secrets.KINDS) >= 60
    assert leaked(run, seed, FINDINGS, ENVIRONMENT) == []


def test_findings_are_redacted(run: Path) -> None:
    secret = fake_secrets.made_up(30)
    found = Finding("proxy", "warn", f"HTTPS_PROXY is http://me:{secret}@proxy:3128", fix=f"export API_KEY={secret}")
    members = contents(write_bundle(run, run.parent / "x.tar.gz", [found], ENVIRONMENT))
    assert secret.encode() not in members["doctor.json"]
    assert b'"check": "proxy"' in members["doctor.json"]


def test_what_was_left_out_is_counted_by_file_and_said(run: Path) -> None:
    RunFolder(run).rank_log(0).write_text("step 1 | loss 2.5\nhello zyx\nwho is zyx\nKeyError: 'zyx'\n")
    said: list[str] = []
    path = write_bundle(run, run.parent / "x.tar.gz", FINDINGS, ENVIRONMENT, said.append)
    members = contents(path)
    assert members["logs/rank-0.log"].decode().splitlines()[1] == "[… 2 lines left out …]"
    assert "logs/rank-0.log: 2 lines, 1 value" in said
    assert all(line in readme(members) for line in said)
    assert not any(word in line for line in said for word in ("hello", "zyx"))


def test_the_last_records_of_the_metrics_are_kept(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = RunFolder(run).metrics
    metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(2500)))
    steps = [json.loads(line)["step"] for line in bundled(run)["metrics.jsonl"].splitlines()]
    assert steps == list(range(500, 2500))
    monkeypatch.setattr(bundle, "_RECORDS_BYTES", 10_005)  # cuts a record
    steps = [json.loads(line)["step"] for line in bundled(run)["metrics.jsonl"].splitlines()]
    assert 0 < len(steps) < 1000
    assert steps == list(range(2500 - len(steps), 2500))


def test_a_long_log_is_cut_between_lines(run: Path) -> None:
    log = RunFolder(run).rank_log(0)
    log.write_text("".join(f"step {step:09d} | loss 2.5\n" for step in range(200_000)))
    text = bundled(run)["logs/rank-0.log"].decode()
    assert len(text) < bundle.HEAD + bundle.TAIL + 100
    head, marker, tail = text.partition("\n[… ")
    assert marker
    assert head.startswith("step 000000000 |")
    assert tail.endswith("step 000199999 | loss 2.5\n")
    assert {len(line) for line in head.splitlines()} == {len(line) for line in tail.splitlines()[1:]} == {25}


@pytest.mark.parametrize("shift", [20, 50])
@pytest.mark.parametrize("place", [20_000, 200_000 - 80_000], ids=["head", "tail"])
def test_a_secret_at_the_cut_is_not_cut_in_half(
    place: int, shift: int, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "HEAD", 20_000)
    monkeypatch.setattr(bundle, "TAIL", 80_000)
    secret = fake_secrets.made_up(40)
    line, start = f"export HF_TOKEN={secret}\n", place - shift
    filler = "step 1 | loss 2.5\n" * 12_000
    RunFolder(run).rank_log(0).write_text((filler[: start - 1] + "\n" + line + filler)[:199_999] + "\n")
    found = bundled(run)["logs/rank-0.log"].decode()
    assert "bytes were left out here" in found
    assert not any(secret[at : at + 8] in found for at in range(32))


def test_links_pipes_and_devices_are_left_out(run: Path) -> None:
    folder, outside = RunFolder(run), run.parent / "outside"
    outside.mkdir()
    (outside / "rank-0.log").write_text("mine alone\n")
    for path in (folder.rank_log(0), folder.derived, folder.metrics):
        path.unlink()
    folder.rank_log(0).symlink_to(outside / "rank-0.log")
    (folder.logs / "linked").symlink_to(outside)
    os.mkfifo(folder.derived)
    os.mkfifo(folder.rank_log(5))
    if os.geteuid() == 0:
        os.mknod(folder.metrics, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero never ends
    shutil.rmtree(folder.rank_stats(0).parent)
    folder.rank_stats(0).parent.symlink_to(outside)
    shutil.rmtree(folder.checkpoints / "step-000003")
    (folder.checkpoints / "step-000003").symlink_to(outside)
    members = bundled(run)
    assert b"mine alone" not in b"".join(members.values())
    assert "config.yaml" in members
    for line in (
        "logs/rank-0.log: rank-0.log is a symbolic link",
        "is a symbolic link",
        "derived.json: derived.json is a named pipe",
        "logs/rank-5.log: rank-5.log is a named pipe",
        "events: events is a symbolic link",
    ):
        assert line in readme(members)


def test_what_is_not_text_is_left_out(run: Path) -> None:
    folder = RunFolder(run)
    weights = next(folder.checkpoints.glob("*/*.safetensors"))
    shutil.copy(weights, folder.logs / "model.pt")
    (folder.logs / "rank-7.log").write_bytes(os.urandom(5000).replace(b"\0", b"\1"))
    folder.derived.write_text(json.dumps(["x" * 100] * 60_000))
    members = bundled(run)
    assert not {"logs/model.pt", "logs/rank-7.log", "derived.json"} & set(members)
    assert not any(".safetensors" in name for name in members)
    for line in ("logs/model.pt: not text", "logs/rank-7.log: not text", "derived.json: larger than 4.0 MiB"):
        assert line in readme(members)


def test_a_bundle_is_limited_in_size(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "MAX_BYTES", 2 << 20)
    for rank in range(6):
        RunFolder(run).rank_log(rank).write_text("step 1 | loss 2.5\n" * 12_000)
    members = bundled(run)
    assert sum(map(len, members.values())) < 2 << 20
    assert "config.yaml" in members
    assert "logs/rank-5.log: the bundle would be larger than 2.0 MiB" in readme(members)


def test_members_belong_to_nobody_and_stay_in_one_folder(run: Path) -> None:
    with tarfile.open(write_bundle(run, run.parent / "x.tar.gz", environment=ENVIRONMENT)) as archive:
        members = archive.getmembers()
    assert {(member.mode, member.uid, member.gid, member.uname, member.gname) for member in members} == {
        (0o600, 0, 0, "", "")
    }
    assert all(member.isfile() and member.name.startswith("paceline-gpt-") for member in members)
    assert not any(".." in member.name for member in members)
    assert stat.S_IMODE((run.parent / "x.tar.gz").stat().st_mode) == 0o600
    flags = (run.parent / "x.tar.gz").read_bytes()[3]
    assert flags & 8 == 0  # the header of gzip has no file name


def test_file_names_cannot_mislead_and_do_not_collide(run: Path) -> None:
    logs = RunFolder(run).logs
    first, second = (each.secret for each in every()[2:4])
    for name in (f"{first}.log", f"{second}.log", "new\nline\x1b[2J.log", os.fsdecode(b"\xff.log")):
        (logs / name).write_text(f"in {len(name)}\n")
    names = {name for name in bundled(run) if name.startswith("logs/")}
    assert sum(name.startswith("logs/removed-") for name in names) == 4
    assert all(name.isprintable() for name in names)


def test_nothing_is_overwritten(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bundle.time, "time", lambda: 1_800_000_000.0)
    made = [write_bundle(run, environment=ENVIRONMENT) for _ in range(3)]
    assert len({path.name for path in made}) == 3
    assert all(path.parent == tmp_path and path.name.startswith("paceline-gpt-2027") for path in made)
    mine = tmp_path / "mine.tar.gz"
    mine.write_text("mine")
    with pytest.raises(CheckpointError, match="already exists") as caught:
        write_bundle(run, mine, environment=ENVIRONMENT)
    assert caught.value.code == "checkpoint.exists"
    assert mine.read_text() == "mine"


def test_the_name_of_a_bundle_has_no_secret(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    secret = every()[2].secret
    path = write_bundle(run.rename(tmp_path / f"run-{secret}"), environment=ENVIRONMENT)
    assert secret not in path.name
    assert path.name.startswith("paceline-removed-")


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_without_a_run_there_is_an_error_with_a_code(name: str, tmp_path: Path, in_folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(PacelineError) as caught:
        write_bundle(tmp_path / name)
    assert caught.value.code == "checkpoint.missing"
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_launch_that_failed_before_its_run_started_can_be_bundled(tmp_path: Path) -> None:
    folder = RunFolder.create(str(tmp_path / "gpt"))
    folder.rank_log(0).write_text("ModuleNotFoundError: No module named 'x'\n")
    members = contents(write_bundle(folder.path, tmp_path / "x.tar.gz", environment=ENVIRONMENT))
    assert members["logs/rank-0.log"] == folder.rank_log(0).read_bytes()


def test_the_folder_of_checkpoints_names_its_run(run: Path) -> None:
    path = write_bundle(RunFolder(run).checkpoints, run.parent / "x.tar.gz", environment=ENVIRONMENT)
    assert "config.yaml" in contents(path)


def test_damaged_json_is_left_out(run: Path) -> None:
    RunFolder(run).hang.write_text('{"half": ')
    RunFolder(run).derived.write_text("[" * 100_000)
    members = bundled(run)
    assert not {"logs/hang.json", "derived.json"} & set(members)
    assert "logs/hang.json: not valid JSON" in readme(members)
    assert "derived.json: not valid JSON" in readme(members)


FULL_DISK = """
import os, resource, sys
from pathlib import Path
from paceline.tools.doctor.bundle import write_bundle
from paceline.errors import PacelineError

resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_bundle(Path(sys.argv[1]))
except PacelineError as error:
    print(error.code, error.what)
"""


def test_a_full_disk_leaves_nothing_behind(run: Path, tmp_path: Path) -> None:
    RunFolder(run).rank_log(0).write_bytes(base64.b64encode(os.urandom(100_000)).replace(b"a", b"\n"))
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(run)], cwd=work, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("checkpoint.not-exported Could not write ")
    assert "File too large" in done.stdout
    assert done.stderr == ""
    assert list(work.iterdir()) == []


def test_an_interrupt_leaves_nothing_behind(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tarfile.TarFile, "addfile", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_bundle(run, run.parent / "x.tar.gz", environment=ENVIRONMENT)
    assert not (run.parent / "x.tar.gz").exists()


def test_the_doctor_needs_no_torch(run: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    code = "import sys; from pathlib import Path; from paceline.tools.doctor.bundle import write_bundle\n"
    code += "write_bundle(Path(sys.argv[1]), Path(sys.argv[2]))"
    subprocess.run(
        [sys.executable, "-c", code, str(run), str(tmp_path / "x.tar.gz")],
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert contents(tmp_path / "x.tar.gz")
