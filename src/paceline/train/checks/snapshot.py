"""Undoes what a forward leaves behind, so that a trial forward has no effect on training.

    with snapshot.preserved(model, criterion):
        model(snapshot.copied(batch))

Everything is restored in place, so that references to it stay valid: buffers, parameters, gradients, hooks, training
mode, extra state, plain attributes with the containers and small objects in them, variables of enclosing functions, and
the random state. Objects of other libraries, locks, threads and open files are kept by reference. Globals are bound
again, and their containers have the same members, but what these contain is kept: it may be the data.
"""

from __future__ import annotations

import copy
import random
import sys
import threading
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from paceline.data.batches import apply, tensors_in
from paceline.parallel.shards import local_shard
from paceline.runtime.rng import preserve_rng_state

_ATOMS = (type(None), bool, int, float, complex, str, bytes, range, type, torch.dtype, torch.device, torch.Size)
_SHARED = (threading.Thread, type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
PARAMETER_BYTES = 1 << 30  # parameters are copied up to this size: forwards that change them are rare


@contextmanager
def preserved(*roots: Any) -> Iterator[Callable[[], None]]:
    """Restore modules, functions and other objects, and the random state, after this context. It begins without
    gradients. Yields a function that restores all but the random state of the CPU, between two forwards."""
    recording = _Recording(roots)
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    gpu_states = {device: torch.cuda.get_rng_state(device) for device in {*gpus, *recording.gpus}}

    def restore() -> None:
        with torch.no_grad():
            for undo in reversed(recording.undo):
                with suppress(Exception):  # an object that refuses keeps its state
                    undo()
        for device, state in gpu_states.items():
            torch.cuda.set_rng_state(state, device)

    with preserve_rng_state():
        try:
            yield restore
        finally:
            restore()
            if gpus:  # steps need larger blocks, and could not use the rest of those that they would split
                torch.cuda.empty_cache()


def copied(batch: Any) -> Any:
    """A deep copy of a batch. Objects that can't be copied are shared with the original."""
    # A deep copy of a tensor would copy all of its storage, which may be a whole dataset.
    clones: dict[int, Any] = {id(tensor): _clone(tensor) for tensor in tensors_in(batch)}
    try:
        return copy.deepcopy(batch, clones)
    except Exception:
        return apply(batch, _clone)


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


class _Recording:
    """Functions that restore what can be reached from `roots`, recorded from the outside in."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.undo: list[Callable[[], object]] = []
        self._todo: deque[Any] = deque(roots)
        self._users: dict[str, bool] = {}  # modules (of Python) → whether they belong to the model
        self._alive: dict[int, Any] = {}  # visited objects; an id is unique among objects that exist
        modules = [part for root in self._todo if isinstance(root, nn.Module) for part in root.modules()]
        self._packages = {type(module).__module__.partition(".")[0] for module in modules}
        parameters = {id(p): p for module in modules for p in module._parameters.values() if p is not None}
        self.gpus = {p.device.index for p in parameters.values() if p.device.type == "cuda"}
        small = sum(local_shard(p.detach()).nbytes for p in parameters.values()) <= PARAMETER_BYTES
        for key, parameter in parameters.items():
            self._alive[key] = parameter
            with suppress(Exception):
                self._tensor(parameter, content=small)
        while self._todo:
            value = self._todo.popleft()
            if not issubclass(type(value), _ATOMS) and id(value) not in self._alive:
                self._alive[id(value)] = value
                with suppress(Exception):  # an odd object is kept by reference
                    self._visit(value)

    def _visit(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, numpy.ndarray):
            self._array(value)
        elif isinstance(value, dict):
            self._mapping(value)
        elif isinstance(value, (list, deque, set, bytearray)):
            self._collection(value)
        elif isinstance(value, (tuple, frozenset)):
            self._todo.extend(value)
        elif isinstance(value, MethodType):
            self._todo.append(value.__self__)
        elif isinstance(value, partial):
            self._todo.extend([value.func, value.args, value.keywords])
        elif isinstance(value, FunctionType):
            self._function(value)
        elif not self._generator(value) and self._is_plain(value):
            self._object(value)

    def _module(self, module: nn.Module) -> None:
        kind = type(module)
        members = [(members, dict(members)) for members in (vars(module), module._buffers, module._modules)]
        extra: list[Any] = []
        if kind.get_extra_state is not nn.Module.get_extra_state:
            with suppress(Exception):
                extra.append(copy.deepcopy(module.get_extra_state()))

        def restore() -> None:
            if type(module) is not kind:  # a lazy module that has been initialized
                return
            for present, before in members:
                _refill(present, before)
            if extra and not _same(module.get_extra_state(), extra[0]):
                module.set_extra_state(extra[0])

        self.undo.append(restore)
        # The dict of parameters is left alone: FSDP exchanges its members itself.
        named = ("_parameters", "_buffers", "_modules")
        self._todo.extend(value for name, value in members[0][1].items() if name not in named)
        self._todo.extend(value for name in named for value in getattr(module, name).values())
        self._copy_iterators(members[0][1])
        self._class(kind)

    def _class(self, kind: type) -> None:
        """Attributes of the class, such as a counter over all instances."""
        for owner in kind.__mro__:
            if id(owner) not in self._alive and self._is_users(owner.__module__):
                self._alive[id(owner)] = owner
                for name, value in list(vars(owner).items()):
                    if isinstance(value, FunctionType):
                        self._globals(value)
                    if not name.startswith("__") and isinstance(value, (int, float, list, dict, set, deque, Tensor)):
                        self.undo.append(partial(setattr, owner, name, value))
                        self._todo.append(value)

    def _tensor(self, tensor: Tensor, content: bool = True) -> None:
        local = local_shard(tensor.detach())
        before = local.clone() if content and local.device.type != "meta" else None
        leaf, needs, gradient = tensor.is_leaf, tensor.requires_grad, tensor.grad if tensor.is_leaf else None
        hooks = [(name, dict(getattr(tensor, name, None) or {})) for name in _TENSOR_HOOKS]
        if gradient is not None:  # a backward would add to it
            tensor.grad = None

        def restore() -> None:
            if leaf:
                if not tensor.is_leaf:  # it was changed in a forward with gradients
                    tensor.detach_()
                tensor.requires_grad_(needs)
                tensor.grad = gradient
            for name, registered in hooks:
                present = getattr(tensor, name, None)
                if present is not None:
                    _refill(present, registered)
            if before is None:
                return
            now = local_shard(tensor.detach())
            if now.shape != local.shape or now.dtype != local.dtype or now.data_ptr() != local.data_ptr():
                tensor.data = local  # the forward has assigned to .data
            if not torch.equal(local, before):
                local.copy_(before)

        self.undo.append(restore)

    def _array(self, array: numpy.ndarray[Any, Any]) -> None:
        before = array.copy()
        self.undo.append(lambda: numpy.copyto(array, before))
        if array.dtype.hasobject:
            self._todo.extend(array.flat)

    def _mapping(self, mapping: dict[Any, Any]) -> None:
        before = dict(dict.items(mapping))  # a subclass may have a lookup of its own
        self.undo.append(lambda: _refill(mapping, before))
        self._follow(before)
        if type(mapping) not in (dict, OrderedDict):
            self._attributes(mapping)

    def _collection(self, values: Any, *, follow: bool = True) -> None:
        before = list(values)

        def restore() -> None:
            if len(values) != len(before) or any(a is not b for a, b in zip(values, before, strict=True)):
                values.clear()
                values.update(before) if isinstance(values, set) else values.extend(before)

        self.undo.append(restore)
        if follow and not isinstance(values, bytearray):
            self._todo.extend(before)

    def _function(self, function: FunctionType) -> None:
        """Variables of the enclosing functions."""
        if not self._is_users(function.__module__):
            return
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # not assigned yet
                self.undo.append(partial(setattr, cell, "cell_contents", cell.cell_contents))
                self._todo.append(cell.cell_contents)
        self._globals(function)
        self._attributes(function)

    def _globals(self, function: FunctionType) -> None:
        """Global variables that the function names itself."""
        members = function.__globals__
        for name in function.__code__.co_names:
            value = members.get(name)
            if type(value) in (int, float, bool, Tensor, list, deque, set, dict):  # not a registry with its own lookup
                self.undo.append(partial(members.__setitem__, name, value))
                if type(value) is dict:
                    self.undo.append(partial(_refill, value, dict(value)))
                elif type(value) in (list, deque, set):
                    self._collection(value, follow=False)

    def _generator(self, value: Any) -> bool:
        """Record the state of a random number generator."""
        if isinstance(value, torch.Generator):
            self.undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self.undo.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, numpy.random.RandomState):
            self.undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, numpy.random.Generator):
            self.undo.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        else:
            return False
        return True

    def _is_plain(self, value: Any) -> bool:
        """Whether the attributes of an object are state of the model: its class is the user's, or of a library that
        defines the model. An object with a lock or a thread is in use elsewhere."""
        if isinstance(value, (SimpleNamespace, UserDict)):
            return True
        attributes = getattr(value, "__dict__", {}).values()
        return self._is_users(type(value).__module__) and not any(isinstance(each, _SHARED) for each in attributes)

    def _is_users(self, module: str | None) -> bool:
        name = module or ""
        if name not in self._users:
            package, file = name.partition(".")[0], getattr(sys.modules.get(name), "__file__", None) or ""
            library = package in {"torch", "numpy", "paceline"} | (sys.stdlib_module_names - {"__main__"})
            installed = "site-packages" in file or "dist-packages" in file
            self._users[name] = not library and (package in self._packages or not installed)
        return self._users[name]

    def _object(self, value: Any) -> None:
        self._attributes(value)
        for name in [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]:
            self.undo.append(partial(object.__setattr__, value, name, getattr(value, name)))
            self._todo.append(getattr(value, name))

    def _attributes(self, value: Any) -> None:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            before = dict(attributes)
            self.undo.append(lambda: _refill(attributes, before))
            self._follow(before)

    def _follow(self, members: dict[Any, Any]) -> None:
        self._todo.extend(members.values())
        self._copy_iterators(members)

    def _copy_iterators(self, members: dict[Any, Any]) -> None:
        """An iterator can't be rewound: its owner gets a copy of it afterwards."""
        for key, value in members.items():
            if isinstance(value, Iterator) and type(value).__module__ in ("itertools", "builtins"):
                with suppress(Exception):
                    members[key] = copy.copy(value)


def _slots(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    return [name for name in ([slots] if isinstance(slots, str) else slots) if not name.startswith("__")]


def _refill(mapping: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Give a dict its members and their order back. One that has them is not touched."""
    keys, expected = list(mapping), list(before)
    if keys == expected and all(mapping[key] is before[key] for key in keys):
        return
    # Subclasses may refuse their own methods.
    base: type[dict[Any, Any]] = OrderedDict if isinstance(mapping, OrderedDict) else dict
    for key in keys[len(expected) :] if keys[: len(expected)] == expected else keys:
        base.__delitem__(mapping, key)
    for key, value in before.items():
        base.__setitem__(mapping, key, value)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    return bool(numpy.all(one == other))
