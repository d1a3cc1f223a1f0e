"""Where a run trains: versions, devices and the command. Kept in the run folder, for people who look at it later."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import sys
from contextlib import suppress
from datetime import UTC, datetime

import torch

import paceline


def describe() -> dict[str, str]:
    found = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "paceline": paceline.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "host": socket.gethostname(),
        "CPU cores": str(os.cpu_count()),
    }
    return found | _gpus()


def _gpus() -> dict[str, str]:
    if not torch.cuda.is_initialized():  # other queries would initialize CUDA
        return {}
    found = {"GPU of rank 0": torch.cuda.get_device_name(), "GPUs of this node": str(torch.cuda.device_count())}
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
        with suppress(AttributeError, RuntimeError):  # a build without NCCL
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found
