"""The fingerprint of a node: versions, code and recipe, which must be the same on every node of a job.

Nodes that run different code train different models, or wait for each other forever. So each launcher sends the
fingerprint of what it would run, and a node that differs from the first is rejected before any rank starts.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.config.launch import Endpoint, LaunchSpec
from paceline.launcher.workload import Target
from paceline.text import flatten, shorten

Fingerprint = dict[str, dict[str, str]]  # by aspect ("version", "code", "recipe"): name and value

_MAX_FILES = 2000  # of code
_MAX_SHOWN = 60  # characters of a value
_MAX_BYTES = 16 << 20


def fingerprint(*, script: Path | None, recipe: Mapping[str, Any] | None) -> Fingerprint:
    recipe = recipe or {}
    versions = {"paceline": _version("paceline"), "python": platform.python_version(), "torch": _version("torch")}
    keys = flatten({key: value for key, value in recipe.items() if key != "launch"})  # which differs between nodes
    return {
        "version": versions,
        "code": _code(script, recipe),
        "recipe": {key: json.dumps(value) for key, value in keys.items()},
    }


def differences(first: Fingerprint, other: Fingerprint) -> list[str]:
    """A description of each difference, the value of `first` on the left."""
    found = []
    for aspect in sorted({*first, *other}):
        ours, theirs = first.get(aspect, {}), other.get(aspect, {})
        for name in sorted({*ours, *theirs}):
            left, right = ours.get(name), theirs.get(name)
            if left != right:
                found.append(_describe(aspect, name, left, right))
    return found


def _describe(aspect: str, name: str, left: str | None, right: str | None) -> str:
    if aspect == "code":
        state = "is missing" if right is None else "is not on the first node" if left is None else "differs"
        return f"code: {name} {state}"
    values = ["not set" if value is None else shorten(value, _MAX_SHOWN) for value in (left, right)]
    return f"{aspect}: {name} is {' and '.join(values)}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _code(script: Path | None, recipe: Mapping[str, Any]) -> dict[str, str]:
    """Hashes of the script, if any, and of the Python files in and below its folder, or that of the recipe's own code,
    which ranks may import."""
    if script is not None:
        return {script.name: _hash(script), **_files_below(script.resolve().parent)} if script.is_file() else {}
    return _files_below(Path(recipe["code"]).resolve()) if recipe.get("code") else {}


def _files_below(root: Path) -> dict[str, str]:
    files: dict[str, str] = {}
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        # Virtual environments and site-packages hold installed code, not the user's.
        folders[:] = sorted(
            name for name in folders
            if not name.startswith(".") and name not in ("site-packages", "__pycache__", "runs", "node_modules")
            and not (here / name / "pyvenv.cfg").exists()
        )  # fmt: skip
        for name in sorted(names):
            if name.endswith(".py") and len(files) < _MAX_FILES:
                files[str((here / name).relative_to(root))] = _hash(here / name)
    return files


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return "unreadable"


@dataclass(frozen=True)
class NodeOrder:
    node: int
    token: str
    coordinator: tuple[Endpoint, ...]  # addresses of the front end
    port: int  # of the coordinator
    spec: LaunchSpec
    target: Target | None
    recipe: Mapping[str, Any] | None
    folder: str  # working directory of the ranks
    by_ssh: bool = False  # whether the ssh connection, if any, came from the front end

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def read(descriptor: int) -> NodeOrder:
    """Read one line, and nothing after it."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte or len(line) > _MAX_BYTES:
            raise SystemExit("paceline node: no order received; this command is started by `paceline launch`")
        line += byte
    values = json.loads(line)
    values["coordinator"] = tuple(Endpoint(*address) for address in values["coordinator"])
    values["spec"] = LaunchSpec.from_json(values["spec"])
    values["target"] = values["target"] and Target.from_json(values["target"])
    return NodeOrder(**values)


def reachable(order: NodeOrder) -> list[Endpoint]:
    """Addresses at which to try the front end, including those from which ssh or srun connected."""
    addresses = list(order.coordinator)
    ssh_client = os.environ.get("SSH_CONNECTION", "").split()
    if order.by_ssh and ssh_client:
        addresses.insert(0, Endpoint(ssh_client[0], order.port))
    if launch_node := os.environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        addresses.append(Endpoint(launch_node, order.port))
    return list(dict.fromkeys(addresses))
