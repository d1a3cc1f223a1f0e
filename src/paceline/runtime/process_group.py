"""Initializes and destroys the default process group.

A group that the user initialized is used as it is and never destroyed. One that paceline initialized is destroyed when
the process exits, also after an error.

The TCPStore in which the ranks of a job find each other authenticates nobody, so it should listen on one address.
torch's own listens on all: the process that hosts it opens one on a socket of its own first, which a store that torch
opens at that port shares (`multi_tenant`).
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch._C._distributed_c10d import HashStore, TCPStore

from paceline.errors import WorldError
from paceline.log import Log
from paceline.runtime import device as devices
from paceline.runtime import environment
from paceline.runtime.environment import RankInfo
from paceline.runtime.network import LOOPBACK, is_loopback, listen, own_addresses_of
from paceline.runtime.processes import before_shutdown, keep_gloo_from_preempting, wait_until_idle

FIRST_STEP_SECONDS = 1800.0  # timeout until the first step is done: it compiles, and waits for the slowest import

# Private, but in torch since 2.2; there is no public equivalent.
_set_timeout = torch_dist.distributed_c10d._set_pg_timeout

_initialized_here = False  # paceline initialized torch's global group
_hosted_store: TCPStore | None = None  # until the group is destroyed; a second attempt to initialize it shares it
_is_single = False  # it failed to, and this process continued as a single rank


@dataclass(frozen=True)
class World:
    """The rank and the device of this process, and the backend of the process group."""

    rank_info: RankInfo
    device: torch.device
    backend: str  # "" with one rank

    @property
    def size(self) -> int:
        return self.rank_info.world

    @property
    def is_main(self) -> bool:
        return self.rank_info.is_main


def current_rank_info() -> RankInfo:
    """From the process group if it is initialized, else from the launcher's environment, else a single rank."""
    launched = None if _is_single else environment.read_rank_info()
    if not torch_dist.is_initialized():
        return launched or RankInfo()
    rank, world = torch_dist.get_rank(), torch_dist.get_world_size()
    if launched is not None and (launched.rank, launched.world) == (rank, world):
        return launched
    # A group that the user initialized (spawn, tcp://): assume a single node.
    return RankInfo(rank, world, local_rank=rank, local_world=world)


def init_world(
    *,
    device: str | int | torch.device | None = None,
    backend: str | None = None,
    timeout: float = FIRST_STEP_SECONDS,
    fallback: bool = False,
) -> World:
    """Use the process group if it is initialized, else initialize it if there are several ranks."""
    rank_info = current_rank_info()
    chosen = devices.choose_device(device, rank_info)
    devices.activate(chosen)
    before_shutdown()
    if rank_info.world == 1 or torch_dist.is_initialized():
        keep_gloo_from_preempting()
        if rank_info.world > 1 and not _initialized_here:  # the user's group, which the script may destroy or not
            atexit.unregister(wait_until_idle)
            atexit.register(wait_until_idle)
        return World(rank_info, chosen, torch_dist.get_backend() if rank_info.world > 1 else "")
    if environment.rendezvous_address() is None:
        raise WorldError(
            "bad-environment",
            f"RANK and WORLD_SIZE are set (rank {rank_info.rank} of {rank_info.world}), "
            "but MASTER_ADDR and MASTER_PORT are missing.",
            fix="let a launcher set all four: paceline launch -n 2 script.py",
        )
    name = backend or default_backend(chosen)
    try:
        _require_available(name, chosen)
        _init(name, rank_info, timeout)
    except Exception as error:
        if not fallback:
            if isinstance(error, WorldError):
                raise
            raise _init_error(name, rank_info, error) from error
        return _fall_back(name, rank_info, chosen, timeout, error)
    return World(rank_info, chosen, name)


def default_backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _require_available(backend: str, device: torch.device) -> None:
    """Before any connection is tried: torch would report it as a failed one."""
    if not torch_dist.is_backend_available(backend):
        what, fix = f"Backend {backend} is not part of this torch ({torch.__version__})", "install a build that has it"
    elif backend == "nccl" and device.type != "cuda":
        what, fix = f"Backend nccl needs a GPU on each rank, and this rank uses {device}", 'set device="cuda"'
    else:
        return
    raise WorldError("no-backend", f"{what}.", fix=f"{fix}; or omit backend: it is nccl on GPUs and gloo on CPUs")


def _init(backend: str, rank_info: RankInfo, timeout: float) -> None:
    """`timeout` is for the rendezvous; the first step has at least FIRST_STEP_SECONDS."""
    # Like env://, but without its variables: mpirun and srun do not set them.
    torch_dist.init_process_group(
        backend,
        init_method=f"tcp://{_rendezvous(rank_info)}",
        rank=rank_info.rank,
        world_size=rank_info.world,
        timeout=timedelta(seconds=timeout),
    )
    keep_gloo_from_preempting()
    _set_timeout(timedelta(seconds=max(timeout, FIRST_STEP_SECONDS)), torch_dist.group.WORLD)
    if backend == "nccl":  # it connects in the first collective: only then is it known to work
        torch_dist.all_reduce(torch.zeros(1, device="cuda"))
    _destroy_at_exit()


