"""Checks the NVIDIA GPUs of this machine with `nvidia-smi`.

The driver is asked instead of CUDA: this works where CUDA cannot be initialized, and uses no GPU memory. Only GPUs that
CUDA_VISIBLE_DEVICES leaves to this process are judged.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from paceline.text import format_bytes, plural
from paceline.tools.doctor.finding import Finding, Status, graded

NOT_FOUND, TIMED_OUT = 127, 124  # exit statuses of a shell and of timeout(1)

_TEXTS = ("index", "name", "uuid", "compute_mode", "mig.mode.current", "driver_version", "compute_cap")
_NUMBERS = (  # in the order of the fields of Gpu
    "memory.total", "memory.used", "pcie.link.width.current", "pcie.link.width.max",
    "ecc.errors.uncorrected.volatile.total", "temperature.gpu", "clocks_throttle_reasons.active",
)  # fmt: skip
_FORMAT = "--format=csv,noheader,nounits"
_APP = re.compile(r"^(\S+), (\d+), (.*), (.*)$", re.MULTILINE)
_FAULT = re.compile(r"\[(GPU requires reset|GPU is lost|Unknown Error)\]")
_THROTTLED = {0x8: "hardware slowdown", 0x20: "too hot", 0x40: "too hot (hardware limit)", 0x80: "power brake"}
_FREE = 0.8  # of the memory; the driver itself uses less than 1 GiB
_NVLINK_BOARD = re.compile(r"SXM|HBM3|[HB][23]00$")  # models that are always connected by NVLink, unlike PCIe cards
_FAILURES = ("version mismatch", "couldn't communicate", "Unknown Error", "did not answer")  # messages of nvidia-smi


class Answer(NamedTuple):
    status: int
    output: str  # stdout and stderr


Run = Callable[[Sequence[str]], Answer]


@dataclass(frozen=True)
class Gpu:
    """A number is None if this model does not report it, or not to this user."""

    index: int
    name: str
    uuid: str = ""
    compute_mode: str = "Default"
    is_mig: bool = False
    driver: str = ""
    capability: tuple[int, ...] = ()  # (9, 0)
    fault: str = ""
    memory: int | None = None  # MiB
    used: int | None = None
    width: int | None = None  # of the PCIe link
    max_width: int | None = None
    ecc_errors: int | None = None  # uncorrected, since the driver was loaded
    temperature: int | None = None
    throttle: int | None = None  # bits: those of _THROTTLED, and harmless ones


class GpuProcess(NamedTuple):
    uuid: str  # of the GPU
    pid: int
    name: str
    memory: int | None  # MiB


@dataclass(frozen=True)
class GpuFacts:
    gpus: tuple[Gpu, ...] = ()  # those that CUDA_VISIBLE_DEVICES leaves
    processes: tuple[GpuProcess, ...] = ()
    paths: Mapping[tuple[int, int], str] = field(default_factory=dict)  # between two GPUs: NV18, PIX, PHB, SYS, …
    links: Mapping[int, tuple[bool, ...]] = field(default_factory=dict)  # of a GPU: whether each NVLink is active
    failure: Answer | None = None  # of nvidia-smi
    has_driver: bool = False  # loaded
    has_hardware: bool = False  # on the PCI bus
    has_amd: bool = False
    number: int = 0  # of all GPUs


def run(command: Sequence[str], seconds: float = 5.0) -> Answer:
    """Run a command. One that does not end is left behind: inside a hanging driver it cannot be killed."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return Answer(NOT_FOUND, f"{command[0]}: {error.strerror}")
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(1)
        assert process.stdout is not None
        process.stdout.close()
        return Answer(TIMED_OUT, f"{command[0]} did not answer within {seconds:g} s")
    return Answer(process.returncode, output)


