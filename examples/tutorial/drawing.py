"""The pictures of the tutorial, as SVG: who holds what, who sends what, and what was measured.

python examples/tutorial/drawing.py docs/tutorial      # writes the pictures that do not depend on a measurement
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

INK, PALE, PAPER = "#24292f", "#d0d7de", "#ffffff"
WEIGHT, GRADIENT, STATE, ACTIVATION, DATA = "#4c78a8", "#f58518", "#b279a2", "#54a24b", "#9aa4ae"
FONT = "font-family='system-ui, sans-serif'"


class Canvas:
    """A picture on white, so that it can be read on a dark page as well."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.items: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str = "none", edge: str = INK) -> None:
        size = f"width='{width:.1f}' height='{height:.1f}'"
        self.items.append(f"<rect x='{x:.1f}' y='{y:.1f}' {size} fill='{fill}' stroke='{edge}'/>")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: int = 12,
        anchor: str = "middle",
        color: str = INK,
        bold: bool = False,
    ) -> None:
        weight = " font-weight='bold'" if bold else ""
        self.items.append(
            f"<text x='{x:.1f}' y='{y:.1f}' {FONT} font-size='{size}' text-anchor='{anchor}' fill='{color}'{weight}>"
            f"{escape(text)}</text>"
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, color: str = INK, both: bool = False) -> None:
        start = " marker-start='url(#head)'" if both else ""
        ends = f"x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}'"
        self.items.append(f"<line {ends} stroke='{color}' stroke-width='1.5' marker-end='url(#head)'{start}/>")

    def svg(self) -> str:
        head = (
            "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' markerHeight='7' "
            f"orient='auto-start-reverse'><path d='M0,0 L8,4 L0,8 z' fill='{INK}'/></marker></defs>"
        )
        frame = f"<rect width='{self.width}' height='{self.height}' fill='{PAPER}'/>"
        opening = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width} {self.height}' "
            f"width='{self.width}' height='{self.height}' role='img'>"
        )
        return "\n".join([opening, f"<title>{escape(self.title)}</title>", head, frame, *self.items, "</svg>"]) + "\n"


COLUMN, GAP, LEFT, TOP, ROW = 150, 90, 20, 50, 30
Layer = tuple[str, float, float]  # label, and the part of its width that is held: from 0.0 to 1.0


def ranks(
    title: str,
    columns: Sequence[tuple[str, str, Sequence[Layer]]],
    messages: Sequence[tuple[int, str, str]],
    note: str,
    pairs: Sequence[tuple[int, int]] = ((0, 1),),
) -> str:
    """Columns of (name, what it reads, layers), and messages of (row, label, → or ← or ↔) between pairs of columns."""
    rows = max(len(layers) for *_, layers in columns)
    width = 2 * LEFT + len(columns) * COLUMN + (len(columns) - 1) * GAP
    height = TOP + 46 + rows * (ROW + 8) + 62
    canvas = Canvas(max(width, 680), height, title)
    shift = (canvas.width - width) / 2
    canvas.text(canvas.width / 2, 22, title, 15, bold=True)
    lefts = [shift + LEFT + number * (COLUMN + GAP) for number in range(len(columns))]
    top = TOP + 46
    for left, (name, reads, layers) in zip(lefts, columns, strict=True):
        canvas.box(left - 8, TOP - 10, COLUMN + 16, height - TOP - 32, edge=PALE)
        canvas.text(left + COLUMN / 2, TOP + 8, name, bold=True)
        if reads:
            canvas.box(left, TOP + 16, COLUMN, 20, "#eef1f4", DATA)
            canvas.text(left + COLUMN / 2, TOP + 30, reads, 11)
        for number, (label, start, end) in enumerate(layers):
            y = top + number * (ROW + 8)
            canvas.box(left, y, COLUMN, ROW, edge=PALE)
            if end > start:
                canvas.box(left + start * COLUMN, y, (end - start) * COLUMN, ROW, WEIGHT, WEIGHT)
            inside = PAPER if end - start > 0.9 else INK
            at = (start + end) / 2 if end > start else 0.5
            small = 0 < end - start < 0.9
            canvas.text(left + at * COLUMN, y + 19, label, 10 if small else 11, color=PAPER if small else inside)
    for row, label, direction in messages:
        y = top + row * (ROW + 8) + ROW / 2
        for one, two in pairs:
            ends = (lefts[one] + COLUMN + 2, y, lefts[two] - 2, y)
            canvas.arrow(*(ends if direction != "←" else (*ends[2:], *ends[:2])), both=direction == "↔")
            for line, part in enumerate(reversed(label.split("\n"))):
                canvas.text((ends[0] + ends[2]) / 2, y - 6 - 11 * line, part, 10)
    canvas.text(canvas.width / 2, height - 10, note, 11)
    return canvas.svg()


