"""What a page shows of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ledgers import Line
from made_runs import make_run
from paceline.run.folder import RunFolder
from paceline.run.lock import RunLock
from paceline.tools.watch import live_run, page_values
from paceline.tools.watch.live_run import LiveRun
from paceline.tools.watch.page_values import log_lines
from watched import FAILED, FINISHED, HOSTILE, START, evaluation, run_folder, step


@pytest.fixture(autouse=True)
def every_update_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_run, "_SECONDS_BETWEEN", 0.0)


def test_the_head_of_a_run(tmp_path: Path) -> None:
    records = [step(1), step(2, skipped=True), evaluation(2, loss=3.0, accuracy=0.5)]
    head = page_values.head(LiveRun(run_folder(tmp_path / "run", records)))
    assert (head["name"], head["state"], head["step"], head["total"], head["batch"]) == ("run", "finished", 2, 10, 8)
    assert head["best"] == {"loss": (2, 1.0), "eval/loss": (2, 3.0), "eval/accuracy": (2, 0.5)}
    assert head["skipped"] == 1 and head["read"] == 1.0 and head["problems"] == []


def test_a_failure_is_named_by_its_signal_or_exception(tmp_path: Path) -> None:
    def texts(name: str, **end: object) -> list[str]:
        failed = (START + 5, "failed", {"state": "failed", "status": 1, "rank": 1, "step": 3, **end})
        found = page_values.about(LiveRun(run_folder(tmp_path / name, events=[*FINISHED[:2], failed])))["events"]
        return [event["text"] for event in found if event["event"] == "failed"]

    assert texts("killed", cause="signal", signal="SIGKILL") == ["SIGKILL"]
    assert texts("raised", cause="exception", exception="ValueError", text="Traceback:\n  boom") == ["ValueError"]
    assert texts("hung", cause="hang") == ["hang"]


def test_the_failure_of_a_script_without_a_launcher_is_on_the_timeline(tmp_path: Path) -> None:
    end = {"state": "failed", "status": 1, "cause": "exception", "exception": "ValueError", "rank": 1, "step": 3}
    events = [*FINISHED[:2], (START + 5, "rank-ended", end)]
    shown = page_values.about(LiveRun(run_folder(tmp_path / "torchrun", events=events)))["events"]
    assert shown[-1] == {"time": START + 5, "event": "failed", "text": "ValueError", "status": 1, "rank": 1, "step": 3}


@pytest.mark.parametrize(
    ("mode", "best"), [("null", (2, 0.75)), ("min", (1, 0.25)), ("max", (2, 0.75)), ("[1]", (2, 0.75))]
)
def test_the_metric_of_save_best(tmp_path: Path, mode: str, best: tuple[int, float]) -> None:
    records = [step(1), evaluation(1, perplexed=0.25), evaluation(2, perplexed=0.75)]
    config = f"save_best:\n  metric: perplexed\n  mode: {mode}\n"
    head = page_values.head(LiveRun(run_folder(tmp_path / "run", records, config=config)))
    assert head["save_best"] == "eval/perplexed" and head["best"]["eval/perplexed"] == best


def test_the_last_sign_of_life_of_a_run_whose_launcher_was_killed(tmp_path: Path) -> None:
    def lost(name: str, *events: Line) -> list[float]:
        found = page_values.about(LiveRun(run_folder(tmp_path / name, events=events)))["events"]
        return [event["time"] for event in found if event["event"] == "lost"]

    started = FINISHED[:2]
    assert lost("killed", *started) == [START + 10], "the time of the last metrics"
    assert lost("restarted", *FAILED, (START + 20, "launched", {"nodes": 1, "ranks": 2, "generation": 1})) == [
        START + 20
    ]
    for name, events in {"finished": FINISHED, "failed": FAILED, "empty": ()}.items():
        assert lost(name, *events) == []
    running = RunLock(RunFolder(tmp_path / "killed"))
    running.take()
    assert not [
        event
        for event in page_values.about(LiveRun(RunFolder(tmp_path / "killed")))["events"]
        if event["event"] == "lost"
    ]
    running.release()


def test_a_cursor_gets_what_is_new(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", [step(1), step(2)])
    run = LiveRun(folder)
    run.update()
    first = page_values.changes(run, "", "")
    assert first["fresh"] and first["curves"]["loss"] == {"x": [1, 2], "y": [2.0, 1.0]} and "recipe" in first["about"]
    again = page_values.changes(run, first["cursor"], first["about_id"])
    assert not again["fresh"] and again["curves"] == {} and "about" not in again
    with folder.metrics.open("a") as file:
        file.write(json.dumps(step(3)) + "\n" + json.dumps(evaluation(3, loss=1.5)) + "\n")
    run.update()
    later = page_values.changes(run, first["cursor"], first["about_id"])
    assert later["fresh"], "a new curve changes the order of the others"
    with folder.metrics.open("a") as file:
        file.write(json.dumps(step(4, loss=None)) + "\n")
    run.update()
    last = page_values.changes(run, later["cursor"], "")
    assert last["curves"]["loss"] == {"x": [4], "y": [None]} and "eval/loss" not in last["curves"]
    for nonsense in ("x", "1:x", "99:1,2", "1:1"):
        assert page_values.changes(run, nonsense, "")["fresh"]


def test_a_rewind_sends_everything_again(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", [step(1), step(2), step(3)])
    run = LiveRun(folder)
    run.update()
    cursor = page_values.changes(run, "", "")["cursor"]
    with folder.metrics.open("a") as file:
        file.write("".join(json.dumps(step(n)) + "\n" for n in (2, 3, 4)))
    run.update()
    found = page_values.changes(run, cursor, "")
    assert found["fresh"] and found["curves"]["loss"]["x"] == [1, 2, 3, 4]


def test_what_is_known_about_a_finished_run(tmp_path: Path) -> None:
    config = "batch: 8  # recipe.yaml:2\nmodel:\n  name: 'a # b'  # override model.name=…\n"
    events = [*FINISHED, (START + 3, "warning", {"text": "careful"})]
    folder = run_folder(tmp_path / "run", events=events, config=config)
    folder.environment.write_text(json.dumps({"torch": "2.13", "command": "paceline train"}))
    split = {"step": 10.0, "compute": 7.0, "exposed": 2.0, "idle": 1.0, "communication": 3.0}
    folder.profile_split(1).parent.mkdir()
    folder.profile_split(1).write_text(json.dumps({**split, "operations": [["aten::mm", 3.0, 2.0], ["odd"], "x"]}))
    folder.profile_split(2).write_text(json.dumps({**split, "idle": "x"}))
    folder.rank_log(0).write_text("hello\n")
    about = page_values.about(LiveRun(folder))
    assert about["recipe"] == [
        ("batch", "8", "recipe.yaml:2"), ("model.name", "a # b", "override model.name=…"),
    ]  # fmt: skip
    assert [event["text"] for event in about["events"] if event["event"] == "warning"] == ["careful"]
    assert about["environment"] == [("torch", "2.13"), ("command", "paceline train")]
    assert about["profiles"] == [{"rank": 1, **split, "operations": [("aten::mm", 3.0, 2.0)]}]
    assert about["logs"] == [0] and about["verdict"] is None and about["derived"][1] == ["batch", "8", "requested"]
    assert sum(part["seconds"] for part in about["time"]["parts"]) == pytest.approx(about["time"]["total"]) == 10.0


def test_the_verdict_of_a_failed_run(tmp_path: Path) -> None:
    about = page_values.about(LiveRun(run_folder(tmp_path / "run", events=FAILED)))
    assert about["verdict"]["reason"] == "ValueError on rank 1" and about["verdict"]["step"] == 4
    assert about["verdict"]["lines"][1:] == [
        "rank 1 raised ValueError in step 5",
        "Traceback:",
        "  boom",
        "fix: lower it",
    ]
    assert about["verdict"]["place"] == "train.py:17, in main: look()"
    assert about["hangs"] == [{"kind": "missing", "ranks": [1], "seconds": 40.0}]


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("replicate=2 shard=4", [("replicate", 2), ("shard", 4)]),
        ("one rank", []),
        ("replicate=3", []),  # does not fit the number of ranks
        (17, []),
        ("x=99999999999999999999", []),
    ],
)
def test_the_layout(tmp_path: Path, text: object, axes: list[tuple[str, int]]) -> None:
    events = [(START, "launched", {"nodes": 2, "ranks": 8, "generation": 0})]
    folder = run_folder(tmp_path / "run", events=events)
    folder.derived.write_text(json.dumps({"layout": {"value": text}, "strategy": {"value": "hsdp"}}))
    layout = page_values.about(LiveRun(folder))["layout"]
    assert layout == {"axes": axes, "strategy": "hsdp", "ranks": 8, "nodes": 2}


def test_ranks_and_step_times(tmp_path: Path) -> None:
    run = LiveRun(make_run(tmp_path / "run", steps=500, ranks=8))
    found = page_values.ranks(run)
    assert found["ranks"] == list(range(8)) and {"relative", "memory", "gpu", "collectives"} <= found["rows"].keys()
    assert sum(found["step_times"]["counts"]) == 50 and 0.15 < found["step_times"]["p50"] < 0.35
    assert page_values.ranks(run, found["version"]) == {"version": found["version"]}


def test_values_are_plain_whatever_a_folder_contains(tmp_path: Path) -> None:
    records = [step(1, **{HOSTILE: 1.0}), evaluation(1, **{HOSTILE: 2.0}), {"step": 2, "loss": "NaN"}]
    config = json.dumps({HOSTILE: {HOSTILE: HOSTILE}})
    events = [*FAILED, (START + 9, "warning", {"text": HOSTILE, "step": [1], "rank": float("1e999")})]
    folder = run_folder(tmp_path / "run", records, events, config)
    for path in (folder.environment, folder.derived, folder.profile_split(0)):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({HOSTILE: HOSTILE, "x": {"value": HOSTILE, "reason": HOSTILE}, "layout": []}))
    folder.failure(1).write_text(json.dumps({"rank": 1, "time": 1.0, "exit_code": 1, "text": HOSTILE}))
    run = LiveRun(folder)
    values = {**page_values.changes(run, "", ""), **page_values.ranks(run)}
    text = json.dumps(values, allow_nan=False, ensure_ascii=False)
    assert not [each for each in text if each in "\x1b\x9b\x07\u202e\r\x00"]
    assert "<script>" in text, "markup is text like any other"


def test_times_have_all_their_digits(tmp_path: Path) -> None:
    records = [step(n, time=START + 0.25 * n) for n in range(1, 4001)]
    run = LiveRun(run_folder(tmp_path / "run", records))
    times = page_values.curves(run)["time"]
    assert times["y"][0] == START + 0.25 and times["y"][-1] == START + 1000
    assert len(set(times["y"])) == len(times["y"]) > 1000


def test_numbers_that_no_run_writes(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", events=[*FAILED, (START + 9, "saved", {"step": 10**400, "seconds": 1.0})])
    folder.derived.write_text(json.dumps({"batch": {"value": 10**400}, "horizon": {"value": 10**30}}))
    folder.lock.write_text("[" * 4000)
    run = LiveRun(folder)
    values = [page_values.changes(run, "", ""), page_values.ranks(run)]
    assert json.dumps(values, allow_nan=False) and values[0]["head"]["batch"] is values[0]["head"]["total"] is None


def test_on_a_gpu_own_time_does_not_tell_the_time_in_collectives(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=100, ranks=2)
    assert "collectives" in page_values.ranks(LiveRun(folder))["rows"]
    folder.environment.write_text(json.dumps({"GPU of rank 0": "NVIDIA H200"}))
    assert "collectives" not in page_values.ranks(LiveRun(folder))["rows"]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    lines = [f"line {n}" for n in range(1, 1001)]
    folder.rank_log(3).write_text("\n".join([*lines, "    x \x1b[31mERROR\x1b[0m  y", "10%\r50%\r100%"]) + "\n")
    return folder


def test_the_last_lines(folder: RunFolder) -> None:
    found = log_lines(folder, 3, most=3)
    assert found["lines"] == [(1000, "line 1000"), (1001, "    x ERROR  y"), (1002, "100%")]
    assert found["found"] == 1002 and found["skipped"] == 0 and found["problem"] is None


def test_lines_that_contain_a_text(folder: RunFolder) -> None:
    assert log_lines(folder, 3, "error")["lines"] == [(1001, "    x ERROR  y")]
    found = log_lines(folder, 3, "line 99", most=2)
    assert found["lines"] == [(998, "line 998"), (999, "line 999")] and found["found"] == 11
    assert log_lines(folder, 3, "nowhere")["lines"] == []


def test_of_a_long_log_the_end_is_read(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_values, "_TAIL_BYTES", 100)
    found = log_lines(folder, 3)
    assert 0 < len(found["lines"]) < 15 and found["skipped"] > 0
    assert log_lines(folder, 3, "line 1")["lines"][0] == (1, "line 1")


def test_missing_logs_and_links(folder: RunFolder, tmp_path: Path) -> None:
    assert log_lines(folder, 0)["problem"] == "rank-0.log: No such file or directory"
    folder.rank_log(1).symlink_to("/etc/passwd")
    assert "symbolic link" in log_lines(folder, 1)["problem"] and log_lines(folder, 1)["lines"] == []
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "logs").symlink_to(folder.logs)
    assert log_lines(RunFolder(tmp_path / "other"), 3)["lines"] == []


MEDIA: list[dict[str, Any]] = [
    {"kind": "image", "name": "a/b", "step": 1, "width": 2, "height": 1, "file": "../../etc/passwd"},
    {"kind": "text", "name": "sample", "step": 2, "text": "one\n  two\x1b[31m\u202e"},
    {"kind": "histogram", "name": "w", "step": 2, "low": 0.0, "width": 1.0, "counts": [1, 2], "mean": None},
    {"kind": "text", "name": "sample", "step": 2, "text": "again"},
]


def test_media_are_the_last_ones_of_a_name_and_step(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    assert page_values.media(folder) == {"version": "0.0"}
    folder.media.write_text("".join(json.dumps(each) + "\n" for each in MEDIA) + '{"kind": "te')
    found = page_values.media(folder)
    assert [(each["kind"], each.get("text")) for each in found["entries"]] == [
        ("image", None), ("text", "again"), ("histogram", None)
    ]  # fmt: skip
    assert page_values.media(folder, found["version"]) == {"version": found["version"]}
    assert "passwd" not in str(found) and "mean" not in found["entries"][2]
    with folder.media.open("w") as file:
        json.dump(MEDIA[1], file)
        file.write("\n")
    assert page_values.media(folder, found["version"])["entries"][0]["text"] == "one\n  two"


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "script"}, {"kind": ["text"]}, {"kind": None}, {"name": 3}, {"name": "a\u202eb"}, {"name": "x" * 81},
        {"step": -1}, {"step": True}, {"step": 1.5}, {"step": 1 << 60}, {"step": None},
        {"kind": "histogram", "counts": "many"},
        {"kind": "histogram", "low": 0, "width": 1, "counts": [1, None]}, {"kind": "image", "width": "wide"},
    ],
)  # fmt: skip
def test_odd_media_are_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = run_folder(tmp_path / "run")
    folder.media.write_text(json.dumps({**MEDIA[1], **change}) + "\n" + json.dumps(MEDIA[3]) + "\n")
    assert [each["text"] for each in page_values.media(folder)["entries"]] == ["again"]


def test_a_histogram_without_its_places_is_left_out(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    folder.media.write_text(
        json.dumps({"kind": "histogram", "name": "w", "step": 2, "counts": [1], "low": None}) + "\n"
    )
    assert page_values.media(folder)["entries"] == []


PNG = b"\x89PNG\r\n\x1a\n, and so on"


def test_an_image_is_a_png_file_in_the_folder_of_images(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    path = folder.image("../a", 3)
    assert page_values.image_bytes(folder, "../a", 3) == b""
    path.parent.mkdir()
    path.write_bytes(PNG)
    assert page_values.image_bytes(folder, "../a", 3) == PNG
    path.write_text("<script>")
    assert page_values.image_bytes(folder, "../a", 3) == b""
    (tmp_path / "secret").write_bytes(PNG)
    path.unlink()
    path.symlink_to(tmp_path / "secret")
    assert page_values.image_bytes(folder, "../a", 3) == b""
    path.unlink()
    folder.images.rmdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / path.name).write_bytes(PNG)
    folder.images.symlink_to(tmp_path / "elsewhere")
    assert page_values.image_bytes(folder, "../a", 3) == b""
