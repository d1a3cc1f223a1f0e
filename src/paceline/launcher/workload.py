"""What ranks run: a function, a recipe, or a script, module or program as with torchrun."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from paceline.diagnose.hang import rank_monitor
from paceline.errors import LaunchError
from paceline.runtime import environment


@dataclass(frozen=True)
class Target:
    kind: Literal["script", "module", "program"]
    name: str
    args: tuple[str, ...] = ()
    local_rank: bool = False  # pass --local_rank=N first, as torch.distributed.launch did

    def check(self) -> None:
        """Detect a missing script before any rank starts."""
        if self.kind == "script" and not Path(self.name).exists():
            raise LaunchError(
                "no-script",
                f"Script not found: {self.name}.",
                fix="check the path; use -m to run a module, --no-python to run any executable",
            )

    def run(self) -> None:
        """Run the target as `__main__`, with its arguments in `sys.argv`."""
        args = self.args
        if self.local_rank:
            info = environment.read_rank_info() or environment.RankInfo()
            args = (f"--local_rank={info.local_rank}", *args)
        if self.kind == "program":
            _replace_process(self.name, args)
        sys.argv = [self.name, *args]
        if self.kind == "module":
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            if Path(self.name).is_file():  # runpy adds a folder with a __main__.py itself
                sys.path.insert(0, str(Path(self.name).resolve().parent))
            runpy.run_path(str(Path(self.name).absolute()), run_name="__main__")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Target:
        return cls(values["kind"], values["name"], tuple(values["args"]), bool(values["local_rank"]))


def _replace_process(program: str, args: tuple[str, ...]) -> None:
    rank_monitor.abandon()
    try:
        os.execvp(program, [program, *args])
    except OSError as error:
        raise LaunchError("no-program", f"Cannot execute {program!r}: {error.strerror}.") from None


@dataclass(frozen=True)
class Workload:
    """A function for forked ranks, optionally with a target that can also run in fresh interpreters."""

    body: Callable[[], None]
    shared: str = ""  # a module that all ranks use: it is imported before they are forked
    prepare: Callable[[int], None] = lambda world: None  # called with the world size before ranks are forked
    target: Target | None = None
    recipe: Mapping[str, Any] | None = None  # of `paceline train`
    name: str = ""  # in process titles
    script_arguments: int = 0  # how many of the last command-line arguments belong to the user's script

    @classmethod
    def of_module(cls, module: str, *args: str, shared: str = "", **more: Any) -> Workload:
        """Calls `main(*args)` of a module; on other nodes, the module runs with these arguments."""

        def body() -> None:
            import_module(module).main(*args)

        return cls(body, shared or module, target=Target("module", module, args), **more)

    def preload(self) -> None:
        if self.shared:
            import_module(self.shared)

    @property
    def script(self) -> Path | None:
        return Path(self.target.name) if self.target is not None and self.target.kind == "script" else None


def reject_launch_on_rank(what: str) -> None:
    """Raise an error if a launcher has started this process as one of several ranks."""
    info = environment.read_rank_info() if environment.is_rank() else None
    if info is not None and info.world > 1:
        raise LaunchError("inside-a-rank", f"{what} was called on rank {info.rank} of {info.world}.")


def choose_ranks(asked: int | None, *, device: str | int | None, on_cpu: int) -> tuple[int, str]:
    """The number of ranks and the reason. `on_cpu` is the default without GPUs."""
    gpus = usable_gpus(device)
    if asked is not None:
        if not isinstance(asked, int) or isinstance(asked, bool) or asked < 1:
            raise LaunchError("bad-number", f"Invalid number of ranks: {asked!r}.", fix="use a positive integer")
        if gpus and asked > len(gpus):
            raise LaunchError(
                "more-ranks-than-gpus",
                f"{asked} ranks requested, but this machine has {len(gpus)} GPUs: {', '.join(gpus)}.",
                fix=f"request at most {len(gpus)} ranks, or CPU ranks: device: cpu in a recipe, --cpu for a script, "
                "CUDA_VISIBLE_DEVICES= in the environment elsewhere",
            )
        return asked, "requested"
    if gpus:
        return len(gpus), f"all GPUs: {', '.join(gpus)}"
    where = "device: cpu" if str(device) == "cpu" else "no GPU"
    return on_cpu, where


def usable_gpus(device: str | int | None) -> list[str]:
    """The GPUs that ranks may use; none if the CPU was requested. Does not initialize CUDA."""
    if str(device) == "cpu":
        return []
    from paceline.runtime.device import gpu_names

    return gpu_names()