def read(run: Run = run, root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> GpuFacts:
    vendors = {path.read_text().strip() for path in root.glob("sys/bus/pci/devices/*/vendor")}
    machine = GpuFacts(
        has_driver=(root / "proc/driver/nvidia/version").exists(),
        has_hardware="0x10de" in vendors,
        has_amd=shutil.which("rocm-smi", path=environment.get("PATH")) is not None,
    )
    answer, fields = _query(run)
    every = _parse(fields, answer.output) if answer.status == 0 else []
    if not every:
        return replace(machine, failure=answer)
    gpus = tuple(gpu for gpu in every if _is_visible(gpu, environment.get("CUDA_VISIBLE_DEVICES")))
    apps = run(["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", _FORMAT]).output
    several = len(gpus) > 1
    return replace(
        machine,
        gpus=gpus,
        number=len(every),
        processes=tuple(
            GpuProcess(uuid, int(pid), name, _number(used)) for uuid, pid, name, used in _APP.findall(apps)
        ),
        paths=_parse_paths(run(["nvidia-smi", "topo", "-m"]).output) if several else {},
        links=_parse_links(run(["nvidia-smi", "nvlink", "-s"]).output) if several else {},
    )


def _query(run: Run) -> tuple[Answer, list[str]]:
    """Ask for the fields that this driver knows: an unknown one fails the whole query."""
    fields = [*_TEXTS, *_NUMBERS]
    while True:
        answer = run(["nvidia-smi", f"--query-gpu={','.join(fields)}", _FORMAT])
        unknown = re.search(r'Field "(\S+)" is not a valid field', answer.output)
        if unknown is None or unknown[1] not in fields:
            return answer, fields
        fields.remove(unknown[1])


def _is_visible(gpu: Gpu, setting: str | None) -> bool:
    # The name of a MIG instance does not tell its GPU. CUDA may number GPUs of different models in another order.
    return setting is None or any(
        entry == str(gpu.index)
        or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))
        or (entry.startswith("MIG-") and gpu.is_mig)
        for entry in map(str.strip, setting.split(","))
    )


def _parse(fields: Sequence[str], output: str) -> list[Gpu]:
    found = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(fields) or not cells[0].isdigit():
            continue  # a warning
        row = dict.fromkeys((*_TEXTS, *_NUMBERS), "") | dict(zip(fields, cells, strict=True))
        index, name, uuid, mode, mig, driver, capability = (row[key] for key in _TEXTS)
        numbers = [_number(row[key]) for key in _NUMBERS]
        version = tuple(map(int, capability.split("."))) if re.fullmatch(r"\d+\.\d+", capability) else ()
        fault = "".join(_FAULT.findall(line)[:1])
        found.append(Gpu(int(index), name, uuid, mode, mig == "Enabled", driver, version, fault, *numbers))
    return found


def _number(text: str) -> int | None:
    """`81559`, `0x0000000000000004`; None for `[N/A]`, `[Not Supported]`, `[Insufficient Permissions]`."""
    with suppress(ValueError):
        return int(text, 0)
    return None


def _parse_paths(output: str) -> dict[tuple[int, int], str]:
    """The upper half of the matrix that `nvidia-smi topo -m` prints, with an underlined head even in a pipe."""
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines()]
    names = next((row for row in rows if row[:1] == ["GPU0"] and "X" not in row), [])
    matrix = {row[0]: dict(zip(names, row[1:], strict=False)) for row in rows if "X" in row}
    gpus = [name for name in names if re.fullmatch(r"GPU\d+", name) and name in matrix]
    return {(int(a[3:]), int(b[3:])): matrix[a][b] for n, a in enumerate(gpus) for b in gpus[n + 1 :]}


def _parse_links(output: str) -> dict[int, tuple[bool, ...]]:
    found: dict[int, tuple[bool, ...]] = {}
    gpu = -1
    for line in output.splitlines():
        if head := re.match(r"GPU (\d+):", line):
            gpu = int(head[1])
        elif re.search(r"Link \d+:|all links are inactive", line, re.IGNORECASE):
            found[gpu] = (*found.get(gpu, ()), "inactive" not in line.lower())
    return found


def check(facts: GpuFacts) -> list[Finding]:
    amd = [Finding("AMD GPUs", "ok", "rocm-smi is installed; checks of AMD GPUs are limited")] if facts.has_amd else []
    if not facts.gpus:
        return [*amd, *([] if amd and not facts.has_hardware else [_absence(facts)])]
    links = [_links(facts)] if len(facts.gpus) > 1 else []
    return [*amd, _models(facts.gpus), *_occupation(facts), *_health(facts.gpus), *links]


def _absence(facts: GpuFacts) -> Finding:
    if facts.failure is None:
        return graded("GPUs", "warn", "CUDA_VISIBLE_DEVICES hides all GPUs", "hidden")
    status, output = facts.failure
    message = output.strip().partition("\n")[0]
    if not facts.has_driver and not facts.has_hardware:
        return Finding("GPUs", "ok", "no GPU: training uses the CPU")
    if "No devices were found" in output or (status == NOT_FOUND and facts.has_driver):
        what = f"the NVIDIA driver is loaded, but no GPU is accessible ({message})"
        return graded("GPUs", "warn", what, "not accessible")
    if status == NOT_FOUND:
        return graded("GPUs", "warn", "an NVIDIA GPU is installed, but no driver is loaded", "no driver")
    case = next((part for part in _FAILURES if part in output), "nvidia-smi failed")
    return graded("GPUs", "fail", f"nvidia-smi failed: {message}", case)


