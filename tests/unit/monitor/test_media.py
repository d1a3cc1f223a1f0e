"""What is logged besides numbers: the record of each, and the pixels of its PNG file."""

from __future__ import annotations

import json
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline
import tiny
from paceline import dist
from paceline.errors import TrainError
from paceline.monitor.media import record
from paceline.run import jsonl
from paceline.run.folder import RunFolder
from worlds import ranks

CHANNELS = {0: 1, 2: 3, 6: 4}
RGB = np.arange(2 * 5 * 3, dtype=np.uint8).reshape(2, 5, 3) * 8


def read_png(path: Path) -> np.ndarray:
    """Of an image without filters, as ours are. Checks every sum."""
    data, at, parts = path.read_bytes(), 8, dict[bytes, bytes]()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", data, at + 8 + length)[0] == zlib.crc32(kind + content)
        parts[kind] = content
        at += 12 + length
    width, height, depth, color = struct.unpack_from(">IIBB", parts[b"IHDR"])
    lines = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, -1)
    assert depth == 8 and not lines[:, 0].any() and list(parts) == [b"IHDR", b"IDAT", b"IEND"]
    return lines[:, 1:].reshape(height, width, CHANNELS[color])


def logged(folder: Path, image: Any, name: str = "x", step: int = 3) -> tuple[np.ndarray, dict[str, Any]]:
    made = record(RunFolder(folder), "image", name, image, step)
    return read_png(folder / made["file"]), made


@pytest.mark.parametrize(
    "image",
    [
        RGB, torch.from_numpy(RGB), torch.from_numpy(RGB).permute(2, 0, 1), RGB.transpose(2, 0, 1),
        torch.from_numpy(RGB) / 255, RGB.astype(np.float64) / 255, RGB.astype(np.int64),
        torch.nn.Parameter((torch.from_numpy(RGB) / 255).permute(2, 0, 1)), RGB[None],
    ],
)  # fmt: skip
def test_an_image_keeps_its_pixels_in_any_order_of_dimensions_and_type(image: Any, tmp_path: Path) -> None:
    pixels, made = logged(tmp_path, image)
    assert np.array_equal(pixels, RGB) and (made["height"], made["width"], made["step"]) == (2, 5, 3)
    assert "clipped" not in made


def test_grayscale_and_masks(tmp_path: Path) -> None:
    assert logged(tmp_path, RGB[:, :, 0])[0].shape == (2, 5, 1)
    assert logged(tmp_path, torch.rand(1, 4, 7))[0].shape == (4, 7, 1)
    assert (
        logged(tmp_path, torch.rand(3, 4) > 2)[0].max() == 0 and logged(tmp_path, torch.ones(3, 4) > 0)[0].min() == 255
    )
    assert logged(tmp_path, torch.rand(4, 9, 9))[0].shape == (9, 9, 4)  # with transparency


def test_an_image_of_pillow(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    pixels, _ = logged(tmp_path, pillow.fromarray(RGB).convert("P", palette=1))
    assert pixels.shape == (2, 5, 4) and abs(pixels[..., :3].astype(int) - RGB).max() < 40


def test_a_batch_is_a_grid_of_at_most_64_images(tmp_path: Path) -> None:
    pixels, _ = logged(tmp_path, torch.stack([torch.full((1, 3, 3), value / 10) for value in range(5)]))
    assert pixels.shape == (8, 13, 1)  # 3 × 2 images, with a line of 2 pixels between them
    assert [pixels[0, 0, 0], pixels[0, 5, 0], pixels[7, 7, 0], pixels[7, 12, 0]] == [0, 26, 102, 0]
    assert logged(tmp_path, torch.rand(200, 3, 8, 8))[0].shape == (78, 78, 3)


def test_a_large_image_is_made_smaller(tmp_path: Path) -> None:
    pixels, _ = logged(tmp_path, np.zeros((3000, 5000, 3), np.uint8))
    assert pixels.shape == (1000, 1667, 3)
    assert logged(tmp_path, torch.zeros(9, 1, 1500, 10))[0].shape[0] <= 2052


def test_values_that_are_clipped_are_said_to_be(tmp_path: Path) -> None:
    pixels, made = logged(tmp_path, torch.tensor([[-1.0, 0.5], [math.nan, math.inf]]))
    assert made["clipped"] is True and pixels[..., 0].tolist() == [[0, 128], [0, 255]]
    assert "clipped" not in logged(tmp_path, torch.tensor([[-0.001, 1.001]]))[1]


@pytest.mark.parametrize(
    ("kind", "value", "seen"),
    [
        ("image", torch.rand(8, 28, 28), r"\(8, 28, 28\)"), ("image", torch.rand(2, 5, 9, 9), r"\(2, 5, 9, 9\)"),
        ("image", torch.rand(0, 3, 4, 4), r"\(0, 3, 4, 4\)"), ("image", torch.rand(7), r"\(7,\)"),
        ("image", "cat.png", "array of shape"), ("image", np.zeros((2, 2), complex), "complex"),
        ("text", 3, "of type int"), ("histogram", "abc", "trainer.log_histogram"),
        ("histogram", torch.zeros(2, dtype=torch.complex64), "complex"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_was_seen(tmp_path: Path, kind: str, value: Any, seen: str) -> None:
    with pytest.raises(TrainError, match=seen) as caught:
        record(RunFolder(tmp_path), kind, "x", value, 1)
    assert caught.value.code == "train.not-loggable" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "x" * 81, None, "\x1b[31m", "a\u202eb"])
def test_a_name_is_one_printable_line(tmp_path: Path, name: Any) -> None:
    with pytest.raises(TrainError, match=r"trainer\.log_text: the name"):
        record(RunFolder(tmp_path), "text", name, "x", 1)


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "..", "/tmp/x", "naïve ☃ name", "a\\b", "-rf", "con.png"])
def test_a_file_of_an_image_is_in_its_folder_whatever_its_name_is(tmp_path: Path, name: str) -> None:
    folder = RunFolder(tmp_path / "run")
    path = tmp_path / "run" / record(folder, "image", name, RGB, 7)["file"]
    assert path.is_file() and path.parent == folder.images and path.name.startswith("00000007-") and path.name.isascii()


