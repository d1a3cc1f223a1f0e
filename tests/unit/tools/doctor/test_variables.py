"""Every rule of variables.toml is seen with a value that is wrong, and the facts behind some of them are tried out."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.runtime import environment
from paceline.tools.doctor import variables
from paceline.tools.doctor.finding import Finding
from paceline.tools.doctor.variables import VariableFacts

MACHINE = VariableFacts({}, interfaces=("lo", "eth0", "eth1", "docker0"), gpus=4, ranks=4, cores=16)


def judged(name: str, value: str, **facts: object) -> Finding:
    """With that variable alone."""
    (found,) = variables.check(replace(MACHINE, environment={name: value}, **facts))  # type: ignore[arg-type]
    return found


def checked(values: dict[str, str]) -> list[Finding]:
    return variables.check(VariableFacts(values, interfaces=("lo", "eth0"), gpus=0, ranks=1))


def test_an_environment_without_any_of_them_has_one_finding_that_is_ok() -> None:
    (found,) = checked({"HOME": "/root", "PATH": "/usr/bin", "NCCL_DEBUG": "", "LD_LIBRARY_PATH": ""})
    assert found.status == "ok" and "no variable is set" in found.what


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("NCCL_DEBUG", "INFO", "ok"),
        ("NCCL_DEBUG", "warn", "ok"),
        ("NCCL_DEBUG", "TRACE", "warn"),
        ("NCCL_DEBUG", "VERBOSE", "warn"),
        ("NCCL_P2P_DISABLE", "1", "warn"),
        ("NCCL_P2P_DISABLE", "0", "ok"),
        ("NCCL_P2P_DISABLE", "true", "warn"),  # has no effect
        ("NCCL_P2P_LEVEL", "NVL", "ok"),
        ("NCCL_P2P_LEVEL", "LOC", "warn"),
        ("NCCL_P2P_LEVEL", "nvlink", "warn"),
        ("NCCL_SHM_DISABLE", "1", "warn"),
        ("NCCL_SHM_DISABLE", "0", "ok"),
        ("NCCL_IB_DISABLE", "1", "ok"),  # there is no InfiniBand
        ("NCCL_NET_GDR_LEVEL", "LOC", "ok"),
        ("NCCL_IB_HCA", "mlx5_0,mlx5_1", "ok"),
        ("NCCL_IB_GID_INDEX", "3", "ok"),
        ("NCCL_ALGO", "Ring", "warn"),
        ("NCCL_PROTO", "Simple", "warn"),
        ("NCCL_BLOCKING_WAIT", "1", "warn"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1", "warn"),
        ("NCCL_TIMEOUT", "3600", "warn"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "warn"),
        ("TORCH_NCCL_BLOCKING_WAIT", "0", "ok"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "warn"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "ok"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "on", "fail"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "warn"),
        ("TORCH_DISTRIBUTED_DEBUG", "info", "ok"),
        ("TORCH_DISTRIBUTED_DEBUG", "1", "fail"),
        ("CUDA_LAUNCH_BLOCKING", "1", "warn"),
        ("CUDA_LAUNCH_BLOCKING", "0", "ok"),
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "ok"),
        ("CUDA_DEVICE_ORDER", "pci", "warn"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "ok"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:true", "fail"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False,max_split_size_mb:64", "ok"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:1", "fail"),
    ],
)
def test_a_value_is_judged(name: str, value: str, status: str) -> None:
    found = judged(name, value)
    assert found.status == status and found.what.startswith(f"{name}={value}: ")
    assert bool(found.why and found.fix) == (status != "ok")


def test_every_rule_can_be_used() -> None:
    for rule in variables.rules():
        re.compile(rule.accepts), re.compile(rule.value)
        assert rule.does and (not rule.judge or rule.judge in variables.JUDGES)
        assert rule.status == "ok" or rule.why
        assert not rule.only or hasattr(MACHINE, rule.only)
    assert {rule.judge for rule in variables.rules() if rule.judge} == set(variables.JUDGES)


def test_infiniband_that_is_turned_off_is_a_warning_where_there_is_some() -> None:
    found = judged("NCCL_IB_DISABLE", "1", has_infiniband=True)
    assert found.status == "warn" and found.fix == "unset NCCL_IB_DISABLE"
    assert judged("NCCL_IB_DISABLE", "0", has_infiniband=True).status == "ok"
    assert judged("NCCL_NET_GDR_LEVEL", "LOC", has_infiniband=True).status == "warn"


def test_what_to_set_instead_is_said() -> None:
    assert "timeout: SECONDS" in judged("NCCL_TIMEOUT", "1").fix
    assert "TORCH_NCCL_BLOCKING_WAIT" in judged("NCCL_BLOCKING_WAIT", "1").what
    assert "PYTORCH_ALLOC_CONF" in judged("PYTORCH_CUDA_ALLOC_CONF", "backend:native").what


@pytest.mark.parametrize(
    ("value", "status", "seen"),
    [
        ("eth", "ok", "eth0, eth1"),
        ("=eth0", "ok", "eth0"),
        ("=eth0,eth1", "ok", "eth0, eth1"),
        ("eth0:1", "ok", "eth0"),
        ("^docker", "ok", "eth0, eth1, lo"),
        ("^docker,lo", "ok", "eth0, eth1"),
        ("^=docker0,lo", "ok", "eth0, eth1"),
        ("=eth", "fail", "docker0, eth0, eth1, lo"),
        ("ib0", "fail", "no interface matches"),
        ("^docker,eth,lo", "fail", "no interface matches"),
    ],
)
def test_interfaces_of_nccl_are_prefixes_names_or_exclusions(value: str, status: str, seen: str) -> None:
    found = judged("NCCL_SOCKET_IFNAME", value)
    assert found.status == status and seen in found.what


def test_loopback_does_not_reach_other_hosts() -> None:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        assert judged(name, "lo").status == "ok"
        assert judged(name, "lo", several_hosts=True).status == "fail"
    found = judged("NCCL_SOCKET_IFNAME", "^docker", several_hosts=True)
    assert found.status == "warn" and found.fix == "export NCCL_SOCKET_IFNAME=^docker,lo"


def test_interfaces_of_gloo_are_exact_names() -> None:
    assert judged("GLOO_SOCKET_IFNAME", "eth0,eth1").status == "ok"
    found = judged("GLOO_SOCKET_IFNAME", "eth,eth1")
    assert found.status == "fail" and "no interface eth:" in found.what


@pytest.mark.parametrize(
    ("value", "status", "seen"),
    [
        ("0,1,2,3", "ok", "4 of 4 GPUs"),
        ("2, 1", "ok", "2 of 4 GPUs"),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "ok", "1 of 4 GPUs"),
        ("MIG-GPU-8932f937/1/0", "ok", "1 of 4 GPUs"),
        ("", "warn", "hides 4 GPUs"),
        ("-1", "warn", "hides 4 GPUs"),
        ("NoDevFiles", "warn", "hides 4 GPUs"),
        ("0,0", "fail", "repeated"),
        ("0,4", "fail", "invalid: 4"),
        ("0,,1", "fail", "invalid: "),
        ("all", "fail", "invalid: all"),
        ("9" * 5000, "fail", "invalid: "),
    ],
)
def test_visible_devices_are_compared_with_the_gpus(value: str, status: str, seen: str) -> None:
    found = judged("CUDA_VISIBLE_DEVICES", value)
    assert found.status == status and seen in found.what


def test_hidden_gpus_do_not_matter_where_there_are_none() -> None:
    for value in ("", "0,1"):
        found = judged("CUDA_VISIBLE_DEVICES", value, gpus=0)
        assert found.status == "ok" and "no GPU: training uses the CPU" in found.what


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_more_threads_than_the_share_of_a_rank_are_a_warning(name: str) -> None:
    assert judged(name, "4").status == "ok" and judged(name, "4,2").status == "ok"
    found = judged(name, "16")
    assert found.status == "warn" and "4 ranks on 16 cores" in found.what and found.fix == f"export {name}=4"
    assert judged(name, "2", ranks=32).fix == f"export {name}=1"
    assert judged(name, "many").status == judged(name, "0").status == "warn"


def test_threads_that_the_launcher_chose_are_fine() -> None:
    values = {"OMP_NUM_THREADS": "16", environment.LAUNCHED: "1"}
    assert [each.status for each in variables.check(replace(MACHINE, environment=values))] == ["ok"]


def test_the_threads_and_sockets_of_nccl_have_a_limit_together() -> None:
    def both(threads: str, sockets: str) -> Finding:
        values = {"NCCL_SOCKET_NTHREADS": threads, "NCCL_NSOCKS_PERTHREAD": sockets}
        (found,) = variables.check(replace(MACHINE, environment=values))
        return found

    assert both("8", "8").status == "ok"
    assert both("16", "8").status == "warn" and "64 sockets" in both("16", "8").what
    assert both("17", "1").status == both("auto", "1").status == "warn"
    assert judged("NCCL_NSOCKS_PERTHREAD", "65").status == "warn"


def test_variables_of_a_rank_without_a_launcher_are_left_over() -> None:
    stale = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    (found,) = variables.check(replace(MACHINE, environment=stale))
    assert found.status == "warn" and found.fix == "unset MASTER_ADDR MASTER_PORT RANK WORLD_SIZE"
    assert "waits for the others" in found.why


@pytest.mark.parametrize(
    "launcher", [environment.LAUNCHED, "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"]
)
def test_variables_of_a_rank_that_a_launcher_started_are_fine(launcher: str) -> None:
    values = {**environment.variables(environment.RankInfo(1, 2, 1, 2)), launcher: "1"}
    assert {each.status for each in variables.check(replace(MACHINE, environment=values))} == {"ok"}


def test_passwords_of_proxies_are_not_shown() -> None:
    secret = "http://me:s3cret@proxy:3128"
    for several_hosts in (False, True):
        found = judged("https_proxy", secret, several_hosts=several_hosts)
        assert "s3cret" not in str(found) and "https_proxy" in found.what
    assert judged("https_proxy", secret).status == "ok"
    assert judged("https_proxy", secret, several_hosts=True).status == "warn"
    values = {"http_proxy": secret, "no_proxy": "node1,node2"}
    assert variables.check(replace(MACHINE, environment=values, several_hosts=True))[0].status == "ok"


def test_values_of_variables_that_are_not_listed_are_not_shown() -> None:
    found = judged("NCCL_MY_PLUGIN_TOKEN", "s3cret")
    assert found.status == "ok" and "NCCL_MY_PLUGIN_TOKEN" in found.what and "s3cret" not in str(found)
    assert "s3cret" not in str(checked({"HF_TOKEN": "s3cret", "WANDB_API_KEY": "s3cret"}))


def test_long_and_unprintable_values_are_shown_in_one_short_line() -> None:
    assert len(judged("NCCL_IB_HCA", "mlx5_0," * 1000).what) < 300
    assert "\x1b" not in judged("NCCL_IB_HCA", "\x1b[31m\n").what


def test_cuda_libraries_in_the_library_path_are_a_warning(tmp_path: Path) -> None:
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "libcudnn_graph.so.9").touch()
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "libcuda.so.1").touch()  # of the driver, which torch does not bring
    (found,) = checked({"LD_LIBRARY_PATH": f"{tmp_path}/driver:{tmp_path}/cuda:{tmp_path}/missing:"})
    assert found.status == "warn" and f"CUDA libraries in {tmp_path}/cuda" in found.what and "unset" in found.fix
    assert checked({"LD_LIBRARY_PATH": f"{tmp_path}/driver"})[0].status == "ok"


def test_cuda_libraries_of_this_python_environment_are_torchs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libnccl.so.2").touch()
    assert checked({"LD_LIBRARY_PATH": str(tmp_path)})[0].status == "warn"
    monkeypatch.setattr(sys, "prefix", str(tmp_path.parent))
    assert checked({"LD_LIBRARY_PATH": str(tmp_path)})[0].status == "ok"


@pytest.mark.parametrize("package", ["torch", "paceline"])
def test_another_package_in_the_python_path_is_a_warning(tmp_path: Path, package: str) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    (found,) = checked({"PYTHONPATH": f"/nowhere:{tmp_path}"})
    assert found.status == "warn" and f"{tmp_path}/{package}" in found.what


def test_a_python_path_to_this_paceline_is_fine() -> None:
    source = Path(variables.__file__).parents[3]
    assert checked({"PYTHONPATH": str(source)})[0].status == "ok"


def test_a_preloaded_library_that_does_not_exist_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "libjemalloc.so.2").touch()
    assert checked({"LD_PRELOAD": f"{tmp_path}/libjemalloc.so.2 libtcmalloc.so"})[0].status == "ok"
    (found,) = checked({"LD_PRELOAD": f"{tmp_path}/libjemalloc.so.2:{tmp_path}/gone.so"})
    assert found.status == "warn" and f"no file {tmp_path}/gone.so" in found.what


def test_torch_refuses_what_is_called_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch import distributed

    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "1")
    with pytest.raises(ValueError, match="must be OFF, INFO, or DETAIL"):
        distributed.set_debug_level_from_env()
    with pytest.raises(ValueError, match="Expected 'True' or 'False'"):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:true")
    with pytest.raises(RuntimeError, match="Unable to find address for"):
        distributed.ProcessGroupGloo.create_device(interface="eth-none")
