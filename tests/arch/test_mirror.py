"""Unit tests mirror the source: the tests of `room/module.py` are in `tests/unit/room/test_module.py`."""

from __future__ import annotations

import ast
from pathlib import Path

import paceline

SOURCE = Path(paceline.__file__).parent
TESTS = Path(__file__).parents[1]
LOGIC = 60  # lines of code from which a module has logic of its own

# Modules whose behaviour shows only across processes or in a whole training, and the tests that have it.
ELSEWHERE = {
    "tools/cli/config": ["ranks/test_own_recipes", "ranks/test_passes"],
    "tools/cli/evaluate": ["ranks/test_own_recipes"],
    "tools/cli/runs": ["ranks/test_runs_command", "ranks/test_watch_command"],
    "tools/cli/sweep": ["ranks/test_sweep"],
    "tools/search/function_sweep": ["ranks/test_sweep"],
    "tools/search/recipe_trials": ["ranks/test_sweep"],
    "tools/bench/collective_times": ["ranks/test_bench_comm"],
    "tools/bench/recipe_run": ["ranks/test_bench_recipes"],
    "tools/cli/doctor": ["ranks/test_doctor_command"],
    "tools/cli/launch": ["ranks/test_launch_command", "ranks/test_several_nodes"],
    "tools/cli/train": ["ranks/test_launch_command", "ranks/test_own_recipes"],
    "tools/cli/main": ["ranks/test_launch_command"],
    "config/sections": ["contract/test_public_surface", "unit/config/test_recipe"],
    "data/predictions": ["ranks/test_evaluation"],
    "tools/cli/explain": ["faults/test_run_ends", "unit/diagnose/log_files/test_verdict"],
    "diagnose/hang/hang_advice": ["unit/diagnose/hang/test_hang_report"],
    "diagnose/hang/waits": ["unit/diagnose/hang/test_hang_report"],
    "tools/doctor/machine": ["ranks/test_doctor_command"],
    "train/cuda_graphs": ["unit/train/test_graph_step", "gpu/test_graph_on_gpu"],
    "train/features/gradient_hooks": ["ranks/test_gradient_hooks", "ranks/test_activation_hooks"],
    "train/checks/collective_order": ["ranks/test_module_order"],
    "data/same_reading": ["ranks/test_data_on_ranks"],
    "train/checks/preflight": ["ranks/test_preflight"],
    "train/checks/same_model": ["ranks/test_replicas", "ranks/test_preflight"],
    "launcher/backends/ray": ["system/test_ray"],
    "launcher/cluster/manual": ["ranks/test_several_nodes", "ranks/test_first_rank"],
    "launcher/cluster/node": ["ranks/test_several_nodes", "system/test_ssh_launch"],
    "launcher/function": ["ranks/test_launch_function", "ranks/test_notebook"],
    "launcher/local/agent": ["ranks/test_launch_command", "faults/test_deaths"],
    "launcher/local/interrupts": ["ranks/test_launch_signals"],
    "launcher/local/rank_main": ["ranks/test_launch_command", "ranks/test_launch_function"],
    "launcher/local/single_node": ["ranks/test_restarts_resume"],
    "launcher/local/status": ["ranks/test_launch_command", "ranks/test_restarts_resume"],
    "models/dropout/triton_kernel": ["gpu/test_dropout_on_gpu"],
    "models/graph_constants": ["unit/train/test_graph_step"],
    "models/losses": ["ranks/test_evaluation", "ranks/test_tensor"],
    "parallel/data_parallel": ["ranks/test_comm_hook"],
    "parallel/fsdp": ["ranks/test_fsdp"],
    "parallel/pipeline/pipeline_loss": ["ranks/test_pipeline"],
    "parallel/pipeline/schedule_runner": ["ranks/test_pipeline"],
    "parallel/sync_batchnorm": ["ranks/test_batchnorm"],
    "parallel/tensor/layers": ["ranks/test_tensor"],
    "runtime/objects": ["ranks/test_collectives"],
    "runtime/method_check": ["faults/test_different_calls", "faults/test_on_error"],
    "runtime/collective_check": ["faults/test_mismatches", "ranks/test_collectives"],
    "train/build_engine": ["unit/train/test_trainer", "ranks/test_parity"],
    "train/features/table": ["unit/train/test_hooks", "ranks/test_requires_grad"],
    "train/features/compress": ["ranks/test_compressed_training", "ranks/test_comm_hook"],
    "train/features/local_steps": ["ranks/test_local_steps", "ranks/test_local_state"],
    "train/custom_loop_methods": ["ranks/test_own_loop_on_ranks", "unit/train/test_custom_loop"],
    "train/engine": ["unit/train/test_trainer", "ranks/test_trainer"],
    "train/recipe_objects": ["unit/train/test_trainer", "ranks/test_registered_components", "ranks/test_own_recipes"],
    "train/hang_monitor": ["faults/test_hang_watch"],
    "train/standstill": ["faults/test_standstill"],
    "train/loaders": ["unit/train/test_trainer", "ranks/test_trainer"],
    "train/metric_functions": ["ranks/test_evaluation"],
    "train/optimizer_update": [
        "unit/train/features/test_nonfinite",
        "unit/precision/test_policies",
        "unit/optim/test_clip",
    ],
    "train/pipeline_step": ["ranks/test_pipeline"],
    "train/train_step": ["unit/train/test_loop", "ranks/test_parity"],
    "train/trainer_methods": ["ranks/test_evaluation", "ranks/test_trainer"],
    "train/telemetry": ["ranks/test_restarts_resume", "contract/test_run_files"],
}


def modules() -> set[str]:
    paths = (path for path in SOURCE.rglob("*.py") if not path.name.startswith("__"))
    return {path.relative_to(SOURCE).with_suffix("").as_posix() for path in paths}


def mirrored() -> set[str]:
    unit = TESTS / "unit"
    paths = (path.relative_to(unit) for path in unit.rglob("test_*.py"))
    return {path.with_name(path.stem.removeprefix("test_")).as_posix() for path in paths}


def lines_of_code(module: str) -> int:
    text = (SOURCE / f"{module}.py").read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = (line.strip() for number, line in enumerate(text.splitlines(), start=1) if number not in docstrings)
    return sum(bool(line) and not line.startswith("#") for line in lines)


def with_logic() -> set[str]:
    return {module for module in modules() if lines_of_code(module) > LOGIC}


def test_every_unit_test_is_named_after_a_module() -> None:
    assert len(mirrored()) > 100
    assert sorted(mirrored() - modules()) == []


def test_every_module_with_logic_of_its_own_has_unit_tests() -> None:
    assert sorted(with_logic() - mirrored() - set(ELSEWHERE)) == []


def test_the_list_of_modules_that_are_tested_elsewhere_is_up_to_date() -> None:
    assert sorted(set(ELSEWHERE) - (modules() - mirrored())) == []
    missing = {test for tests in ELSEWHERE.values() for test in tests if not (TESTS / f"{test}.py").exists()}
    assert missing == set()


def test_no_test_is_named_after_how_a_bug_was_found() -> None:
    assert [path.name for path in TESTS.rglob("*findings*.py")] == []
