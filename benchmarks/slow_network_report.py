"""Tables, verdicts and the chart of slow_network.py, from its results."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

RATES = (1000, 200)  # Mb/s
GUIDE = Path(__file__).parents[1] / "docs" / "slow-networks.md"
CHART = GUIDE.with_suffix(".svg")
BY_HAND = "torch "
Kept = dict[str, dict[str, Any]]
LINKS = {1000: "1 Gb/s", 200: "200 Mb/s"}


class Figures:
    """What follows from the rows of a model."""

    def __init__(self, kept: Kept, model: str) -> None:
        self._kept, self.model = kept, model
        self.rows = {key: row for key, row in kept.get("throughput", {}).items() if row["model"] == model}
        self.losses = {row["method"]: row for row in kept.get("loss", {}).values() if row["model"] == model}
        self.compute = kept.get("compute", {}).get(model, {}).get("seconds")

    @property
    def methods(self) -> list[str]:
        """In the order in which they were measured."""
        return list(dict.fromkeys([row["method"] for row in self.rows.values()] + list(self.losses)))

    def row(self, method: str, rate: int | None) -> dict[str, Any] | None:
        return self.rows.get(f"{self.model}/{method}/{rate}")

    def speed(self, method: str, rate: int) -> float | None:
        """Steps per second, in those of DDP."""
        own, ddp = self.row(method, rate), self.row("DDP", rate)
        return ddp["seconds"] / own["seconds"] if own and ddp else None

    def ideal(self, method: str, rate: int) -> float | None:
        own, ddp = self.row(method, rate), self.row("DDP", rate)
        if not (own and ddp and self.compute):
            return None
        link = self._kept["link"][str(rate)]["rate"]
        return (self.compute + ddp["bytes"] / link) / (self.compute + own["bytes"] / link)

    def of_ideal(self, method: str, rate: int) -> float | None:
        speed, ideal = self.speed(method, rate), self.ideal(method, rate)
        return speed / ideal if speed and ideal else None

    def fewer_bytes(self, method: str) -> float | None:
        own, ddp = self.row(method, RATES[-1]), self.row("DDP", RATES[-1])
        return ddp["bytes"] / own["bytes"] if own and ddp else None

    def more_loss(self, method: str) -> float | None:
        """Relative to DDP's."""
        own, ddp = self.losses.get(method), self.losses.get("DDP")
        return own["loss"] / ddp["loss"] - 1 if own and ddp else None


def model_table(kept: Kept, model: str) -> str:
    found = Figures(kept, model)
    heads = ["method"]
    for rate in RATES:
        heads += [f"steps/s at {LINKS[rate]}", "× DDP", "of the ideal"]
    heads += ["KB per step", "fewer bytes", "loss", "than DDP"]
    lines = [_line(heads), "|---" * len(heads) + "|"]
    for method in found.methods:
        cells = [f"`{method}`" if not method.startswith(BY_HAND) else method]
        for rate in RATES:
            row = found.row(method, rate)
            cells += [_number(1 / row["seconds"]) if row else "", _times(found.speed(method, rate))]
            cells.append(_times(found.of_ideal(method, rate), unit=""))
        row, loss = found.row(method, RATES[-1]), found.losses.get(method)
        cells += [_number(row["bytes"] / 1e3) if row else "", _times(found.fewer_bytes(method))]
        cells += [f"{loss['loss']:.4f}" if loss else "", _percent(found.more_loss(method))]
        lines.append(_line(cells))
    return "\n".join(lines)


def verdicts(kept: Kept) -> Iterator[tuple[str, str, str, bool]]:
    """What is wanted, the bound, what was measured, and whether it is met."""
    for model in ("gpt", "resnet"):
        found = Figures(kept, model)
        for rate in RATES:
            shares = {m: found.of_ideal(m, rate) for m in found.methods if not m.startswith(BY_HAND) and m != "DDP"}
            known = {method: share for method, share in shares.items() if share is not None}
            if known:
                worst = min(known, key=known.__getitem__)
                told = f"{known[worst]:.2f} ({worst})"
                yield f"{model}, {LINKS[rate]}: share of the ideal ratio", "≥ 0.85", told, known[worst] >= 0.85
    found = Figures(kept, "mlp")
    for prefix, bound in (("powersgd", 5.0), ("int8", 2.5), ("DiLoCo", 20.0)):
        for method in [method for method in found.methods if method.startswith(prefix)]:
            speed = found.speed(method, 200)
            if speed is not None:
                yield f"mlp, 200 Mb/s: {method}", f"≥ {bound:g} × DDP", f"{speed:.1f} ×", speed >= bound
    found = Figures(kept, "gpt")
    for method, fewer in (("powersgd, rank 1", 50), ("DiLoCo, int8", 150)):
        times = found.fewer_bytes(method)
        if times is not None:
            yield f"gpt: bytes of {method}", f"≤ 1/{fewer} of DDP", f"1/{times:.0f}", times >= fewer
    for model in ("gpt", "mlp"):  # the Trainer also synchronizes the batch norms of the resnet
        yield from _compression_times(Figures(kept, model))
    for model in ("gpt", "mlp"):
        found = Figures(kept, model)
        for method in [method for method in found.methods if method.startswith(("powersgd", "int8", "DiLoCo"))]:
            bound, more = 0.03 if method.startswith("DiLoCo") else 0.01, found.more_loss(method)
            if more is not None:
                yield f"{model}: loss of {method}", f"within {bound:.0%} of DDP", f"{more:+.2%}", more <= bound


