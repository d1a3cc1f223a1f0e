"""How ranks are launched: every option once, and the spec that they become.

A field with an `Option` is a flag of `paceline launch` and `paceline train` (cli/options.py makes their
signatures from it); a field of `LaunchOptions` is also a key of a recipe's `launch:`. `LaunchSpec.resolve` merges the
two. Dispatch, backends, node orders and the agent are handed the spec whole, so an option that is declared here
reaches all of them, on every node.

These are plain dataclasses: `paceline --help` and `paceline launch` must not wait for pydantic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

from paceline.errors import LaunchError

if TYPE_CHECKING:
    from paceline.config.recipe import Config

DEFAULT_PORT = 29500
GRACE = 30.0  # seconds that a SIGTERM leaves the ranks

MANUAL_NODES, REMOTE_NODES, SUPERVISION = "Several nodes by hand", "Several nodes from here", "Supervision"


class NodeRange(NamedTuple):
    """The fewest and the most nodes of a job."""

    fewest: int
    most: int

    @classmethod
    def match(cls, text: str) -> NodeRange | None:
        """`2` or `1:4`, whatever the numbers."""
        found = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", text, re.ASCII)
        return None if found is None else cls(int(found[1]), int(found[2] or found[1]))

    @classmethod
    def parse(cls, value: str | Sequence[int]) -> NodeRange:
        """As a person writes it, or as JSON holds it."""
        found = cls.match(value) if isinstance(value, str) else cls(*value)
        if found is None or not 1 <= found.fewest <= found.most:
            raise LaunchError("bad-number", f"--nodes {value!r} is no number of nodes.", fix="such as 2, or 1:4")
        return found

    def __str__(self) -> str:
        return str(self.most) if self.fewest == self.most else f"{self.fewest}:{self.most}"


class Endpoint(NamedTuple):
    """Where the launchers of several nodes connect."""

    host: str
    port: int

    @classmethod
    def match(cls, text: str) -> Endpoint | None:
        """`host`, `host:port` or `[address]:port`, whatever the host and the port are."""
        found = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::([0-9]{1,5}))?", text, re.ASCII)
        return None if found is None else cls(found[1] or found[2], int(found[3] or DEFAULT_PORT))

    @classmethod
    def parse(cls, value: str | Sequence[Any]) -> Endpoint:
        """As a person writes it, or as JSON holds it."""
        if not isinstance(value, str):
            return cls(*value)
        found = cls.match(value)
        host = r"[0-9A-Fa-f:.%]+" if value.startswith("[") else r"(?!-)[A-Za-z0-9_.-]{1,253}"
        if found is None or not re.fullmatch(host, found.host, re.ASCII) or not 0 < found.port < 65536:
            raise LaunchError(
                "no-master", f"--master {value!r} is no host, with or without a port.", fix="a host:29500"
            )
        return found


def parse_ranks(value: str | Sequence[int]) -> tuple[int, ...]:
    """Ranks as a person writes them (`0,2`), or as a recipe and JSON hold them."""
    if not isinstance(value, str):
        return tuple(value)
    if not re.fullmatch(r"[0-9]{1,6}(,[0-9]{1,6})*", value, re.ASCII):
        raise LaunchError("bad-number", f"--tee {value!r} is no list of ranks.", fix="such as --tee 0,2")
    return tuple(int(number) for number in value.split(","))


class Option(NamedTuple):
    """How a field of `LaunchSpec` is written."""

    flags: tuple[str, ...]
    help: str  # on the command line
    description: str = ""  # in the schema of recipes, where it differs from `help`
    panel: str | None = None  # of --help
    metavar: str | None = None
    ge: int | None = None
    gt: int | None = None  # checked in recipes only: the launcher names what it can't start
    parse: Callable[[Any], Any] | None = None  # text of a person's, or JSON


@cache
def options_of(kind: type) -> dict[str, tuple[Option, Any]]:
    """The fields of a dataclass that are options, by name, each with its type."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: (each, hint.__origin__)
        for name, hint in hints.items()
        for each in getattr(hint, "__metadata__", ())
        if isinstance(each, Option)
    }


