"""Manifests for Kubernetes: what `paceline launch --k8s` prints, for `kubectl apply -f -`.

    trainjob    a TrainJob of Kubeflow Trainer (2.2 or later). Its runtime tells the pods their place (PET_*).
    jobset      a plain JobSet. Its pods get their place on the command line.

Each pod is one node, and runs the same `paceline launch` as people do by hand. Several nodes share the job's token,
which comes from a Secret: a manifest never holds it. Kubernetes gives an argument or a value that holds `$(NAME)` the
value of that variable; so each dollar sign of the user's is doubled, and arrives as it was.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from paceline.config.launch import DEFAULT_PORT
from paceline.errors import LaunchError
from paceline.runtime.environment import TOKEN

_JOB = _CONTAINER = "node"  # the names that Kubeflow's runtimes have

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # of RFC 1035: both controllers want it to begin with a letter
_LONGEST_NAME = 40  # the pods' names are longer, and may have 63
_OBJECT = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")  # of claims and secrets
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,499}")
_QUANTITY = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOUNT = re.compile(r"/[^:\x00-\x1f\x7f]{1,4000}")
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9/_.-]+")
_MOST_ITEMS = 128  # of the arguments and variables of a TrainJob


@dataclass(frozen=True)
class ManifestOptions:
    """What was asked for. `arguments` is what follows `paceline VERB`: options for each node, script, its arguments."""

    kind: Literal["trainjob", "jobset"]
    name: str
    image: str
    nodes: int
    ranks: int  # on each node
    arguments: Sequence[str]
    verb: Literal["launch", "train"] = "launch"
    namespace: str | None = None  # None: kubectl's own
    gpus: int = 0  # on each node
    cpu: str | None = None  # such as 8 or 500m
    memory: str | None = None  # such as 64Gi
    secret: str | None = None  # that holds the token; None: the job's name and -token
    claims: Mapping[str, str] = field(default_factory=dict)  # names of volume claims, and where they are mounted
    env: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 3  # of the whole JobSet, when a pod is lost
    grace: int = 120  # seconds in which ranks can save before a pod is ended


def manifest(request: ManifestOptions) -> str:
    """YAML of one object."""
    _check(request)
    made = _trainjob(request) if request.kind == "trainjob" else _jobset(request)
    return yaml.dump(made, Dumper=_Dumper, sort_keys=False, width=math.inf)


def _trainjob(request: ManifestOptions) -> dict[str, Any]:
    volumes, mounts = _volumes(request)
    pod = {
        "terminationGracePeriodSeconds": request.grace,
        "volumes": volumes,
        "containers": [{"name": _CONTAINER, "volumeMounts": mounts}],
    }
    job = {"name": _JOB, "template": {"spec": {"template": {"spec": pod}}}}
    trainer = {
        "image": request.image,
        "command": ["paceline", request.verb],
        "args": _literal(request.arguments),
        "env": _env(request),
        "numNodes": request.nodes,
        "numProcPerNode": request.ranks,
        "resourcesPerNode": _resources(request),
    }
    patch = {"manager": "paceline", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(request),
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {key: value for key, value in trainer.items() if value not in ([], {})},
            "runtimePatches": [patch],
        },
    }


def _jobset(request: ManifestOptions) -> dict[str, Any]:
    volumes, mounts = _volumes(request)
    container = {
        "name": _CONTAINER,
        "image": request.image,
        "command": ["paceline", request.verb],
        "args": [*_place(request), "-n", str(request.ranks), *_literal(request.arguments)],
        "env": _env(request),
        "ports": [{"containerPort": DEFAULT_PORT, "protocol": "TCP"}],
        "resources": _resources(request),
        "volumeMounts": mounts,
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": request.grace,
        "automountServiceAccountToken": False,  # training has no business with the cluster's API
        "containers": [{key: value for key, value in container.items() if value not in ([], {})}],
        "volumes": volumes,
    }
    job = {
        "completionMode": "Indexed",  # a pod's index is its node's number
        "completions": request.nodes,
        "parallelism": request.nodes,
        "backoffLimit": 0,  # a pod alone can't come back to the others: all begin again
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(request),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": request.restarts},
            "replicatedJobs": [{"name": _JOB, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _metadata(request: ManifestOptions) -> dict[str, str]:
    return {"name": request.name} | ({"namespace": request.namespace} if request.namespace else {})


def _place(request: ManifestOptions) -> list[str]:
    """Which node a pod is, and where the first one is: JobSet gives pods names by their number."""
    if request.nodes == 1:
        return []
    master = f"{request.name}-{_JOB}-0-0.{request.name}:{DEFAULT_PORT}"
    return ["--nodes", str(request.nodes), "--node-rank", "$(JOB_COMPLETION_INDEX)", "--master", master]


def _env(request: ManifestOptions) -> list[dict[str, Any]]:
    variables: list[dict[str, Any]] = []
    if request.nodes > 1:
        secret = {"name": request.secret or f"{request.name}-token", "key": "token"}
        variables.append({"name": TOKEN, "valueFrom": {"secretKeyRef": secret}})
    return [*variables, *({"name": name, "value": _literal([value])[0]} for name, value in request.env.items())]


def _literal(texts: Sequence[str]) -> list[str]:
    return [text.replace("$", "$$") for text in texts]


def _resources(request: ManifestOptions) -> dict[str, dict[str, str]]:
    requests = {"cpu": request.cpu, "memory": request.memory}
    limits = {"memory": request.memory, "nvidia.com/gpu": str(request.gpus) if request.gpus else None}
    both = {"requests": requests, "limits": limits}
    asked = {part: {name: amount for name, amount in each.items() if amount} for part, each in both.items()}
    return {part: amounts for part, amounts in asked.items() if amounts}


def _volumes(request: ManifestOptions) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Loader workers and NCCL share memory, of which a container has 64 MB unless it gets more."""
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    for number, (claim, path) in enumerate(request.claims.items()):
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"claim-{number}", "mountPath": path})
    return volumes, mounts


