"""`compile`: torch.compile for each block, or for the full model.

Blocks of the same class share one compiled graph, so a deep model compiles as fast as a single block, and gathering
shards or copying between devices stays outside the graph. A model declares further methods to compile in
`ModelSpec.compile_methods`. Modules are compiled in place and keep their names. On several ranks, the pre-flight
triggers compilation before the first step.

The short last batch of an epoch runs eagerly. Compiling takes longer than the batch does, and from the second size on
torch compiles for any size, with slower kernels for the usual one. Batches of other sequence lengths are left to torch,
which compiles for any length after the second.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from paceline.errors import LayoutError
from paceline.models.spec import find_blocks, spec_of
from paceline.parallel.model_parts import ModelParts, PassContext
from paceline.parallel.recompute import RecomputedForward
from paceline.parallel.shards import has_dtensors
from paceline.runtime import noise

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
# Sizes that keep changing are worth a compilation: more than a few short batches, and a good part of all batches.
_FEW, _PART = 16, 4


def apply_compile(parts: ModelParts, context: PassContext) -> str:
    if parts.model._compiled_call_impl is None:
        require_compiler(context.mesh.device)
    parts.forward_contexts.insert(0, ShortBatches)  # around the others
    return compile_model(parts.model, context.config.compile, parts.blocks)


def compile_model(model: nn.Module, mode: bool | str, names: list[str] | None = None) -> str:
    """Compile in place, on the first call. `mode` is `compile` in the recipe. Returns a summary for the log."""
    folder = set_cache_dir()
    _leave_inherited_threads()
    blocks = [] if mode == "model" else find_blocks(model, names)
    if not blocks and names != []:
        if model._compiled_call_impl is None:  # the user may have compiled it
            _compile_call(model)
        return f"compile: full model, cache in {folder}"
    # Dynamo counts recompilations per code object, and blocks of different shapes share the code of their forward.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(blocks))
    for _, block in blocks:
        _compile_block(block)
    methods = () if has_dtensors(model.parameters()) else spec_of(model).compile_methods
    for method in methods:
        # Look the method up on the class: the attribute of the instance may already be compiled.
        setattr(model, method, torch.compile(MethodType(getattr(type(model), method), model)))
    others = "".join(f" and {method}" for method in methods)
    return f"compile: {len(blocks)} blocks{others}, compiled separately, cache in {folder}"


def _compile_block(block: nn.Module) -> None:
    """With recompute, compile the inner forward, which then runs twice; `selective` is handled inside the graph."""
    block._compiled_call_impl = None
    if isinstance(block.forward, RecomputedForward) and not block.forward.selective:
        block.forward.forward = torch.compile(block.forward.forward)
    else:
        _compile_call(block)


def _compile_call(module: nn.Module) -> None:
    """Dynamo passes over frames of torch.nn, so that `module.compile()` has no effect on an nn.Sequential or an
    nn.TransformerEncoderLayer: call those from a frame that it does not pass over."""
    if not type(module).forward.__module__.startswith("torch."):
        module.compile()
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    module._compiled_call_impl = torch.compile(call)


def require_compiler(device: torch.device) -> None:
    """On a CPU, torch.compile generates C++ and needs a compiler."""
    if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))):
        raise LayoutError("no-compiler", "compile is set, but no C++ compiler was found on this machine.")


def _leave_inherited_threads() -> None:
    """A rank that is forked after its parent has compiled inherits torch's pool of compiler threads, but not the
    threads: it would wait for them for ever. The next compilation creates another pool."""
    compiler = sys.modules.get("torch._inductor.async_compile")
    if compiler is not None:
        compiler.AsyncCompile.pool.cache_clear()


def set_cache_dir() -> str:
    """Cache compiled graphs under ~/.cache unless the user set a folder; torch's default is temporary."""
    default = default_cache_dir()
    if os.environ.get(_CACHE) in (None, default):
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "paceline" / "inductor"
        os.environ[_CACHE] = str(folder) if _is_private(folder) else default
    return os.environ[_CACHE]


def _is_private(folder: Path) -> bool:
    """Whether only this user can write to the folder, which is created: torch unpickles what it finds there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
    except OSError:
        return False
    return facts.st_uid == os.geteuid() and not facts.st_mode & 0o022 and os.access(folder, os.W_OK)


@dataclass
class _Sizes:
    largest: int = 0
    batches: int = 0
    short: int = 0

    def is_rare(self, samples: int) -> bool:
        """Whether a batch is smaller than others, and such batches are few."""
        self.batches += 1
        if samples >= self.largest:
            self.largest = samples
            return False
        self.short += 1
        return self.short <= _FEW or self.short * _PART < self.batches


_uncompiled = ContextVar("uncompiled", default=False)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run a compiled model as it was before: a trial of a part of a batch compiles nothing, and is no short batch."""
    token = _uncompiled.set(True)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        _uncompiled.reset(token)


class ShortBatches:
    """The context of every forward of a compiled model. Compiled code that fits the batch still runs."""

    def __init__(self) -> None:
        self._sizes = {True: _Sizes(), False: _Sizes()}  # with and without gradients
        self._entered: list[tuple[noise.NoiseContext | None, AbstractContextManager[Any]]] = []

    def __enter__(self) -> None:
        draw, samples = noise.current(), None if _uncompiled.get() else noise.local_samples()
        rare = samples is not None and self._sizes[torch.is_grad_enabled()].is_rare(samples)
        if draw is not None and rare:
            draw.around = _eager  # what is recomputed in the backward must be so too
        context: AbstractContextManager[Any] = _eager() if rare else nullcontext()
        context.__enter__()
        self._entered.append((draw, context))

    def __exit__(self, *error: Any) -> None:
        draw, context = self._entered.pop()
        context.__exit__(*error)
        if draw is not None:
            draw.around = None


def _eager() -> AbstractContextManager[Any]:
    """In this context nothing is compiled."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("eager_on_recompile")
    return stance
