"""CUDA graphs without a GPU: operations are recorded at the dispatcher, and replayed on the same tensors.

Like a real capture it runs nothing (what it changed is restored), knows no Python at a replay, and can't read values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # storage → a tensor of it, and its content
        self.created: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable or "batch_norm" in str(func):  # whose schema does not mention running statistics
            for tensor in _tensors((args, kwargs)):
                self._keep(tensor)
        result = func(*args, **kwargs)
        if func in _READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        outputs = _tensors(result)
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        self.created |= {out.untyped_storage().data_ptr() for out in outputs} - given
        self.calls.append((func, args, kwargs, outputs))
        return result

    def _keep(self, tensor: Tensor) -> None:
        place = tensor.untyped_storage().data_ptr()
        if place not in self.created and place not in self.before:
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            self.before[place] = (whole, whole.clone())

    def undo(self) -> None:
        for whole, content in self.before.values():
            whole.copy_(content)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, outputs in self.calls:
            for kept, new in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
                if kept.data_ptr() != new.data_ptr():
                    kept.copy_(new)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf.detach() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class GraphsOnCpu:
    """In place of `CudaGraphs`."""

    captures = replays = warm_ups = 0

    def __init__(self, device: torch.device) -> None:
        type(self).captures = type(self).replays = type(self).warm_ups = 0

    def release(self) -> None: ...

    @contextmanager
    def warm_up(self, *, strict: bool) -> Iterator[None]:
        type(self).warm_ups += 1
        yield

    def capture(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        tape, state = _Tape(), torch.get_rng_state()
        try:
            with tape:
                result = function()
        finally:
            tape.undo()
            torch.set_rng_state(state)
        type(self).captures += 1

        def replay() -> None:
            type(self).replays += 1
            tape.replay()

        return replay, result
