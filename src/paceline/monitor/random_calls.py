"""Records calls that draw from the global generators, with their lines."""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paceline.data.batches import tensors_in
from paceline.run.user_frame import UserFrame
from paceline.runtime.rng import drawn_between, positions
from paceline.runtime.sample_keys import SampleKeys

_LIBRARIES = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")
_RECURRENT = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN"}


class RandomCalls(TorchFunctionMode):
    def __init__(self, keys: SampleKeys) -> None:
        super().__init__()
        self._keys, self.found = keys, list[str]()

    def record(self, function: Callable[[Any], Any], argument: Any) -> Any:
        self._before = positions()
        with self:
            result = function(argument)
        self._note_others()
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note_others()
        fused, self._keys.fused_attention = self._keys.fused_attention, False
        result = func(*args, **(kwargs or {}))
        after = positions()
        if drawn_between(self._before, after) and not self._keys.fused_attention:  # which is known
            kind = _RECURRENT.get(func.__name__)
            shapes = [f" of shape {tuple(tensor.shape)}" for tensor in tensors_in(result)]
            self.found.append((f"nn.{kind}(dropout=…)" if kind else func.__name__ + "".join(shapes[:1])) + _place())
        self._before, self._keys.fused_attention = after, self._keys.fused_attention or fused
        return result

    def _note_others(self) -> None:  # draws since the last function of torch
        before, self._before = self._before, positions()
        self.found += drawn_between(before, self._before)


def _place() -> str:
    """The innermost line outside of torch and paceline, within the recorded function."""
    for frame, line in traceback.walk_stack(sys._getframe()):
        code = frame.f_code
        if code is RandomCalls.record.__code__:
            break
        if not code.co_filename.startswith(_LIBRARIES):
            source = linecache.getline(code.co_filename, line).strip()
            return f" ({UserFrame(code.co_filename.rpartition('site-packages/')[2], line, code.co_name, source)})"
    return ""
