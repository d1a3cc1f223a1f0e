"""Joining a world and leaving it.

A process group that is already open belongs to whoever opened it: it is adopted and left open. One that paceline
opens is closed when the process ends, on an error too.
"""

from __future__ import annotations

import atexit
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as torch_dist
from torch._C._distributed_c10d import HashStore

from paceline.errors import WorldError
from paceline.log import Log
from paceline.runtime import device as devices
from paceline.runtime import environment
from paceline.runtime.environment import RankInfo

# The first step compiles, warms allocators and waits for the slowest node's import.
FIRST_STEP_SECONDS = 1800.0

# gloo's threads may need Python to let go of the last tensors; afterwards this process may have none (objects.keep).
_LETTING_GO = 0.02

# Whether this process's group was opened here, and whether it went on alone after a failed start. The group is
# torch's global state, and so are these facts about it.
_ours = False
_alone = False


@dataclass(frozen=True)
class World:
    """This process's place, the device it computes on, and how the ranks talk ("" for a world of one)."""

    rank_info: RankInfo
    device: torch.device
    backend: str

    @property
    def size(self) -> int:
        return self.rank_info.world

    @property
    def is_main(self) -> bool:
        return self.rank_info.is_main


def current_place() -> RankInfo:
    """From the open process group, else from the launcher's environment, else one rank alone."""
    told = None if _alone else environment.read_rank_info()
    if not torch_dist.is_initialized():
        return told or RankInfo()
    rank, world = torch_dist.get_rank(), torch_dist.get_world_size()
    if told is not None and (told.rank, told.world) == (rank, world):
        return told
    # A group of the user's own (spawn, tcp://): one node is the only thing it can be taken for.
    return RankInfo(rank, world, local_rank=rank, local_world=world)


def init_world(
    *,
    device: str | int | torch.device | None = None,
    backend: str | None = None,
    timeout: float = FIRST_STEP_SECONDS,
    fallback: bool = False,
) -> World:
    """Take this process's place in the world: adopt the open group, open the launcher's, or be one rank alone."""
    place = current_place()
    chosen = devices.choose_device(device, place)
    devices.activate(chosen)
    if torch_dist.is_initialized():
        return World(place, chosen, torch_dist.get_backend() if place.world > 1 else "")
    if place.world == 1:
        return World(place, chosen, "")
    _require_master(place)
    name = backend or default_backend(chosen)
    try:
        _open(name, place, timeout)
    except Exception as error:
        if not fallback:
            raise _failed_start(name, place, error) from error
        return _fall_back(name, place, chosen, timeout, error)
    return World(place, chosen, name)


def default_backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _open(backend: str, place: RankInfo, timeout: float) -> None:
    """Ranks have `timeout` to meet; once they have, the first step has longer."""
    # What env:// does, without its variables: mpirun and srun do not set them.
    torch_dist.init_process_group(
        backend,
        init_method=f"tcp://{environment.rendezvous_address()}",
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=timeout),
    )
    _set_timeout(max(timeout, FIRST_STEP_SECONDS))
    if backend == "nccl":
        # NCCL meets at the first collective, not before: whether it can start is known only then.
        torch_dist.all_reduce(torch.zeros(1, device="cuda"))
    global _ours
    _ours = True
    atexit.register(destroy)


def init_single(device: torch.device) -> None:
    """A group of one rank, for torch's parts that want one; it listens nowhere."""
    if torch_dist.is_initialized():
        return
    torch_dist.init_process_group(default_backend(device), store=HashStore(), rank=0, world_size=1)
    global _ours
    _ours = True
    atexit.register(destroy)


def _fall_back(backend: str, place: RankInfo, device: torch.device, timeout: float, error: Exception) -> World:
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()
    if backend != "gloo":
        _warn(f"fallback: {backend} could not start ({_first_line(error)}); going on with gloo", place)
        try:
            _open("gloo", place, timeout)
        except Exception as second:
            error = second
        else:
            return World(place, device, "gloo")
    if not place.is_main:
        _warn("fallback: the distributed start failed; rank 0 goes on alone, this rank ends", place)
        raise SystemExit(0)
    _warn(f"fallback: the distributed start failed ({_first_line(error)}); going on as one rank", place)
    global _alone
    _alone = True
    return World(RankInfo(), device, "")


def _warn(text: str, place: RankInfo) -> None:
    Log(place.rank, every_rank=True).warning(f"[rank {place.rank}] {text}")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _require_master(place: RankInfo) -> None:
    if environment.rendezvous_address() is None:
        raise WorldError(
            "bad-environment",
            f"RANK and WORLD_SIZE say that this is rank {place.rank} of {place.world}, "
            "but MASTER_ADDR and MASTER_PORT are not set.",
            why="the ranks have no address to meet at",
            fix="let a launcher set all four: paceline launch -n 2 script.py",
        )


def _failed_start(backend: str, place: RankInfo, error: Exception) -> WorldError:
    address = environment.rendezvous_address()
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        return WorldError(
            "port-in-use",
            f"Rank {place.rank} can't open {address}: another program listens there.",
            fix="set another port (port: 29501 in a recipe, MASTER_PORT elsewhere), or leave it out: on one node "
            "paceline launch finds a free one",
        )
    return WorldError(
        "start-failed",
        f"Rank {place.rank} of {place.world} could not join the group over {backend} at {address}: "
        f"{_first_line(error)}.",
        fix="check that every rank was started and that the address is reachable; "
        "fallback: true goes on with gloo or one rank",
    )


def shorten_timeout(seconds: float) -> None:
    """After the first step of a group of ours: from now on a rank that does not come is missed sooner."""
    if _ours:
        _set_timeout(seconds)


def _set_timeout(seconds: float) -> None:
    # torch has had this setter, with its underscore, since 2.2; it has no public twin.
    torch_dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), torch_dist.group.WORLD)


def new_cpu_group(timeout: float) -> torch_dist.ProcessGroup | None:
    """A group of all ranks over the CPU for work beside training, whose messages must not mix with training's.

    A matter of all ranks; None in a world of one.
    """
    if not torch_dist.is_initialized() or torch_dist.get_world_size() == 1:
        return None
    made: torch_dist.ProcessGroup = torch_dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    return made


def forget() -> None:
    """A forked process knows nothing of what its parent opened."""
    global _ours, _alone
    _ours = _alone = False


def destroy() -> None:
    """Close the group if paceline opened it. Safe to call twice, and where none is open."""
    global _ours
    if _ours and torch_dist.is_initialized():
        time.sleep(_LETTING_GO)
        torch_dist.destroy_process_group()
    _ours = False
    atexit.unregister(destroy)
