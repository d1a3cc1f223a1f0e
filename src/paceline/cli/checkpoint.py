"""`paceline checkpoint`: list, inspect, verify and export checkpoints."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.errors import CheckpointError
from paceline.run.folder import BEST, LATEST, ROOT, checkpoint_folders, short
from paceline.text import columns, format_age, format_bytes, plural

if TYPE_CHECKING:
    from paceline.checkpoint.directory import Found
    from paceline.checkpoint.manifest import Manifest

app = typer.Typer(help="List, inspect, verify and export checkpoints.", no_args_is_help=True)

Where = Annotated[Path, typer.Argument(metavar="PATH", help="a run folder, its checkpoints folder, or one checkpoint")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.command("ls")
def ls(
    path: Annotated[
        Path, typer.Argument(metavar="[PATH]", help="a run folder, or a folder of run folders; default: runs/")
    ] = ROOT,
    as_json: AsJson = False,
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


@app.command("inspect")
def inspect(path: Where, as_json: AsJson = False) -> None:
    """Show the contents of a checkpoint (of a run: the newest one)."""
    from paceline.checkpoint import reader

    checkpoint = reader.open_checkpoint(_newest(path))
    manifest = checkpoint.manifest
    tensors = _tensors(manifest)
    if as_json:
        about = manifest.model_dump(mode="json", exclude={"tensors"})
        print(json.dumps({"path": str(checkpoint.folder), **about, "tensors": tensors}, indent=2))
        return
    facts = {
        "checkpoint": short(checkpoint.folder),
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
    print(columns(list(facts.items())), end="\n\n")
    rows = [(name, *(str(value) for value in entry.values())) for name, entry in tensors.items()]
    print(columns([("tensor", "dtype", "shape", "chunks", "bytes"), *rows]))
    for name, target in manifest.aliases.items():
        print(f"{name} is an alias of {target}")


@app.command("verify")
def verify(path: Where, as_json: AsJson = False) -> None:
    """Verify the hash of every byte. Exits with status 1 if a checkpoint is corrupted."""
    from paceline.checkpoint import reader

    problems: dict[str, str | None] = {}
    for found in _found(path) or [_nothing(path)]:
        problem = None
        try:
            reader.verify(found.folder)
        except CheckpointError as error:
            problem = _reason(error)
        problems[str(found.folder)] = problem
        if not as_json:
            print(f"{short(found.folder)}: {'ok' if problem is None else f'corrupted: {problem}'}", flush=True)
    if as_json:
        print(json.dumps([{"path": each, "good": not why, "problem": why} for each, why in problems.items()], indent=2))
    raise SystemExit(1 if any(problems.values()) else 0)


@app.command("export")
def export(
    path: Where,
    to: Annotated[
        Literal["safetensors", "torch", "huggingface"],
        typer.Option("--to", help="one safetensors file, a torch state dict, or a Hugging Face folder"),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="output path; existing files are not overwritten")],
    ema: Annotated[bool, typer.Option("--ema", help="export the averaged (EMA) weights")] = False,
) -> None:
    """Export the model of a checkpoint (of a run: the newest one) for other programs."""
    from paceline.checkpoint import export as exporting

    folder = _newest(path)
    count = exporting.export(folder, to, output, ema=ema)
    print(f"{short(folder)} -> {output}: {count:,} {'averaged ' if ema else ''}weights ({to})")


def _found(path: Path) -> list[Found]:
    """The checkpoints at or below a path, newest first, unreadable ones last."""
    from paceline.checkpoint import directory, manifest, reader

    if not path.exists():
        raise CheckpointError("missing", f"Folder {path} does not exist.", fix="pass a run folder, e.g. runs/gpt")
    if (path / manifest.NAME).exists():
        try:
            return [directory.Found(path, reader.open_checkpoint(path).manifest)]
        except CheckpointError as problem:
            return [directory.Found(path, None, problem)]
    found = [each for folder in checkpoint_folders(path) for each in directory.candidates(folder)]
    return sorted(found, key=lambda each: "" if each.manifest is None else each.manifest.created, reverse=True)


def _newest(path: Path) -> Path:
    """The newest checkpoint with a readable manifest. Skipped ones are reported."""
    found = _found(path) or [_nothing(path)]
    for each in found:
        if each.problem is not None and len(found) > 1:
            print(f"{each.problem.what} Skipping it.", file=sys.stderr)
    return found[0].folder


def _nothing(path: Path) -> Found:
    raise CheckpointError(
        "missing",
        f"No checkpoint found in {path}.",
        fix="pass the folder of a run or a checkpoint; run paceline checkpoint ls to list them",
    )


def _facts(found: Found) -> dict[str, Any]:
    from paceline.checkpoint import directory

    pointers = (LATEST, BEST)
    facts: dict[str, Any] = {
        "path": str(found.folder),
        "marks": [each for each in pointers if found.folder.name in directory.read_pointer(found.folder.parent, each)],
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


def _reason(error: CheckpointError) -> str:
    return (error.what.partition(" is corrupted: ")[2] or error.what).rstrip(".")
