"""`--k8s`: prints Kubernetes manifests that run the command line in pods."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from paceline.config.launch import LaunchSpec, options_of
from paceline.errors import did_you_mean
from paceline.launcher.backends.kubernetes_manifest import ManifestOptions, invalid, manifest
from paceline.launcher.workload import Workload
from paceline.text import parse_pairs

_NUMBERS = ("gpus", "restarts", "grace")
_KEYS = ("kind", "image", "name", "namespace", "cpu", "memory", "secret", "claim", *_NUMBERS)
_KINDS: tuple[Literal["trainjob", "jobset"], ...] = ("trainjob", "jobset")
# Kubernetes sets these; all other options are passed to the pods.
_NOT_FOR_PODS = {flag for name in ("ranks", "nodes", "k8s_with") for flag in options_of(LaunchSpec)[name][0].flags}


def launch(workload: Workload, spec: LaunchSpec, command: Sequence[str]) -> int:
    """Print manifests for `kubectl apply`."""
    fewest, most = spec.node_range
    if fewest != most:
        raise invalid(f"Unsupported with --k8s: --nodes {spec.nodes}.", "pass a single number")
    run = spec.run or "paceline"
    print(manifests(spec.k8s_with, command, workload.script_arguments, run=run, nodes=most, ranks=spec.ranks), end="")  # noqa: T201
    return 0


def manifests(text: str | None, command: Sequence[str], own: int, *, run: str, nodes: int, ranks: int | None) -> str:
    """The YAML of a TrainJob and a JobSet, or of the requested kind. `command` are the arguments of `paceline`; the
    last `own` of them belong to the script."""
    settings = _parse(text or "")
    kind = settings.pop("kind", None)
    ranks = ranks or settings.get("gpus")
    if not ranks:
        raise invalid("Unknown number of ranks per pod.", "pass -n 4, or --k8s-with gpus=4")
    name = re.sub(r"[^a-z0-9-]+", "-", Path(run).name.lower()).strip("-") or "paceline"
    defaults: dict[str, Any] = {"kind": kind or "jobset", "name": name, "image": "paceline:latest"}
    request = ManifestOptions(
        **(defaults | settings), nodes=nodes, ranks=ranks, arguments=_for_pods(command[1:], own), verb=command[0]
    )
    if kind is not None:
        if kind not in _KINDS:
            raise invalid(f"Unknown kind {kind!r} in --k8s-with.", did_you_mean(kind, _KINDS))
        return manifest(request)
    secret = request.secret or f"{request.name}-token"
    note = f"# Requires the Secret {secret}; see docs/guides/launch.md#kubernetes.\n" if nodes > 1 else ""
    return "---\n".join(
        f"# {kind}. Apply only one of the two (--k8s-with kind={kind} prints only this one).\n{note}"
        + manifest(replace(request, kind=kind))
        for kind in _KINDS
    )


def _parse(text: str) -> dict[str, Any]:
    """kind=jobset,image=me/train:1,gpus=4,claim=runs:/runs"""
    settings: dict[str, Any] = {"claims": {}}
    for key, value in parse_pairs(text):
        if not key and value is None:  # empty, or a trailing comma
            continue
        if key not in _KEYS:
            raise invalid(f"Unknown key {key!r} in --k8s-with.", did_you_mean(key, _KEYS))
        if not value or (key in _NUMBERS and not re.fullmatch("[0-9]{1,6}", value)):
            raise invalid(f"Invalid value in --k8s-with: {key}={value or ''!r}.", f"pass e.g. {key}=4")
        if key == "claim":
            claim, _, path = value.partition(":")
            settings["claims"][claim] = path
        else:
            settings[key] = int(value) if key in _NUMBERS else value
    return settings


def _for_pods(words: Sequence[str], own: int) -> list[str]:
    """Remove options that Kubernetes sets, except among the last `own` words."""
    kept, index, end = [], 0, len(words) - own
    while index < end:
        word = words[index]
        name = word.partition("=")[0]
        if name in _NOT_FOR_PODS:
            index += 1 if "=" in word else 2
            continue
        if word != "--k8s" and not re.fullmatch("-n[0-9]+", word):
            kept.append(word)
        index += 1
    return [*kept, *words[end:]]
