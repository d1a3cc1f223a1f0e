"""Launch options, each declared once, and the launch spec.

A field with an `option` is a flag of `paceline launch` and `paceline train` (tools/cli/options.py builds their
signatures); a field of `LaunchOptions` is also a key of a recipe's `launch:`. `LaunchSpec.resolve` merges the two.
Dispatch, backends, node orders and the agent receive the whole spec, so an option declared here reaches all of them, on
every node.

These are plain dataclasses, because `paceline --help` and `paceline launch` must start without importing pydantic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args, get_type_hints

from paceline.errors import LaunchError

if TYPE_CHECKING:
    from paceline.config.recipe import Config

DEFAULT_PORT = 29500
GRACE = 30.0  # seconds between SIGTERM and SIGKILL

OnHang = Literal["report", "restart", "stop"]

MANUAL_NODES, REMOTE_NODES, SUPERVISION = "Nodes started manually", "Nodes started from here", "Supervision"


class NodeRange(NamedTuple):
    """The minimum and maximum number of nodes of a job."""

    fewest: int
    most: int

    @classmethod
    def match(cls, text: str) -> NodeRange | None:
        """Parse `2` or `1:4` without checking the numbers."""
        found = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", text, re.ASCII)
        return None if found is None else cls(int(found[1]), int(found[2] or found[1]))

    @classmethod
    def parse(cls, value: str | Sequence[int]) -> NodeRange:
        """Parse text or JSON."""
        found = cls.match(value) if isinstance(value, str) else cls(*value)
        if found is None or not 1 <= found.fewest <= found.most:
            raise LaunchError("bad-number", f"Invalid value for --nodes: {value!r}.", fix="pass e.g. 2, or 1:4")
        return found

    def __str__(self) -> str:
        return str(self.most) if self.fewest == self.most else f"{self.fewest}:{self.most}"


class Endpoint(NamedTuple):
    """The address of the coordinator, to which the launchers of all nodes connect."""

    host: str
    port: int

    @classmethod
    def match(cls, text: str) -> Endpoint | None:
        """Parse `host`, `host:port` or `[address]:port` without checking the host and the port."""
        found = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::([0-9]{1,5}))?", text, re.ASCII)
        return None if found is None else cls(found[1] or found[2], int(found[3] or DEFAULT_PORT))

    @classmethod
    def parse(cls, value: str | Sequence[Any]) -> Endpoint:
        """Parse text or JSON."""
        if not isinstance(value, str):
            return cls(*value)
        found = cls.match(value)
        host = r"[0-9A-Fa-f:.%]+" if value.startswith("[") else r"(?!-)[A-Za-z0-9_.-]{1,253}"
        if found is None or not re.fullmatch(host, found.host, re.ASCII) or not 0 < found.port < 65536:
            raise LaunchError(
                "no-master", f"Invalid value for --master: {value!r}.", fix="pass HOST or HOST:PORT, e.g. node0:29500"
            )
        return found


def parse_ranks(value: str | Sequence[int]) -> tuple[int, ...]:
    """Parse ranks from text (`0,2`), from a recipe or from JSON."""
    if not isinstance(value, str):
        return tuple(value)
    if not re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", value, re.ASCII):
        raise LaunchError("bad-number", f"Invalid value for --tee: {value!r}.", fix="pass ranks, e.g. 0,2")
    return tuple(int(number) for number in value.split(","))


def parse_on_hang(value: str) -> OnHang:
    if value not in get_args(OnHang):
        raise LaunchError("bad-options", f"Unknown --on-hang {value!r}.", fix="use report, restart or stop")
    return cast("OnHang", value)


class Option(NamedTuple):
    """The flags, the help text and the constraints of an option."""

    flags: tuple[str, ...]
    help: str  # also its description in the schema of recipes
    panel: str | None = None  # of --help
    metavar: str | None = None
    ge: int | None = None
    gt: int | None = None  # checked in recipes only; on the command line the launcher reports what it cannot start
    parse: Callable[[Any], Any] | None = None  # from text or JSON


def option(default: Any, *flags: str, **details: Any) -> Any:
    """A dataclass field that is an option."""
    return field(default=default, metadata={"option": Option(flags, **details)})


@cache
def options_of(kind: type) -> dict[str, tuple[Option, Any]]:
    """The options of a dataclass by name, each with its type."""
    hints = get_type_hints(kind)
    found = {each.name: each.metadata.get("option") for each in fields(kind)}
    return {name: (each, hints[name]) for name, each in found.items() if each is not None}


@dataclass(frozen=True)
class LaunchOptions:
    """A recipe's `launch:` section."""

    # fmt: off
    ranks: int | None = option(
        None, "-n", "--ranks", "--nproc-per-node", "--nproc_per_node", gt=0,
        help="number of ranks per node; default: one per GPU; without GPUs, 1 (launch) or 2 (train, bench)",
    )
    nodes: NodeRange | None = option(  # noqa: RUF009
        None, "--nodes", "--nnodes", parse=NodeRange.parse, panel=MANUAL_NODES, metavar="N | MIN:MAX",
        help="number of nodes, or a range MIN:MAX",
    )
    node_rank: int | None = option(
        None, "--node-rank", "--node_rank", ge=0, panel=MANUAL_NODES,
        help="rank of this node; assigned by the coordinator if omitted",
    )
    master: Endpoint | None = option(  # noqa: RUF009
        None, "--master", "--rdzv-endpoint", "--rdzv_endpoint", parse=Endpoint.parse, panel=MANUAL_NODES,
        metavar="HOST[:PORT]",
        help="address of the first node, which runs the coordinator; default port: 29500 (the ranks use the next one)",
    )
    wait: float = option(600.0, "--wait", gt=0, panel=MANUAL_NODES, help="seconds to wait for all nodes; default: 600")
    interface: str | None = option(
        None, "--interface", panel=MANUAL_NODES,
        help="network interface that reaches the other nodes; detected if omitted",
    )
    hosts: str | None = option(
        None, "--hosts", panel=REMOTE_NODES, metavar="A:4,B:4 | FILE",
        help="launch on these hosts via ssh: a:4,b:4, or a hostfile",
    )
    ssh: str = option("ssh", "--ssh", panel=REMOTE_NODES, metavar="'ssh -p 2222'", help="ssh program, with options")
    python: str | None = option(
        None, "--python", panel=REMOTE_NODES,
        help="Python interpreter on the other nodes; default: the same path as on this node",
    )
    address: str | None = option(
        None, "--address", panel=REMOTE_NODES, help="address of this machine, as reachable from the other nodes"
    )
    slurm: str | None = option(
        None, "--slurm", panel=REMOTE_NODES, metavar="nodes=2,gpus=4,time=2h",
        help="submit to SLURM and follow the output, e.g. nodes=2,gpus=4,time=2h",
    )
    ray: str | None = option(
        None, "--ray", panel=REMOTE_NODES, metavar="auto | HOST:PORT",
        help="launch on a Ray cluster: auto, or host:port",
    )
    max_restarts: int = option(
        0, "--max-restarts", "--max_restarts", ge=0, panel=SUPERVISION,
        help="maximum number of restarts after a failure, each from the newest intact checkpoint",
    )
    on_hang: OnHang = option(  # noqa: RUF009
        "report", "--on-hang", parse=parse_on_hang, panel=SUPERVISION, metavar="report | restart | stop",
        help="when ranks make no progress: report why and keep waiting (default), restart them, or stop the run",
    )
    tee: tuple[int, ...] = option(
        (), "--tee", parse=parse_ranks, panel=SUPERVISION, metavar="0,2",
        help="ranks whose output is shown, each line prefixed with its rank",
    )
    # fmt: on


