"""What a captured step has as constants: values in batches, settings of the optimizer, and what its Python code reads.

Numbers and strings are found in modules, in the criterion or the owner of the loss function, and in dicts and objects
that these hold. Closures, globals, tensors that are not buffers, and objects further down are not followed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Constants = dict[tuple[Any, ...], Any]  # by name

_CHANGING = {"params", "param_names", "lr", "initial_lr"}  # learning rates are compared in every step
_OF_TORCH = vars(nn.Module()).keys() - {"training"}
_ENTRIES = 1000  # larger dicts, such as a vocabulary, would take too long to compare


def shape_of(batch: Any, inputs: list[Tensor], others: list[str]) -> Hashable:
    """Equal for batches that launch the same kernels. Appends their tensors to `inputs`, and to `others` the types of
    values that can't be compared."""
    if isinstance(batch, Tensor):
        inputs.append(batch)
        return batch.shape, batch.dtype
    if isinstance(batch, (list, tuple)):
        return tuple([shape_of(value, inputs, others) for value in batch])
    if isinstance(batch, Mapping):
        return tuple([(key, shape_of(value, inputs, others)) for key, value in batch.items()])
    if batch is not None and not isinstance(batch, (str, int, float, bytes)):
        others.append(type(batch).__name__)
        return None
    return type(batch), batch  # 1 and 1.0 give results of other dtypes


def settings_of(optimizer: torch.optim.Optimizer) -> Constants:
    """The settings of all groups, without learning rates."""
    return {
        (name, number): value if isinstance(value, (int, float, str, tuple)) else id(value)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name not in _CHANGING
    }


def constants_of(model: nn.Module, loss: Any, optimizer: torch.optim.Optimizer) -> Constants:
    """All that is compared. `loss`: the criterion, or the loss function."""
    owner = getattr(loss, "__self__", loss)
    modules = [*model.named_modules()]
    if isinstance(owner, nn.Module):
        modules += owner.named_modules(prefix=type(owner).__name__)
    parameters = [(each.data_ptr(), each.requires_grad) for _, module in modules for each in _own(module._parameters)]
    kept = [each for state in optimizer.state.values() for each in _own(state)]
    kept += [each for _, module in modules for each in _own(module._buffers)]
    return {
        **settings_of(optimizer),
        **_numbers([*modules, (type(owner).__name__, owner)]),
        ("params",): [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups],
        ("parameters",): parameters,
        ("buffers or optimizer state",): [tensor.data_ptr() for tensor in kept],
    }


def changed(before: Constants, now: Constants) -> list[str]:
    """Names of constants that differ."""
    if before == now:
        return []
    differ = [name for name in before.keys() | now.keys() if before.get(name) != now.get(name)]
    return sorted({".".join(part for part in name if isinstance(part, str) and part) for name in differ})


def _own(held: Mapping[Any, Any]) -> list[Tensor]:
    return [value for value in held.values() if isinstance(value, Tensor)]


def _numbers(owners: Iterable[tuple[str, Any]]) -> Constants:
    found: Constants = {}
    followed: set[int] = set()  # a config is often held by every module
    for name, owner in owners:
        for key, value in _entries(owner):
            if isinstance(value, (int, float, str)):
                found[name, key] = value
            elif key not in _OF_TORCH and id(value) not in followed:
                followed.add(id(value))
                inner = [(entry, each) for entry, each in _entries(value) if isinstance(each, (int, float, str))]
                found.update({(name, key, entry): each for entry, each in inner})
    return found


def _entries(owner: Any) -> list[tuple[Any, Any]]:
    held = owner if isinstance(owner, Mapping) else getattr(owner, "__dict__", {})
    return list(held.items()) if len(held) <= _ENTRIES else []