def collectives() -> str:
    """Before and after, on three ranks."""
    kinds = {
        "broadcast": ([["a"], [""], [""]], [["a"], ["a"], ["a"]], "rank 0 sends to all"),
        "all-reduce": ([["a"], ["b"], ["c"]], [["a+b+c"]] * 3, "all add up"),
        "all-gather": ([["a", "", ""], ["", "b", ""], ["", "", "c"]], [["a", "b", "c"]] * 3, "all collect the parts"),
        "reduce-scatter": (
            [[f"{name}{part}" for part in "₁₂₃"] for name in "abc"],
            [["Σ₁", "", ""], ["", "Σ₂", ""], ["", "", "Σ₃"]],
            "all add up, each keeps a part",
        ),
    }
    canvas = Canvas(640, 345, "Four collectives on three ranks")
    canvas.text(320, 22, "Four collectives on three ranks", 15, bold=True)
    for number, (name, (before, after, what)) in enumerate(kinds.items()):
        left, top = 20 + 320 * (number % 2), 50 + 150 * (number // 2)
        canvas.text(left + 140, top, f"{name}: {what}", 12, bold=True)
        for rank in range(3):
            y = top + 12 + rank * 34
            canvas.text(left + 18, y + 19, f"rank {rank}", 10)
            for x, parts in ((left + 44, before[rank]), (left + 180, after[rank])):
                part_width = 90 / len(parts)
                for place, part in enumerate(parts):
                    fill = "none" if not part else ACTIVATION if x > left + 100 else DATA
                    canvas.box(x + place * part_width, y, part_width, 26, fill, PALE)
                    canvas.text(x + (place + 0.5) * part_width, y + 18, part, 11, color=PAPER if part else INK)
            canvas.arrow(left + 142, y + 13, left + 174, y + 13)
    return canvas.svg()


def timeline(title: str, schedules: dict[str, list[list[tuple[str, int, float, float]]]]) -> str:
    """For each schedule, the (kind, micro-batch, start, end) of what each rank did, in seconds. White is idle."""
    end = max(event[3] for found in schedules.values() for rank in found for event in rank)
    rows = sum(len(found) for found in schedules.values())
    canvas = Canvas(760, 60 + 26 * rows + 44 * len(schedules), title)
    canvas.text(380, 22, title, 15, bold=True)
    scale, y = 660 / end, 44
    for name, found in schedules.items():
        busy = sum(event[3] - event[2] for rank in found for event in rank)
        last = max(event[3] for rank in found for event in rank)
        idle = 1 - busy / (last * len(found))
        canvas.text(80, y + 8, f"{name}: {1000 * last:.0f} ms, {100 * idle:.0f} % idle", 12, "start", bold=True)
        y += 18
        for number, rank in enumerate(found):
            canvas.text(70, y + 15, f"rank {number}", 11, "end")
            canvas.box(80, y, last * scale, 22, edge=PALE)
            for kind, micro, start, stop in rank:
                canvas.box(80 + start * scale, y, (stop - start) * scale, 22, ACTIVATION if kind == "F" else GRADIENT)
                canvas.text(80 + (start + stop) / 2 * scale, y + 15, f"{kind}{micro}", 9, color=PAPER)
            y += 26
        y += 26
    canvas.text(380, canvas.height - 10, "F: forward of a micro-batch, B: its backward", 11)
    return canvas.svg()


def memory(title: str, layouts: dict[str, list[dict[str, int]]]) -> str:
    """For each layout and rank, the bytes of each kind."""
    colors = {"parameters": WEIGHT, "gradients": GRADIENT, "optimizer": STATE}
    highest = max(sum(held.values()) for found in layouts.values() for held in found)
    bars = sum(len(found) for found in layouts.values())
    canvas = Canvas(max(80 + 52 * bars + 40 * len(layouts), 480), 270, title)
    canvas.text(canvas.width / 2, 22, title, 15, bold=True)
    x = 50
    for name, found in layouts.items():
        for number, held in enumerate(found):
            y = 210.0
            for kind, size in held.items():
                part = 150 * size / highest
                y -= part
                canvas.box(x, y, 40, part, colors[kind], PAPER)
            canvas.text(x + 20, y - 5, f"{sum(held.values()) / 1000:.0f} kB", 10)
            canvas.text(x + 20, 224, f"rank {number}", 10)
            x += 52
        canvas.text(x - 26 * len(found) - 6, 240, name, 12, bold=True)
        x += 40
    for number, (kind, color) in enumerate(colors.items()):
        canvas.box(50 + 120 * number, 252, 10, 10, color, color)
        canvas.text(66 + 120 * number, 261, kind, 11, "start")
    return canvas.svg()


def diagrams() -> dict[str, str]:
    """The pictures that do not depend on a measurement, by name."""
    whole: list[Layer] = [(f"layer {number}", 0, 1) for number in range(1, 5)]
    low: list[Layer] = [*whole[:2], ("", 0, 0), ("", 0, 0)]
    high: list[Layer] = [("", 0, 0), ("", 0, 0), *whole[2:]]
    half = [[(f"{number}, half", side / 2, (side + 1) / 2) for number in range(1, 5)] for side in range(2)]
    # Tensor halves first, then the shards of each half.
    quarters = [[(f"{number}, ¼", at / 4, (at + 1) / 4) for number in range(1, 5)] for at in (0, 2, 1, 3)]
    return {
        "collectives": collectives(),
        "dp": ranks(
            "DataParallel: one process, a copy of the model on each GPU",
            [("GPU 0", "samples 0–7", whole), ("GPU 1", "", whole)],
            [(0, "weights,\nsamples 4–7", "→"), (2, "outputs,\ngradients", "←")],
            "GPU 0 sends weights and collects outputs and gradients in every step; one interpreter drives both.",
        ),
        "ddp": ranks(
            "DistributedDataParallel: a process per GPU, the whole model on each",
            [("rank 0", "samples 0–3", whole), ("rank 1", "samples 4–7", whole)],
            [(number, "gradients", "↔") for number in (0, 3)],
            "Backward runs from layer 4 to layer 1; gradients of finished layers are all-reduced meanwhile.",
        ),
        "split": ranks(
            "Split: one process, the layers on different devices",
            [("GPU 0", "samples 0–7", low), ("GPU 1", "", high)],
            [(1, "activations", "→"), (2, "gradients of\nactivations", "←")],
            "While one device computes, the other waits.",
        ),
        "pipeline": ranks(
            "Pipeline: a process per stage, and micro-batches that follow each other",
            [("rank 0: stage 0", "samples 0–7, in 4 parts", low), ("rank 1: stage 1", "targets 0–7", high)],
            [(1, "activations of\na micro-batch", "→"), (2, "their\ngradients", "←")],
            "While stage 1 works on micro-batch 1, stage 0 works on micro-batch 2.",
        ),
        "fsdp": ranks(
            "Fully sharded: a part of every layer on each rank, and data of its own",
            [("rank 0", "samples 0–3", half[0]), ("rank 1", "samples 4–7", half[1])],
            [(0, "weights of\na layer", "↔"), (2, "its gradients", "↔")],
            "A layer is gathered before it runs and freed after it; its gradients are reduce-scattered.",
        ),
        "tensor": ranks(
            "Tensor parallel: a part of every matrix on each rank, and the same data",
            [("rank 0", "samples 0–7", half[0]), ("rank 1", "samples 0–7", half[1])],
            [(1, "partial sums", "↔"), (3, "partial sums", "↔")],
            "Columns of layers 1 and 3 and rows of layers 2 and 4: one all-reduce of activations for each pair.",
        ),
        "combined": ranks(
            "Combined: shard 2 × tensor 2",
            [
                ("rank 0", "samples 0–3", quarters[0]),
                ("rank 1", "samples 0–3", quarters[1]),
                ("rank 2", "samples 4–7", quarters[2]),
                ("rank 3", "samples 4–7", quarters[3]),
            ],
            [(1, "partial sums", "↔")],
            "0 and 1 (and 2 and 3) exchange partial sums of activations; 0 and 2 (and 1 and 3) gather weights.",
            ((0, 1), (2, 3)),
        ),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name, picture in diagrams().items():
        (folder / f"{name}.svg").write_text(picture)