def _rendezvous(rank_info: RankInfo) -> str:
    """The address of the store, which rank 0 opens first if it hosts it."""
    global _hosted_store
    host, port = environment.rendezvous_endpoint() or (LOOPBACK, 0)
    is_hosted, is_local = environment.has_agent_store(), environment.is_on_one_machine(rank_info)
    if is_local and sys.platform == "linux":  # gloo and NCCL open ports too
        for name, value in environment.interfaces("lo").items():
            os.environ.setdefault(name, value)
    if is_local and not is_hosted:
        host = LOOPBACK
    if rank_info.rank == 0 and not is_hosted and _hosted_store is None:
        _hosted_store = open_store_at(host, port)
    return f"{LOOPBACK}:{port}" if host == LOOPBACK else environment.rendezvous_address() or ""


def init_single(device: torch.device) -> None:
    """A group of a single rank, for parts of torch that need a group. It opens no port."""
    if not torch_dist.is_initialized():
        torch_dist.init_process_group(default_backend(device), store=HashStore(), rank=0, world_size=1)
        _destroy_at_exit()


def _destroy_at_exit() -> None:
    global _initialized_here
    _initialized_here = True
    before_shutdown()
    atexit.register(destroy)


def _fall_back(backend: str, rank_info: RankInfo, device: torch.device, timeout: float, error: Exception) -> World:
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()
    log = Log(rank_info.rank, every_rank=True)
    prefix = f"[rank {rank_info.rank}] fallback:"
    if backend != "gloo":
        log.warning(f"{prefix} {backend} failed to initialize ({_first_line(error)}); continuing with gloo")
        try:
            _init("gloo", rank_info, timeout)
        except Exception as second:
            error = second
        else:
            return World(rank_info, device, "gloo")
    failed = f"{prefix} the process group failed to initialize"
    if not rank_info.is_main:
        log.warning(f"{failed}; rank 0 continues as a single rank, this rank exits")
        raise SystemExit(0)
    log.warning(f"{failed} ({_first_line(error)}); continuing as a single rank")
    global _is_single
    _is_single = True
    return World(RankInfo(), device, "")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _init_error(backend: str, rank_info: RankInfo, error: Exception) -> WorldError:
    address = environment.rendezvous_address()
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        return WorldError("port-in-use", f"Rank {rank_info.rank} can't listen on {address}: the port is in use.")
    return WorldError(
        "start-failed",
        f"Rank {rank_info.rank} of {rank_info.world} failed to initialize {backend} at {address}: "
        f"{_first_line(error)}.",
    )


def shorten_timeout(seconds: float) -> None:
    """Set the timeout of later collectives, once the first step is done. A group that the user initialized keeps its
    own, which then applies to all."""
    if _initialized_here:
        _set_timeout(timedelta(seconds=seconds), torch_dist.group.WORLD)
    if torch_dist.is_initialized():
        prepare_groups()


def prepare_groups() -> None:
    """Give the timeout of the world's group to device meshes and `new_group`, which torch creates with its default."""
    keep_gloo_from_preempting()
    if (timeout := timeout_of(None)) is not None:
        for group in torch_dist.distributed_c10d._world.pg_map:
            if group.group_desc.startswith(("mesh_", _OWN)):
                _set_timeout(timeout, group)


def timeout_of(group: torch_dist.ProcessGroup | None) -> timedelta | None:
    """The timeout of a group, by default of the world's; MPI has none."""
    found: Any = torch_dist.group.WORLD if group is None else group
    device = torch.device("cuda" if torch_dist.get_backend(found) == "nccl" else "cpu")
    options: Any = getattr(found._get_backend(device), "options", None)
    return options._timeout if options else None


_OWN = "paceline_"


def new_group(purpose: str) -> torch_dist.ProcessGroup:
    """A group of all ranks, for collectives that overlap with those of the world's group.

    Collective: must be called on every rank.
    """
    group: torch_dist.ProcessGroup = torch_dist.new_group(group_desc=_OWN + purpose)
    prepare_groups()
    return group


def new_cpu_group(timeout: float) -> torch_dist.ProcessGroup | None:
    """A gloo group of all ranks for messages in the background of training; None with one rank.

    Collective: must be called on every rank.
    """
    if not torch_dist.is_initialized() or torch_dist.get_world_size() == 1:
        return None
    group: torch_dist.ProcessGroup = torch_dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    keep_gloo_from_preempting()
    return group


def forget() -> None:
    """Reset this module in a forked process, which does not have the group of its parent."""
    global _initialized_here, _is_single, _hosted_store
    _initialized_here, _is_single, _hosted_store = False, False, None


def destroy() -> None:
    """Destroy the group if paceline initialized it. May be called more than once."""
    global _initialized_here, _hosted_store
    if _initialized_here and torch_dist.is_initialized():
        torch_dist.destroy_process_group()
        _hosted_store = None
    _initialized_here = False
    atexit.unregister(destroy)


_STORE_SECONDS = 300.0


def open_store(listener: socket.socket) -> TCPStore:
    """A store on an existing listener, which it takes over."""
    host, port = listener.getsockname()[:2]
    return TCPStore(
        LOOPBACK if host in ("0.0.0.0", "::") else host,
        port,
        is_master=True,
        timeout=timedelta(seconds=_STORE_SECONDS),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def open_store_at(host: str, port: int) -> TCPStore | None:
    """A store at the address of a host name. None if it is not clear at which address other machines look for it: the
    name has several or is that of another machine, or leads to loopback here only (Debian, in /etc/hosts)."""
    own = own_addresses_of(host)
    if len(own) != 1 or (is_loopback(own[0]) and own[0] != host):
        return None
    return open_store(listen(own[0], port))
