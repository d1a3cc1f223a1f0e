"""What a process of tests does once, so that the thousands of processes that are forked from it need not."""

from __future__ import annotations

import importlib

import typer

from paceline.tools.cli.main import app

# Imported on first use in most ranks and commands, which took each of them 0.3 CPU seconds.
_MODULES = (
    "multiprocessing.popen_fork", "numpy.ctypeslib", "paceline.tools.cli.train", "paceline.data.datasets",
    "paceline.launcher.backends.ssh",
    "paceline.launcher.cluster.frontend", "paceline.launcher.dispatch", "paceline.launcher.local.agent",
    "paceline.launcher.local.single_node", "paceline.models.mlp", "paceline.models.vae", "paceline.train.trainer",
    "pydantic.type_adapter", "tracemalloc", "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama", "transformers.models.vit.modeling_vit", "worlds",
)  # fmt: skip


def import_what_ranks_need() -> None:
    for name in _MODULES:
        importlib.import_module(name)
    typer.main.get_command(app).make_context("paceline", ["ls"])  # imports modules of typer, others in each version


def import_compiler() -> None:
    """1.5 CPU seconds in each rank that compiles a model. Call in tests whose ranks do, not in all processes of tests,
    which would grow by 50 MB."""
    importlib.import_module("torch._inductor.compile_fx")