@dataclass(frozen=True)
class LaunchSpec(LaunchOptions):
    """Everything that is known before ranks start."""

    # fmt: off
    rendezvous: str | None = option(
        None, "--rdzv-backend", "--rdzv_backend", panel=MANUAL_NODES, metavar="static | c10d",
        help="static: every node passes --node-rank; c10d: node ranks are assigned in order of arrival",
    )
    dry_run: bool = option(
        False, "--dry-run", panel=REMOTE_NODES,
        help="check the command and print what would be started where; with --slurm, the batch script",
    )
    k8s: bool = option(False, "--k8s", panel=REMOTE_NODES, help="print a TrainJob and a JobSet for Kubernetes")
    k8s_with: str | None = option(
        None, "--k8s-with", panel=REMOTE_NODES, metavar="image=IMAGE,gpus=4,…",
        help="image, gpus, kind, name, namespace, cpu, memory, secret, claim=NAME:/PATH, restarts, grace",
    )
    # fmt: on
    run: str | None = None  # name of the run folder; None: no files are written
    is_named: bool = False  # by --run
    resume: str | None = None  # auto: the newest run of that name; or the path of a run or a checkpoint
    device: str | int | None = None
    port: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)  # environment variables of every rank
    grace: float = GRACE
    fresh: bool = False  # a new interpreter for each rank
    fallback: bool = False  # continue as one rank if ranks cannot connect
    default_cpu_ranks: int = 1  # number of ranks without GPUs
    prior_starts: int = 0  # how often a scheduler has started this job before

    @classmethod
    def resolve(cls, config: Config | None, cli: Mapping[str, Any]) -> LaunchSpec:
        """Options of the command line override those of the recipe; None means not given."""
        known: dict[str, Any] = {}
        if config is not None:
            known = {each.name: getattr(config.launch, each.name) for each in fields(LaunchOptions)}
            known |= {name: getattr(config, name) for name in ("resume", "device", "port", "env", "fallback")}
            known["grace"] = max(GRACE, config.checkpoint.grace or 0.0)
        return cls.from_json(known | {name: value for name, value in cli.items() if value is not None})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LaunchSpec:
        parsers = {name: option.parse for name, (option, _) in options_of(LaunchSpec).items() if option.parse}
        parsed = {name: parsers[name](values[name]) for name in parsers if values.get(name) is not None}
        return cls(**{**values, **parsed})

    @property
    def node_range(self) -> NodeRange:
        return self.nodes or NodeRange(1, 1)
