"""Compilation by torch.compile: each block once, or the whole model.

Blocks of one kind share one compiled graph, so a deep model compiles in the time of one block, and weights that are
sharded or layers that are placed on several devices stay outside of the graph. What else is worth it, a model declares:
`ModelSpec.compile_methods`. It happens in place: names and identities stay. The pre-flight runs
the first micro-batch before the first timed step; a later one of another size compiles again, once.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import MethodType

import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from paceline.errors import LayoutError
from paceline.models.blocks import find_blocks
from paceline.models.spec import spec_of
from paceline.parallel.recompute import Recomputed
from paceline.parallel.shards import has_dtensors

_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def compile_model(model: nn.Module, how: bool | str, wanted: list[str] | None = None) -> str:
    """Compile in place, at the first call; says what was done. `how` is the recipe's `compile`, not off."""
    folder = keep_cache()
    blocks = [] if how == "model" else find_blocks(model, wanted)
    if not blocks and wanted != []:
        model.compile()
        return f"compile: the model as a whole, cache in {folder}"
    # torch counts what was compiled by the code of a forward, and gives up after a few: blocks of different shapes.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(blocks))
    for _, block in blocks:
        _compile_block(block)
    beside = () if has_dtensors(model.parameters()) else spec_of(model).compile_methods
    for method in beside:
        # From the class: the object's own may be a compiled one already.
        setattr(model, method, torch.compile(MethodType(getattr(type(model), method), model)))
    others = "".join(f" and {method}" for method in beside)
    return f"compile: {len(blocks)} blocks{others}, each on its own, cache in {folder}"


def _compile_block(block: nn.Module) -> None:
    """A recomputed block compiles its forward, which then runs twice; selective is a matter of the compiler's."""
    block._compiled_call_impl = None
    if isinstance(block.forward, Recomputed) and not block.forward.selective:
        block.forward.forward = torch.compile(block.forward.forward)
    else:
        block.compile()


def require_compiler(device: torch.device) -> None:
    """On a CPU torch.compile writes C++, which something has to compile."""
    if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        raise LayoutError(
            "no-compiler",
            "compile is set, but there is no C++ compiler on this machine.",
            why="on a CPU torch.compile writes C++",
            fix="install g++, or leave compile out",
        )


def keep_cache() -> str:
    """The user's own folder, which outlives the machine's temporary one; or the one that is set. (torch itself sets its
    temporary one when it is imported.)"""
    if os.environ.get(_CACHE) in (None, default_cache_dir()):
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ[_CACHE] = str(base / "paceline" / "inductor")
    return os.environ[_CACHE]