class _Dumper(yaml.SafeDumper):
    """Quotes every string that some reader might take for something else: PyYAML writes 1e3 as it is, and the reader
    of Kubernetes would see a number."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if _PLAIN.fullmatch(text) else '"')


_Dumper.add_representer(str, _represent_str)


def _check(request: ManifestOptions) -> None:
    label = "lower-case letters, digits and -, beginning with a letter"
    _require("the job's name", _LABEL, request.name, f"{label}, at most {_LONGEST_NAME}", longest=_LONGEST_NAME)
    _require("the image", _IMAGE, request.image, "such as ghcr.io/me/train:1")
    if request.namespace is not None:
        _require("the namespace", _LABEL, request.namespace, label, longest=63)
    if request.secret is not None:
        _require("the secret's name", _OBJECT, request.secret, "lower-case letters, digits, - and .")
    for what, amount in (("the CPUs", request.cpu), ("the memory", request.memory)):
        if amount is not None:
            _require(what, _QUANTITY, amount, "a quantity such as 8, 500m or 64Gi")
    for claim, path in request.claims.items():
        _require("the volume claim", _OBJECT, claim, "lower-case letters, digits, - and .")
        _require("the folder of a volume claim", _MOUNT, path, "a whole path without a colon")
    for name, value in request.env.items():
        _require("the variable", _VARIABLE, name, "letters, digits and _")
        _require_text(f"the value of {name}", value)
        if name == TOKEN or name.startswith("PET_"):
            raise _bad(f"{name} can't be set in a manifest", "the token comes from a Secret, PET_* from the runtime")
    for argument in request.arguments:
        _require_text("the argument", argument)
    _check_numbers(request)


def _check_numbers(request: ManifestOptions) -> None:
    least = {"nodes": 1, "ranks": 1, "gpus": 0, "restarts": 0, "grace": 1}
    for what, fewest in least.items():
        if not fewest <= getattr(request, what) <= 100_000:
            raise _bad(f"{getattr(request, what)} is no number of {what}", f"at least {fewest}")
    if request.kind == "trainjob" and max(len(request.arguments), len(request.env) + 1) > _MOST_ITEMS:
        raise _bad(f"a TrainJob takes at most {_MOST_ITEMS} arguments and variables", "use --k8s jobset")


def _require(what: str, pattern: re.Pattern[str], text: str, fix: str, *, longest: int = 4096) -> None:
    if len(text) > longest or not pattern.fullmatch(text):
        raise _bad(f"{what} can't be {text[:80]!a}", fix)


def _require_text(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        text = "\0"
    if "\0" in text:
        raise _bad(f"{what} holds bytes that are no text, or a NUL", "only text can be in a manifest")


def _bad(what: str, fix: str) -> LaunchError:
    return LaunchError("bad-k8s", f"For Kubernetes, {what}.", fix=fix)
