"""Requests that cannot work are refused before any connection is tried."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as torch_dist

from listening import listeners
from nodes import reserve_ports
from paceline.errors import LaunchError, WorldError
from paceline.runtime import process_group
from paceline.runtime.network import LOOPBACK, listen
from paceline.runtime.process_group import open_store_at


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of the second of two ranks, the first of which is never started."""
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("one_of_two")
@pytest.mark.parametrize("backend", ["nccl", "mpi"])
def test_a_backend_that_torch_or_the_device_lacks_is_named(backend: str) -> None:
    if backend == "mpi" and torch_dist.is_mpi_available():
        pytest.skip("this torch has MPI")
    with pytest.raises(WorldError, match=rf"world\.no-backend.*Backend {backend} .*\n.*omit backend"):
        process_group.init_world(device="cpu", backend=backend)


@pytest.mark.usefixtures("one_of_two")
@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_gpu_on_a_build_without_cuda_is_named_as_such(device: str) -> None:
    with pytest.raises(WorldError, match=r"world\.no-such-gpu.*built without CUDA"):
        process_group.init_world(device=device)


def test_a_store_listens_on_the_address_of_its_host_only() -> None:
    port = reserve_ports()
    store = open_store_at(LOOPBACK, port)
    assert store is not None and [each.address for each in listeners() if each.port == port] == [LOOPBACK]
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize("host", ["192.0.2.77", "no.such.host.invalid"])
def test_a_host_elsewhere_gives_no_store(host: str) -> None:
    assert open_store_at(host, reserve_ports()) is None


def test_a_port_in_use_is_named() -> None:
    with listen(LOOPBACK, None) as taken, pytest.raises(LaunchError, match=r"port-in-use.*Address already in use"):
        open_store_at(LOOPBACK, taken.getsockname()[1])