def test_names_that_look_alike_have_files_of_their_own(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert len({folder.image(name, 1) for name in ("a/b", "a-b", "a b", "é", "è", "x" * 80, "x" * 79)}) == 7


def test_the_same_name_and_step_replace_an_image(tmp_path: Path) -> None:
    logged(tmp_path, RGB)
    pixels, _ = logged(tmp_path, RGB[::-1])
    assert np.array_equal(pixels, RGB[::-1]) and len(list(RunFolder(tmp_path).images.iterdir())) == 1


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    text = record(RunFolder(tmp_path), "text", "x", "\U0001f600" * 30_000, 1)["text"]
    assert len(text) == 20_000 and text.endswith("…")
    assert len(json.dumps({"text": text})) < jsonl._MAX_LINE


def test_a_histogram_counts_all_finite_values(tmp_path: Path) -> None:
    values = torch.cat([torch.arange(640.0), torch.tensor([math.nan, math.inf])]).to(torch.bfloat16)
    made = record(RunFolder(tmp_path), "histogram", "x", values.requires_grad_(), 1)
    assert sum(made["counts"]) == 640 and made["nonfinite"] == 2 and made["low"] == 0 and made["width"] == 10
    assert made["mean"] == pytest.approx(319.5, rel=0.01) and made["std"] == pytest.approx(184.7, rel=0.01)
    assert record(RunFolder(tmp_path), "histogram", "x", [2, 2, 2], 1)["mean"] == 2
    assert sum(record(RunFolder(tmp_path), "histogram", "x", np.zeros(3_000_000), 1)["counts"]) == 750_000
    empty = record(RunFolder(tmp_path), "histogram", "x", [math.nan], 1)
    assert sum(empty["counts"]) == 0 and empty["nonfinite"] == 1


class Samples:
    """A callback as in the guide. `on_end`: what is not trained any more is still written."""

    trainer: paceline.Trainer

    def on_evaluate(self, values: dict[str, Any]) -> None:
        self.trainer.log_image("inputs", torch.rand(4, 1, 8, 8))
        self.trainer.log_text("sample", f"step {values['step']}")
        for name, parameter in self.trainer.model.named_parameters():
            self.trainer.log_histogram(f"weights/{name}", parameter)

    def on_end(self, end: Any) -> None:
        self.trainer.log_text("last", end.reason)


def train(max_steps: int, **settings: Any) -> str | None:
    samples = Samples()
    samples.trainer = tiny.classifier_trainer(callbacks=[samples], eval_every=2, save_every=2, **settings)
    return samples.trainer.train(tiny.blobs(48), tiny.blobs(8), max_steps=max_steps).run


def entries(run: str | None) -> list[tuple[str, str, int]]:
    assert run is not None
    return [(each["kind"], each["name"], each["step"]) for each in jsonl.read(RunFolder(Path(run)).media)]


@ranks(2)
def test_all_ranks_call_it_and_one_writes(in_folder: Path) -> None:
    run = train(4, run="both", strategy="fsdp")
    dist.barrier()
    found = entries(run)
    assert [step for kind, _, step in found if kind == "image"] == [2, 4] and found[-1] == ("text", "last", 4)
    assert run is not None and len(list(RunFolder(Path(run)).images.iterdir())) == 2
    histogram = next(each for each in jsonl.read(RunFolder(Path(run)).media) if each["kind"] == "histogram")
    assert (
        sum(histogram["counts"])
        == tiny.classifier_trainer(run=False).model.state_dict()[histogram["name"].removeprefix("weights/")].numel()
    )


def test_a_resumed_run_writes_the_later_steps_again(in_folder: Path) -> None:
    run = train(6, run="again")
    before = entries(run)
    for checkpoint in ("step-000006", "step-000004"):  # as after a crash at step 3
        (RunFolder(Path(str(run))).checkpoints / checkpoint / "manifest.json").unlink()
    train(2, run="again", resume="auto")
    assert entries(run) == [each for each in before if each[2] <= 2] + [("text", "last", 2)]
    train(6, run="again", resume="auto")
    assert [each for each in entries(run) if each[1] != "last"] == [each for each in before if each[1] != "last"]


def test_without_a_run_folder_nothing_is_written(in_folder: Path) -> None:
    train(2, run=False)
    assert list(in_folder.iterdir()) == []


def test_a_loop_of_ones_own_logs_too(in_folder: Path) -> None:
    trainer = tiny.classifier_trainer(run="own")
    for batch in trainer.loader(tiny.blobs(48)):
        trainer.training_step(batch)
        if trainer.step_count == 3:
            trainer.log_text("sample", "three")
    assert entries("runs/own") == [("text", "sample", 3)]


def test_where_it_has_no_effect_it_says_so_once(in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = tiny.classifier_trainer(run="early", quiet=False)
    for _ in range(3):
        trainer.log_text("sample", "too early")
    assert capsys.readouterr().out.count("trainer.log_text has no effect here") == 1 and list(in_folder.iterdir()) == []
