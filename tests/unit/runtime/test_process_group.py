"""Requests that cannot work are refused before any connection is tried."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as torch_dist

from paceline.errors import WorldError
from paceline.runtime import process_group


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