@dataclass(frozen=True)
class LaunchOptions:
    """A recipe's `launch:`."""

    ranks: Annotated[
        int | None,
        Option(
            ("-n", "--ranks", "--nproc-per-node", "--nproc_per_node"),
            gt=0,
            help="number of ranks on each machine; else all GPUs, or on CPU 1 (launch) or 2 (train)",
            description="processes on each machine; without it all GPUs, else 2 CPU ranks",
        ),
    ] = None
    nodes: Annotated[
        NodeRange | None,
        Option(
            ("--nodes", "--nnodes"),
            parse=NodeRange.parse,
            panel=MANUAL_NODES,
            metavar="N | MIN:MAX",
            help="how many machines take part",
            description="machines: a number, or min:max",
        ),
    ] = None
    node_rank: Annotated[
        int | None,
        Option(
            ("--node-rank", "--node_rank"),
            ge=0,
            panel=MANUAL_NODES,
            help="which one this is; else the next free",
            description="which of them this is; else the next free one",
        ),
    ] = None
    master: Annotated[
        Endpoint | None,
        Option(
            ("--master", "--rdzv-endpoint", "--rdzv_endpoint"),
            parse=Endpoint.parse,
            panel=MANUAL_NODES,
            metavar="HOST[:PORT]",
            help="where they meet: the first one, at port 29500 unless said (and the next one for the ranks)",
            description="host[:port] of the first one, where they meet; port 29500",
        ),
    ] = None
    wait: Annotated[
        float,
        Option(
            ("--wait",),
            gt=0,
            panel=MANUAL_NODES,
            help="seconds in which the others have to come (600)",
            description="seconds in which the other machines have to come",
        ),
    ] = 600.0
    interface: Annotated[
        str | None,
        Option(
            ("--interface",),
            panel=MANUAL_NODES,
            help="that reaches the other machines; else it is found",
            description="network interface that reaches the others; else it is found",
        ),
    ] = None
    hosts: Annotated[
        str | None,
        Option(
            ("--hosts",),
            panel=REMOTE_NODES,
            metavar="A:4,B:4 | FILE",
            help="start it on these machines, by ssh",
            description="machines to start it on by ssh: a:4,b:4, or a hostfile",
        ),
    ] = None
    ssh: Annotated[
        str,
        Option(
            ("--ssh",),
            panel=REMOTE_NODES,
            metavar="'ssh -p 2222'",
            help="the ssh program with options",
            description="the ssh program, with options",
        ),
    ] = "ssh"
    python: Annotated[
        str | None,
        Option(
            ("--python",),
            panel=REMOTE_NODES,
            help="the interpreter on the other machines; else this one",
            description="interpreter on the other machines; else the same path as here",
        ),
    ] = None
    address: Annotated[
        str | None,
        Option(("--address",), panel=REMOTE_NODES, help="of this machine, as the others reach it"),
    ] = None
    slurm: Annotated[
        str | None,
        Option(
            ("--slurm",),
            panel=REMOTE_NODES,
            metavar="nodes=2,gpus=4,time=2h",
            help="submit it to SLURM, and follow",
            description="submit it to SLURM: nodes=2,gpus=4,time=2h",
        ),
    ] = None
    ray: Annotated[
        str | None,
        Option(
            ("--ray",),
            panel=REMOTE_NODES,
            metavar="auto | HOST:PORT",
            help="start it on a Ray cluster",
            description="start it on a Ray cluster: auto, or host:port",
        ),
    ] = None
    max_restarts: Annotated[
        int,
        Option(
            ("--max-restarts", "--max_restarts"),
            ge=0,
            panel=SUPERVISION,
            help="how often failed ranks are started again, from the newest good checkpoint",
            description="how often failed ranks are started again",
        ),
    ] = 0
    tee: Annotated[
        tuple[int, ...],
        Option(
            ("--tee",),
            parse=parse_ranks,
            panel=SUPERVISION,
            metavar="0,2",
            help="ranks that are shown, each line with its rank",
        ),
    ] = ()


@dataclass(frozen=True)
class LaunchSpec(LaunchOptions):
    """Everything that is known before ranks start."""

    rendezvous: Annotated[
        str | None,
        Option(
            ("--rdzv-backend", "--rdzv_backend"),
            panel=MANUAL_NODES,
            metavar="static | c10d",
            help="static: each says its --node-rank; c10d: numbers are given in the order of arrival",
        ),
    ] = None
    dry_run: Annotated[
        bool,
        Option(("--dry-run",), panel=REMOTE_NODES, help="show SLURM's batch script, and submit nothing"),
    ] = False
    k8s: Annotated[
        bool,
        Option(("--k8s",), panel=REMOTE_NODES, help="print a TrainJob and a JobSet for Kubernetes"),
    ] = False
    k8s_with: Annotated[
        str | None,
        Option(
            ("--k8s-with",),
            panel=REMOTE_NODES,
            metavar="image=IMAGE,gpus=4,…",
            help="also kind, name, namespace, cpu, memory, secret, claim=NAME:/PATH, restarts, grace",
        ),
    ] = None
    run: str | None = None  # name of the run folder; None leaves nothing behind
    resume: str | None = None  # auto: the newest run of that name; or the folder of a run or a checkpoint
    device: str | int | None = None
    port: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)  # variables that every rank must have
    grace: float = GRACE  # seconds that a SIGTERM leaves the ranks
    fresh: bool = False  # a new interpreter for each rank
    fallback: bool = False  # where ranks can't connect, continue as one
    default_cpu_ranks: int = 1  # ranks to choose where there is no GPU
    prior_starts: int = 0  # how often something else, a scheduler, has started this job before

    @classmethod
    def resolve(cls, config: Config | None, cli: Mapping[str, Any]) -> LaunchSpec:
        """What the command line leaves open, as None, is as the recipe says."""
        known: dict[str, Any] = {}
        if config is not None:
            known = {each.name: getattr(config.launch, each.name) for each in fields(LaunchOptions)}
            known |= {name: getattr(config, name) for name in ("resume", "device", "port", "env", "fallback")}
            known["grace"] = max(GRACE, config.checkpoint.grace or 0.0)
        return cls.from_json(known | {name: value for name, value in cli.items() if value is not None})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LaunchSpec:
        parsers = {name: option.parse for name, (option, _) in options_of(LaunchSpec).items() if option.parse}
        return cls(
            **{
                name: value if value is None or name not in parsers else parsers[name](value)
                for name, value in values.items()
            }
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def node_range(self) -> NodeRange:
        return self.nodes or NodeRange(1, 1)