def _models(gpus: Sequence[Gpu]) -> Finding:
    kinds: dict[str, list[int]] = {}
    for gpu in gpus:
        kinds.setdefault(f"{gpu.name} ({_size(gpu.memory)}{', MIG' * gpu.is_mig})", []).append(gpu.index)
    what = ", ".join(f"{len(indices)} × {kind}" for kind, indices in kinds.items())
    most = max(kinds.values(), key=len)
    return graded("GPUs", "ok" if len(kinds) == 1 else "warn", what, "different", most=",".join(map(str, most)))


def _size(memory: int | None) -> str:
    return "memory unknown" if memory is None else format_bytes(memory * 2**20)


def _occupation(facts: GpuFacts) -> list[Finding]:
    # Memory and processes of a GPU with MIG belong to all of its instances, which do not affect each other.
    gpus = {gpu.uuid: gpu for gpu in facts.gpus if not gpu.is_mig}
    others = [each for each in facts.processes if each.uuid in gpus]
    free = {gpu.index: 1 - gpu.used / gpu.memory for gpu in gpus.values() if gpu.memory and gpu.used is not None}
    users = [f"GPU {gpus[each.uuid].index}: {each.name} (pid {each.pid}, {_size(each.memory)})" for each in others]
    full = [f"GPU {index}: {share:.0%} free" for index, share in free.items() if share < _FREE]
    pids = " ".join(dict.fromkeys(str(each.pid) for each in others))
    return [
        _judge("GPU processes", "warn", users, "no other processes", pids=pids),
        _judge("GPU memory", "warn", full, f"at least {min(free.values(), default=1):.0%} free"),
    ]


def _judge(check: str, status: Status, bad: Sequence[str], good: str, pids: str = "") -> Finding:
    return graded(check, status if bad else "ok", "; ".join(bad) or good, pids=pids)


def _health(gpus: Sequence[Gpu]) -> list[Finding]:
    modes, narrow, errors, slow = [], [], [], []
    for gpu in gpus:
        if gpu.compute_mode.startswith(("Exclusive", "Prohibited")):
            modes.append(f"GPU {gpu.index}: {gpu.compute_mode}")
        if 0 < (gpu.width or 0) < (gpu.max_width or 0):  # not the generation: an idle link falls back to the first
            narrow.append(f"GPU {gpu.index}: x{gpu.width} instead of x{gpu.max_width}")
        if gpu.fault or gpu.ecc_errors:
            errors.append(f"GPU {gpu.index}: {gpu.fault or f'{gpu.ecc_errors} uncorrected ECC errors'}")
        if reasons := [text for bit, text in _THROTTLED.items() if (gpu.throttle or 0) & bit]:
            slow.append(f"GPU {gpu.index}: {', '.join(reasons)}, {gpu.temperature} °C")
    mode_status: Status = "fail" if any("Prohibited" in mode for mode in modes) else "warn"
    return [
        _judge("compute mode", mode_status, modes, "default"),
        _judge("PCIe", "warn", narrow, "all links have full width"),
        _judge("GPU errors", "fail", errors, "no uncorrected ECC errors"),
        _judge("GPU clocks", "warn", slow, "not throttled"),
    ]


def _links(facts: GpuFacts) -> Finding:
    indices = {gpu.index for gpu in facts.gpus}
    kinds = Counter(path for pair, path in facts.paths.items() if indices >= set(pair))
    good = ", ".join(f"{kind} between {plural(count, 'pair')}" for kind, count in sorted(kinds.items()))
    if not kinds:
        good = "unknown: nvidia-smi topo -m reports nothing"
    elif not any(kind.startswith("NV") for kind in kinds):
        good = f"none: GPUs communicate over PCIe ({good})"
    # PCIe cards without a bridge have inactive links, too.
    is_connected = any(any(links) for links in facts.links.values())
    inactive = [
        f"GPU {gpu.index}: {f'{links.count(False)} of {len(links)}' if any(links) else 'all'} links inactive"
        for gpu in facts.gpus
        if not gpu.is_mig and not all(links := facts.links.get(gpu.index, ()))
        and (is_connected or _NVLINK_BOARD.search(gpu.name))
    ]  # fmt: skip
    return _judge("NVLink", "warn", inactive, good)
