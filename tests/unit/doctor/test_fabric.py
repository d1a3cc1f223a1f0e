"""Files of /sys as InfiniBand and RoCE ports have them, in a folder of the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.doctor import fabric
from paceline.doctor.finding import Finding

NDR, HDR, ROCE = "400 Gb/sec (4X NDR)", "200 Gb/sec (4X HDR)", "100 Gb/sec (4X EDR)"
UP, DOWN, INIT = ("4: ACTIVE", "5: LinkUp"), ("1: DOWN", "3: Disabled"), ("2: INIT", "5: LinkUp")
POLLING = ("1: DOWN", "2: Polling")
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Sun Mar 23\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.20  Release Build\n"


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def port(root: Path, device: str, state: tuple[str, str] = UP, rate: str = NDR, layer: str = "InfiniBand") -> None:
    for name, text in (("state", state[0]), ("phys_state", state[1]), ("rate", rate), ("link_layer", layer)):
        write(root, f"sys/class/infiniband/{device}/ports/1/{name}", f"{text}\n")


def judged(root: Path, gpus: int = 0, several_hosts: bool = True, hca: str = "") -> dict[str, Finding]:
    facts = fabric.read(root, {"NCCL_IB_HCA": hca})
    return {each.check: each for each in fabric.check(facts, gpus, several_hosts)}


def test_a_machine_without_devices_is_fine(tmp_path: Path) -> None:
    assert judged(tmp_path, gpus=8) == {"InfiniBand": Finding("InfiniBand", "ok", "none")}
    assert all(each.status == "ok" for each in fabric.check(fabric.read(), 0, False))


def test_active_ports_of_the_same_rate_are_fine(tmp_path: Path) -> None:
    for number in range(8):
        port(tmp_path, f"mlx5_{number}")
    port(tmp_path, "mlx5_8", DOWN, ROCE, "Ethernet")  # of the management network
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    found = judged(tmp_path, gpus=8)
    assert found["InfiniBand"] == Finding("InfiniBand", "ok", f"8 active ports, {NDR}")
    assert found["GPUDirect RDMA"] == Finding("GPUDirect RDMA", "ok", "nvidia_peermem")


def test_a_port_that_is_down_beside_active_ones_is_a_warning_until_it_is_excluded(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_1", POLLING)
    found = judged(tmp_path)["InfiniBand"]
    assert (found.status, found.what) == ("warn", "mlx5_1:1 is DOWN (Polling)")
    assert found.fix.endswith("export NCCL_IB_HCA='=mlx5_0:1'")
    assert judged(tmp_path, hca="=mlx5_0:1")["InfiniBand"].status == "ok"


@pytest.mark.parametrize("layer", ["InfiniBand", "Ethernet"])
def test_only_ports_that_are_down_are_a_warning_with_several_hosts(tmp_path: Path, layer: str) -> None:
    port(tmp_path, "mlx5_0", POLLING, layer=layer)
    port(tmp_path, "mlx5_1", POLLING, layer=layer)
    (found,) = judged(tmp_path, gpus=8).values()
    assert found.status == "warn" and found.what.startswith("mlx5_0:1 is DOWN (Polling), mlx5_1:1")
    assert all(each.status == "ok" for each in judged(tmp_path, gpus=8, several_hosts=False).values())


def test_a_port_that_waits_for_a_subnet_manager_says_so(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", INIT)
    found = judged(tmp_path)["InfiniBand"]
    assert found.status == "warn" and "subnet manager" in found.fix


def test_different_rates_are_a_warning_but_not_between_infiniband_and_ethernet(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_1", rate=ROCE, layer="Ethernet")
    assert judged(tmp_path)["InfiniBand"].status == "ok"
    port(tmp_path, "mlx5_2", rate=HDR)
    found = judged(tmp_path)["InfiniBand"]
    assert (found.status, found.what) == ("warn", f"mlx5_0:1: {NDR}, mlx5_2:1: {HDR}")
    assert judged(tmp_path, hca="^=mlx5_2")["InfiniBand"].status == "ok"


def test_ethernet_cards_are_judged_only_with_several_hosts(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", rate=ROCE, layer="Ethernet")
    port(tmp_path, "mlx5_1", DOWN, rate=ROCE, layer="Ethernet")
    assert judged(tmp_path, gpus=1, several_hosts=False) == {"InfiniBand": Finding("InfiniBand", "ok", "none")}
    assert {name: each.status for name, each in judged(tmp_path, gpus=1).items()} == {
        "RoCE": "warn",
        "GPUDirect RDMA": "warn",
    }


@pytest.mark.parametrize(
    ("module", "kernel", "status"),
    [(PROPRIETARY, "6.8.0-45-generic", "warn"), (OPEN, "6.8.0-45-generic", "ok"), (OPEN, "4.18.0-553.el8", "warn")],
)
def test_gpu_memory_is_reached_through_peermem_or_by_open_drivers_of_a_new_kernel(
    tmp_path: Path, module: str, kernel: str, status: str
) -> None:
    port(tmp_path, "mlx5_0")
    write(tmp_path, "proc/driver/nvidia/version", module)
    write(tmp_path, "proc/sys/kernel/osrelease", f"{kernel}\n")
    found = judged(tmp_path, gpus=8, several_hosts=False)["GPUDirect RDMA"]
    assert found.status == status
    assert status == "ok" or found.fix == "sudo modprobe nvidia_peermem"
    assert "GPUDirect RDMA" not in judged(tmp_path, gpus=0)
    (tmp_path / "sys/module/nv_peer_mem").mkdir(parents=True)
    assert judged(tmp_path, gpus=8)["GPUDirect RDMA"].status == "ok"


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ("", ["mlx5_0:1", "mlx5_1:1", "mlx5_10:1"]),
        ("mlx5", ["mlx5_0:1", "mlx5_1:1", "mlx5_10:1"]),
        ("mlx5_1", ["mlx5_1:1", "mlx5_10:1"]),  # a prefix
        ("=mlx5_1", ["mlx5_1:1"]),
        ("=mlx5_0:1,mlx5_10:1", ["mlx5_0:1", "mlx5_10:1"]),
        ("=mlx5_0:2", []),
        ("^mlx5_1", ["mlx5_0:1"]),
        ("^=mlx5_1", ["mlx5_0:1", "mlx5_10:1"]),
    ],
)
def test_ports_are_selected_as_nccl_does(tmp_path: Path, setting: str, allowed: list[str]) -> None:
    for device in ("mlx5_0", "mlx5_1", "mlx5_10"):
        port(tmp_path, device)
    assert [each.name for each in fabric.read(tmp_path, {"NCCL_IB_HCA": setting}).ports] == allowed


def test_devices_of_other_networks_are_not_judged(tmp_path: Path) -> None:
    port(tmp_path, "rdmap0s6", rate=ROCE, layer="Unspecified")  # EFA
    assert judged(tmp_path, gpus=8)["InfiniBand"].what == "none"


@pytest.mark.parametrize(("layer", "state", "counts"), [
    ("InfiniBand", UP, True), ("InfiniBand", POLLING, False), ("Ethernet", UP, False),
])  # fmt: skip
def test_only_an_active_port_of_infiniband_makes_a_machine_have_it(
    tmp_path: Path, layer: str, state: tuple[str, str], counts: bool
) -> None:
    port(tmp_path, "mlx5_0", state, layer=layer)
    assert fabric.read(tmp_path, {}).has_infiniband is counts
