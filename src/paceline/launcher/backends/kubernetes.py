"""`--k8s`, in the words of the command line, and what of these words the pods get."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from paceline.config.launch import LaunchSpec, options_of
from paceline.errors import LaunchError, did_you_mean
from paceline.launcher.backends.kubernetes_manifest import ManifestOptions, manifest
from paceline.launcher.workload import Workload
from paceline.text import parse_pairs

_KEYS = ("kind", "image", "name", "namespace", "gpus", "cpu", "memory", "secret", "claim", "restarts", "grace")
_KINDS: tuple[Literal["trainjob", "jobset"], ...] = ("trainjob", "jobset")
# The pods' place is Kubernetes's affair; all other options are theirs.
_NOT_FOR_PODS = {flag for name in ("ranks", "nodes", "k8s_with") for flag in options_of(LaunchSpec)[name][0].flags}


def launch(workload: Workload, spec: LaunchSpec, command: Sequence[str]) -> int:
    """Print manifests; `kubectl apply` is a person's."""
    fewest, most = spec.node_range
    if fewest != most:
        raise LaunchError("bad-k8s", f"--nodes {spec.nodes}: pods of a job come all or none.", fix="give one number")
    run = spec.run or "paceline"
    print(manifests(spec.k8s_with, command, workload.script_arguments, run=run, nodes=most, ranks=spec.ranks), end="")  # noqa: T201
    return 0


def manifests(text: str | None, command: Sequence[str], own: int, *, run: str, nodes: int, ranks: int | None) -> str:
    """The YAML of a TrainJob and of a JobSet, or of the one that was asked for. `command` is what the person typed
    behind `paceline`, and the last `own` words of it are the script's own."""
    values, claims = _parse(text or "")
    gpus = int(values.get("gpus", "0"))
    if ranks is None and not gpus:
        raise _refusal("It is not said how many ranks a pod has.", "-n 4, or --k8s-with gpus=4")
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
            raise _refusal(f"There is no kind {values['kind']!r}.", did_you_mean(values["kind"], _KINDS))
        return manifest(replace(request, kind=kind))
    secret = request.secret or f"{request.name}-token"
    needs = (
        ""
        if nodes == 1
        else f"# Pods need the Secret {secret}: docs/guides/launch.md#kubernetes shows how it is made.\n"
    )
    both = [f"# A {kind}. Apply one of the two (--k8s-with kind={kind} prints it alone).\n{needs}" for kind in _KINDS]
    return "---\n".join(words + manifest(replace(request, kind=kind)) for words, kind in zip(both, _KINDS, strict=True))


def _parse(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """kind=jobset,image=me/train:1,gpus=4,claim=runs:/runs"""
    values: dict[str, str] = {}
    claims: dict[str, str] = {}
    for key, value in parse_pairs(text):
        if not key and value is None:  # nothing at all, or a comma at the end
            continue
        if key not in _KEYS:
            raise _refusal(f"--k8s-with: there is no {key!r}.", did_you_mean(key, _KEYS))
        if not value or (key in ("gpus", "restarts", "grace") and not re.fullmatch("[0-9]{1,6}", value)):
            raise _refusal(f"--k8s-with: {key}={value or ''!r} can't be.", f"such as {key}=4")
        if key == "claim":
            claim, _, path = value.partition(":")
            claims[claim] = path
        else:
            values[key] = value
    return values, claims


def _for_pods(words: Sequence[str], own: int) -> list[str]:
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


def _refusal(what: str, fix: str) -> LaunchError:
    return LaunchError("bad-k8s", what, fix=fix)
