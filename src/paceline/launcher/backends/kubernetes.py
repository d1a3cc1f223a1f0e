"""`--k8s`: prints Kubernetes manifests that run the command line in pods."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from paceline.config.launch import LaunchSpec, options_of
from paceline.errors import did_you_mean
from paceline.launcher.backends.kubernetes_manifest import ManifestOptions, invalid, manifest
from paceline.launcher.workload import Workload
from paceline.text import parse_pairs

_KEYS = ("kind", "image", "name", "namespace", "gpus", "cpu", "memory", "secret", "claim", "restarts", "grace")
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
    values, claims = _parse(text or "")
    gpus = int(values.get("gpus", "0"))
    if ranks is None and not gpus:
        raise invalid("Unknown number of ranks per pod.", "pass -n 4, or --k8s-with gpus=4")
    name = re.sub(r"[^a-z0-9-]+", "-", Path(run).name.lower()).strip("-") or "paceline"
    request = ManifestOptions(
        kind="jobset",
        name=values.get("name", name),
        image=values.get("image", "paceline:latest"),
        nodes=nodes,
        ranks=ranks or gpus,
        arguments=_for_pods(command[1:], own),
        verb="train" if command[0] == "train" else "launch",
        namespace=values.get("namespace"),
        gpus=gpus,
        cpu=values.get("cpu"),
        memory=values.get("memory"),
        secret=values.get("secret"),
        claims=claims,
        restarts=int(values.get("restarts", "3")),
        grace=int(values.get("grace", "120")),
    )
    if "kind" in values:
        kind = next((each for each in _KINDS if each == values["kind"]), None)
        if kind is None:
            raise invalid(f"Unknown kind {values['kind']!r} in --k8s-with.", did_you_mean(values["kind"], _KINDS))
        return manifest(replace(request, kind=kind))
    secret = request.secret or f"{request.name}-token"
    note = f"# Requires the Secret {secret}; see docs/guides/launch.md#kubernetes.\n" if nodes > 1 else ""
    return "---\n".join(
        f"# {kind}. Apply only one of the two (--k8s-with kind={kind} prints only this one).\n{note}"
        + manifest(replace(request, kind=kind))
        for kind in _KINDS
    )


def _parse(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """kind=jobset,image=me/train:1,gpus=4,claim=runs:/runs"""
    values: dict[str, str] = {}
    claims: dict[str, str] = {}
    for key, value in parse_pairs(text):
        if not key and value is None:  # empty, or a trailing comma
            continue
        if key not in _KEYS:
            raise invalid(f"Unknown key {key!r} in --k8s-with.", did_you_mean(key, _KEYS))
        if not value or (key in ("gpus", "restarts", "grace") and not re.fullmatch("[0-9]{1,6}", value)):
            raise invalid(f"Invalid value in --k8s-with: {key}={value or ''!r}.", f"pass e.g. {key}=4")
        if key == "claim":
            claim, _, path = value.partition(":")
            claims[claim] = path
        else:
            values[key] = value
    return values, claims


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
