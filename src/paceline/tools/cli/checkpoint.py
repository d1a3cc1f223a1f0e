"""`paceline checkpoint`: list, inspect, verify and export checkpoints."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.errors import CheckpointError
from paceline.run.folder import BEST, ROOT, RunFolder, checkpoint_folders, existing_runs, short
from paceline.text import columns, format_age, format_bytes, plural, shorten
from paceline.tools.cli.options import Json, examples

if TYPE_CHECKING:
    from paceline.checkpoint.checkpoint_store import Address
    from paceline.checkpoint.manifest import Manifest
    from paceline.checkpoint.reader import StoredCheckpoint

app = typer.Typer(help="List, inspect, verify and export checkpoints.", no_args_is_help=True)

_COLUMNS, _GROUPS = 80, 10  # of a screen of 24 lines


def _path(given: str) -> Path:
    """A path, or one below runs/."""
    path = Path(given)
    return ROOT / path if not path.exists() and (ROOT / path).exists() else path


_WHERE = "a run, its checkpoints folder, a checkpoint, or a pointer to one"
Where = Annotated[Path, typer.Argument(metavar="PATH", help=_WHERE, parser=_path)]
Best = Annotated[bool, typer.Option("--best", help="the best checkpoint of the run (save_best), not the newest")]


@app.command("ls", epilog=examples("checkpoint ls"))
def ls(
    path: Annotated[
        Path, typer.Argument(metavar="[PATH]", help="a run, or a folder of runs; default: runs/", parser=_path)
    ] = ROOT,
    as_json: Json = False,
) -> None:
    """List checkpoints, newest first. Checks manifests and file sizes; use `verify` to check contents."""
    found = [] if path == ROOT and not path.exists() else _found(path)
    facts = [_facts(each) for each in found]
    if as_json:
        print(json.dumps(facts, indent=2))
    elif not found:
        print(f"No checkpoints found in {path}.")
    else:
        titles = ("checkpoint", "step", "size", "age", "layout", "contents", "pointers", "status")
        print(columns([titles, *(_row(each) for each in facts)]))


@app.command("inspect", epilog=examples("checkpoint inspect"))
def inspect(
    path: Where,
    best: Best = False,
    everything: Annotated[bool, typer.Option("--all", help="list every tensor, and do not shorten values")] = False,
    as_json: Json = False,
) -> None:
    """Show the contents of a checkpoint (of a run: the newest one)."""
    from paceline.checkpoint import reader

    checkpoint = reader.open_checkpoint(_chosen(path, best))
    manifest = checkpoint.manifest
    tensors = _tensors(manifest)
    if as_json:
        about = manifest.model_dump(mode="json", exclude={"tensors"})
        print(json.dumps({"path": str(checkpoint.at), **about, "tensors": tensors}, indent=2))
        return
    facts = {
        "checkpoint": short(str(checkpoint.at)),
        "step": f"{manifest.step} (epoch {manifest.epoch})",
        "created": manifest.created,
        "contents": _contents(manifest),
        "layout": _layout(manifest.layout),
        "parent": manifest.parent or "none",
        "versions": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
        "size": f"{format_bytes(_size(manifest))} in {plural(len(manifest.files), 'file')}",
        "data": json.dumps(manifest.data),
        "metadata": json.dumps(manifest.metadata),
    }
    width = max(map(len, facts))
    shown = facts if everything else {key: shorten(text, _COLUMNS - width - 2) for key, text in facts.items()}
    print(columns(list(shown.items())), end="\n\n")
    if not everything:
        print(columns([("part", "tensors", "values", "dtype", "size"), *_groups(tensors)]))
        print(f"{plural(len(tensors), 'tensor')}; list them with --all")
        return
    rows = [(name, *(str(value) for value in entry.values())) for name, entry in tensors.items()]
    print(columns([("tensor", "dtype", "shape", "chunks", "bytes"), *rows]))
    for name, target in manifest.aliases.items():
        print(f"{name} is an alias of {target}")


@app.command("verify", epilog=examples("checkpoint verify"))
def verify(path: Where, as_json: Json = False) -> None:
    """Verify the hash of every byte. Exits with status 1 if a checkpoint is corrupted."""
    from paceline.checkpoint import reader

    problems: dict[str, str | None] = {}
    for found in _found(path) or [_nothing(path)]:
        problem = None
        try:
            reader.verify(found.at)
        except CheckpointError as error:
            problem = _reason(error)
        problems[str(found.at)] = problem
        if not as_json:
            print(f"{short(str(found.at))}: {'ok' if problem is None else f'corrupted: {problem}'}", flush=True)
    if as_json:
        print(json.dumps([{"path": each, "good": not why, "problem": why} for each, why in problems.items()], indent=2))
    raise SystemExit(1 if any(problems.values()) else 0)


@app.command("export", epilog=examples("checkpoint export"))
def export(
    path: Where,
    to: Annotated[
        Literal["safetensors", "torch", "huggingface"],
        typer.Option("--to", help="one safetensors file, a torch state dict, or a Hugging Face folder"),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="output path; existing files are not overwritten")],
    ema: Annotated[bool, typer.Option("--ema", help="export the averaged (EMA) weights")] = False,
    best: Best = False,
) -> None:
    """Export the model of a checkpoint (of a run: the newest one) for other programs."""
    from paceline.checkpoint import export as exporting

    at = _chosen(path, best)
    count = exporting.export(at, to, output, ema=ema)
    print(f"{short(str(at))} -> {output}: {count:,} {'averaged ' if ema else ''}weights ({to})")


def _found(path: Path) -> list[StoredCheckpoint]:
    """The checkpoints at or below a path, newest first, unreadable ones last."""
    from paceline.checkpoint import local_store, reader

    path = local_store.follow_pointer(path)
    if not path.exists():
        fix = "pass a run, e.g. gpt or runs/gpt; paceline ls lists them"
        raise CheckpointError("missing", f"Folder {path} does not exist.", fix=fix)
    if reader.is_checkpoint(at := local_store.locate(path)):
        return [reader.describe(at)]
    stores = map(local_store.LocalStore, checkpoint_folders(path))
    found = [each for store in stores for each in reader.candidates(store)]
    return sorted(found, key=lambda each: "" if each.manifest is None else each.manifest.created, reverse=True)


def _chosen(path: Path, best: bool) -> Address:
    """The best checkpoint of a run, or the newest one with a readable manifest. Skipped ones are reported."""
    from paceline.checkpoint import local_store

    if best:
        places = [folder / BEST for folder in checkpoint_folders(path)]
        chosen = next((place for place in places if place.is_file()), places[1])
        return local_store.locate(local_store.follow_pointer(chosen))
    found = _found(path) or [_nothing(path)]
    whole = str(RunFolder(path).checkpoints)
    found = [each for each in found if each.at.store.where() == whole] or found  # not of a part
    for each in found:
        if each.problem is not None and len(found) > 1:
            print(f"{each.problem.what} Skipping it.", file=sys.stderr)
    return found[0].at


def _nothing(path: Path) -> StoredCheckpoint:
    others = existing_runs(RunFolder(path.absolute()).requested_name)
    saved = [each.short for each in others if any(each.checkpoints.glob("step-*"))]
    instead = f"{saved[0]}, which has one" if saved else "the folder of a run or a checkpoint"
    raise CheckpointError(
        "missing", f"No checkpoint found in {path}.", fix=f"pass {instead}; run paceline checkpoint ls to list them"
    )


def _facts(found: StoredCheckpoint) -> dict[str, Any]:
    from paceline.checkpoint.checkpoint_store import POINTERS

    facts: dict[str, Any] = {
        "path": str(found.at),
        "marks": [each for each in POINTERS if found.at.name in found.at.store.pointer(each)],
        "problem": None if found.problem is None else _reason(found.problem),
    }
    if found.manifest is not None:
        own = found.manifest
        facts |= {"step": own.step, "epoch": own.epoch, "bytes": _size(own), "created": own.created}
        facts |= {"layout": own.layout, "holds": _contents(own)}
    return facts


def _row(facts: dict[str, Any]) -> tuple[str, ...]:
    name, marks = short(facts["path"]), ", ".join(facts["marks"])
    if facts["problem"] is not None:
        return (name, "", "", "", "", "", marks, f"corrupted: {facts['problem']}")
    size, age, layout = format_bytes(facts["bytes"]), _age(facts["created"]), _layout(facts["layout"])
    return (name, str(facts["step"]), size, age, layout, facts["holds"], marks, "sizes ok")


def _size(manifest: Manifest) -> int:
    return sum(file.bytes for file in manifest.files.values())


def _contents(manifest: Manifest) -> str:
    return "full" if manifest.optimizer else "weights only"


def _layout(layout: dict[str, Any]) -> str:
    """`4 ranks, shard 2, tensor 2, bf16`: the axes that are used."""
    ranks = layout.get("ranks", 1)
    degrees = [f"{axis} {n}" for axis, n in layout.items() if axis != "ranks" and isinstance(n, int) and n > 1]
    words = [word for word in layout.values() if isinstance(word, str)]
    return ", ".join([plural(ranks, "rank"), *degrees, *words])


def _age(created: str) -> str:
    try:
        seconds = (datetime.now(UTC) - datetime.fromisoformat(created)).total_seconds()
    except (ValueError, TypeError):  # the text comes from a file
        return created
    return format_age(seconds)


def _tensors(manifest: Manifest) -> dict[str, dict[str, Any]]:
    from paceline.checkpoint.manifest import chunk_bytes

    return {
        name: {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "chunks": len(entry.chunks),
            "bytes": sum(chunk_bytes(entry, chunk) for chunk in entry.chunks),
        }
        for name, entry in manifest.tensors.items()
    }


def _groups(tensors: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each part of a checkpoint and each module of the model; the smallest ones share the last row."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, entry in tensors.items():
        part, _, rest = name.partition("/")
        groups[f"model/{rest.partition('.')[0]}" if part == "model" else part].append(entry)
    by_size = sorted(groups, key=lambda name: -sum(entry["bytes"] for entry in groups[name]))
    if len(groups) > _GROUPS:
        others = by_size[_GROUPS - 1 :]
        groups[f"{len(others)} others"] = [entry for name in others for entry in groups.pop(name)]
    rows: list[tuple[str, ...]] = []
    for name, entries in sorted(groups.items(), key=lambda group: not group[0].startswith("model/")):
        values = sum(prod(entry["shape"]) for entry in entries)
        dtypes = sorted({entry["dtype"] for entry in entries})
        size = format_bytes(sum(entry["bytes"] for entry in entries))
        rows.append((shorten(name, 36), str(len(entries)), f"{values:,}", shorten(", ".join(dtypes), 12), size))
    return rows


def _reason(error: CheckpointError) -> str:
    return (error.what.partition(" is corrupted: ")[2] or error.what).rstrip(".")