def _compression_times(found: Figures) -> Iterator[tuple[str, str, str, bool]]:
    """A step without a limit of the link, which leaves computation, next to torch's hook."""
    for method in [method for method in found.methods if method.startswith("powersgd")]:
        own, theirs = found.row(method, None), found.row(BY_HAND + method, None)
        if own and theirs:
            told = f"{own['seconds'] * 1e3:.1f} and {theirs['seconds'] * 1e3:.1f} ms"
            claim = f"{found.model}: step of {method}, and with torch's hook, unlimited link"
            yield claim, "no longer", told, own["seconds"] <= theirs["seconds"] * 1.02


def verdict_table(kept: Kept) -> str:
    lines = ["| | wanted | measured | |", "|---|---|---|---|"]
    lines += [
        _line([what, wanted, measured, "met" if met else "**missed**"])
        for what, wanted, measured, met in verdicts(kept)
    ]
    return "\n".join(lines)


def link_lines(kept: Kept) -> str:
    """The measured link and machine, in a sentence each."""
    links = ", ".join(
        f"{kept['link'][str(rate)]['goodput'] * 8e-6:.0f} Mb/s and {kept['link'][str(rate)]['latency'] * 1e6:.0f} µs"
        for rate in RATES
        if str(rate) in kept.get("link", {})
    )
    computes = ", ".join(f"{row['model']} {row['seconds'] * 1e3:.1f} ms" for row in kept.get("compute", {}).values())
    machines = "; ".join(f"{kind}: {each['machine']}" for kind, each in kept.get("machine", {}).items())
    return f"Measured links: {links}. Compute per step: {computes}. {machines}."


def render(kept: Kept) -> str:
    parts = [link_lines(kept)]
    for model in kept.get("compute", {}):
        parts.append(f"{model}:\n\n{model_table(kept, model)}")
    return "\n\n".join([*parts, verdict_table(kept)])


def write_docs(kept: Kept) -> None:
    """Replace what is between the markers of the guide, and its chart."""
    text = GUIDE.read_text()
    tables = {model: model_table(kept, model) for model in kept["compute"]}
    picture = f"![Speed of each method at 200 Mb/s]({CHART.name})"
    tables |= {"verdicts": verdict_table(kept), "link": f"{link_lines(kept)}\n\n{picture}"}
    for name, table in tables.items():
        begin, end = f"<!-- slow_network.py: {name} -->\n", "<!-- end -->"
        before, found, after = text.partition(begin)
        assert found, f"{GUIDE} has no {begin}"
        text = before + begin + table + "\n" + end + after.partition(end)[2]
    GUIDE.write_text(text)
    CHART.write_text(chart(kept))


def chart(kept: Kept) -> str:
    """Speed at 200 Mb/s as bars, those of each model below each other; the tick is the ideal."""
    bars, y = [], 0
    for model in kept["compute"]:
        found = Figures(kept, model)
        speeds = {method: found.speed(method, 200) for method in found.methods if not method.startswith(BY_HAND)}
        known = {method: speed for method, speed in speeds.items() if speed}
        if not known:  # DDP was not measured
            continue
        longest = max([found.ideal(method, 200) or 1.0 for method in known] + list(known.values()))
        y += 34
        bars.append(f'<text x="8" y="{y}" font-weight="bold">{model}, 200 Mb/s: speed relative to DDP</text>')
        for method, speed in known.items():
            y += 20
            width, ideal = 420 * speed / longest, 160 + 420 * (found.ideal(method, 200) or 1.0) / longest
            bars.append(f'<text x="152" y="{y}" text-anchor="end">{escape(method)}</text>')
            bars.append(f'<rect x="160" y="{y - 12}" width="{width:.1f}" height="14" fill="#3b7dd8"/>')
            bars.append(f'<path d="M{ideal:.1f} {y - 14}v18" stroke="#888" stroke-width="2"/>')
            bars.append(f'<text x="{max(160 + width, ideal) + 6:.1f}" y="{y}">{speed:.1f}</text>')
    style = 'font-family="sans-serif" font-size="12" fill="#555"'
    inner = "\n".join(bars)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {y + 16}" {style}>\n{inner}\n</svg>\n'


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _times(value: float | None, unit: str = " ×") -> str:
    return "" if value is None else f"{_number(value) if value >= 100 else format(value, '.2f')}{unit}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"
