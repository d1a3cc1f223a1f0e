"""`--k8s`: Kubernetes manifests that run the command line in pods."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from paceline.config.launch import DEFAULT_PORT, LaunchSpec, options_of
from paceline.errors import LaunchError, did_you_mean
from paceline.launcher.workload import Workload
from paceline.runtime.environment import TOKEN
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


_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035: both controllers require a letter first
_MAX_NAME = 40  # pods add a suffix, up to 63 characters
_OBJECT = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")  # of claims and secrets
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,499}")
_QUANTITY = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_MOUNT = re.compile(r"/[^:\x00-\x1f\x7f]{1,4000}")
_NOT_TEXT = re.compile(r"[\x00\ud800-\udfff]")
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9/_.-]+")
_MAX_ITEMS = 128  # arguments, or variables, of a TrainJob


@dataclass(frozen=True)
class ManifestOptions:
    """`arguments` follow `paceline VERB`: options for each node, the script and its arguments."""

    kind: Literal["trainjob", "jobset"]
    name: str
    image: str
    nodes: int
    ranks: int  # per node
    arguments: Sequence[str]
    verb: str = "launch"
    namespace: str | None = None  # None: the current namespace of kubectl
    gpus: int = 0  # per node
    cpu: str | None = None  # e.g. 8 or 500m
    memory: str | None = None  # e.g. 64Gi
    secret: str | None = None  # that contains the token; default: NAME-token
    claims: Mapping[str, str] = field(default_factory=dict)  # names of volume claims, with their mount paths
    restarts: int = 3  # maximum restarts of a JobSet after a pod is lost
    grace: int = 120  # seconds between SIGTERM and SIGKILL


def manifest(request: ManifestOptions) -> str:
    """The manifest as YAML."""
    _check(request)
    templates = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return yaml.dump(
        _filled(templates[request.kind], _values(request)), Dumper=_Dumper, sort_keys=False, width=math.inf
    )


def _filled(template: Any, values: Mapping[str, Any]) -> Any:
    """A part of kubernetes.yaml with its values."""
    if isinstance(template, dict):
        filled = {key: _filled(each, values) for key, each in template.items()}
        return {key: each for key, each in filled.items() if each not in (None, [], {})}
    if isinstance(template, list):
        entries = [_filled(each, values) for each in template]
        return [entry for each in entries for entry in (each if isinstance(each, list) else [each])]
    return values[template[1:]] if isinstance(template, str) and template.startswith("$") else template


def _values(request: ManifestOptions) -> dict[str, Any]:
    """By their names in kubernetes.yaml."""
    claims = {f"claim-{number}": claim for number, claim in enumerate(request.claims.items())}
    token = {"name": request.secret or f"{request.name}-token", "key": "token"}
    return vars(request) | {
        "arguments": [argument.replace("$", "$$") for argument in request.arguments],
        "env": [{"name": TOKEN, "valueFrom": {"secretKeyRef": token}}] if request.nodes > 1 else [],
        "gpus": str(request.gpus) if request.gpus else None,
        "mounts": [{"name": name, "mountPath": path} for name, (_, path) in claims.items()],
        "place": _place(request),
        "port": DEFAULT_PORT,
        "volumes": [
            {"name": name, "persistentVolumeClaim": {"claimName": claim}} for name, (claim, _) in claims.items()
        ],
    }


def _place(request: ManifestOptions) -> list[str]:
    """Options for the ranks and the node rank of a pod, and the address of the first one, which JobSet derives from
    its index."""
    ranks = ["-n", str(request.ranks)]
    if request.nodes == 1:
        return ranks
    master = f"{request.name}-node-0-0.{request.name}:{DEFAULT_PORT}"
    return ["--nodes", str(request.nodes), "--node-rank", "$(JOB_COMPLETION_INDEX)", "--master", master, *ranks]


class _Dumper(yaml.SafeDumper):
    """Quotes strings that another parser might read as something else: PyYAML leaves 1e3 unquoted, which Kubernetes
    parses as a number."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if _PLAIN.fullmatch(text) else '"')


_Dumper.add_representer(str, _represent_str)


def _check(request: ManifestOptions) -> None:
    label, names = (
        "use lower-case letters, digits and -, with a letter first",
        "use lower-case letters, digits, - and .",
    )
    _require("name", _LABEL, request.name, f"{label}; at most {_MAX_NAME} characters", longest=_MAX_NAME)
    _require("image", _IMAGE, request.image, "pass e.g. ghcr.io/me/train:1")
    _require("namespace", _LABEL, request.namespace, label, longest=63)
    _require("secret", _OBJECT, request.secret, names)
    for what, amount in (("cpu", request.cpu), ("memory", request.memory)):
        _require(what, _QUANTITY, amount, "pass a quantity, e.g. 8, 500m or 64Gi")
    for claim, path in request.claims.items():
        _require("volume claim", _OBJECT, claim, names)
        _require("mount path", _MOUNT, path, "pass an absolute path without a colon")
    if any(map(_NOT_TEXT.search, request.arguments)):
        raise invalid("Invalid argument: contains NUL or is not valid UTF-8.", "pass text only")
    least = {"nodes": 1, "ranks": 1, "gpus": 0, "restarts": 0, "grace": 1}
    for what, fewest in least.items():
        if not fewest <= getattr(request, what) <= 100_000:
            raise invalid(f"Invalid value for {what}: {getattr(request, what)}.", f"pass at least {fewest}")
    if request.kind == "trainjob" and len(request.arguments) > _MAX_ITEMS:
        raise invalid(f"Too many arguments or variables for a TrainJob (limit: {_MAX_ITEMS}).", "use kind=jobset")


def _require(what: str, pattern: re.Pattern[str], text: str | None, fix: str, *, longest: int = 4096) -> None:
    if text is not None and (len(text) > longest or not pattern.fullmatch(text)):
        raise invalid(f"Invalid {what}: {text[:80]!a}.", fix)


def invalid(what: str, fix: str) -> LaunchError:
    return LaunchError("bad-k8s", what, fix=fix)
