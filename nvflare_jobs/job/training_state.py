"""The state of a network and its methods in training, as tensors and plain Python values.

`capture` walks over the network and the methods' parts at a site: parameters, buffers and other attributes
of modules, attributes of the methods' objects, their optimisers, and the containers between them. `restore`
puts the state into new objects of the same structure. Two references to a tensor, container or object stay
references to one, so that an optimiser still steps a method's parameters.

Functions and objects that describe the run (the site's context, a `Method`, the task) stay as they are.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partialmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from medfedaug.errors import MedFedAugError
from medfedaug.methods.base import Method, SiteContext, SiteExchange, SitePart
from medfedaug.tasks import Task

_PLAIN = (type(None), bool, int, float, str, bytes)
_DESCRIPTIONS = (Method, SiteContext, Task)
_OWN_PACKAGES = ("medfedaug.methods", "medfedaug.models", "medfedaug.transforms", "medfedaug.functional")
_CONTAINERS: dict[str, Any] = {
    "dict": dict,
    "list": list,
    "deque": deque,
    "tuple": tuple,
    "set": (set, frozenset),
}
_MODULE_INTERNALS = frozenset(nn.Module().__dict__)
_REFERENCE, _LEFT = "reference", "left"


class StateMismatch(MedFedAugError):
    """The objects differ in structure from those of the captured state."""


def capture(roots: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of some objects, by the path to each part."""
    return _Capture(roots).state


def restore(roots: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Put a captured state into objects of the same structure.

    Raises:
        StateMismatch: naming the first part that differs; nothing is then changed.
    """
    for dry in (True, False):
        _Restore(roots, state, dry)


def _generator_state(generator: Any) -> tuple[Any, ...]:
    """Return the state of a random generator of NumPy, PyTorch or Python, as plain values."""
    if isinstance(generator, np.random.RandomState):
        kind, keys, position, has_gauss, cached = generator.get_state()
        words = torch.from_numpy(np.asarray(keys).astype(np.int64))
        return str(kind), words, int(position), int(has_gauss), float(cached)
    if isinstance(generator, torch.Generator):
        return (generator.get_state(),)
    return tuple(generator.getstate())


def _set_generator_state(generator: Any, state: Sequence[Any]) -> None:
    """Restore a result of `_generator_state`."""
    if isinstance(generator, np.random.RandomState):
        kind, keys, *rest = state
        generator.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    elif isinstance(generator, torch.Generator):
        generator.set_state(state[0])
    else:
        generator.setstate(tuple(state))


def _is_generator(thing: Any) -> bool:
    return isinstance(thing, (np.random.RandomState, torch.Generator, random.Random))


def _is_walked(thing: Any) -> bool:
    """Return whether an object's attributes are state, as those of every method are."""
    if isinstance(thing, _DESCRIPTIONS) or callable(thing) or not hasattr(thing, "__dict__"):
        return False
    return isinstance(thing, (SitePart, SiteExchange)) or type(thing).__module__.startswith(_OWN_PACKAGES)


def _attributes(thing: Any) -> dict[str, Any]:
    if isinstance(thing, nn.Module):
        other = {key: value for key, value in vars(thing).items() if key not in _MODULE_INTERNALS}
        return {**other, **thing._parameters, **thing._buffers, **thing._modules}
    return dict(vars(thing))


def _kind(thing: Any) -> str:
    """Return the kind of an object; ``"left"`` if it is no state."""
    if isinstance(thing, _PLAIN):
        return "plain"
    if isinstance(thing, Tensor):
        return "tensor"
    if isinstance(thing, np.ndarray):
        return "array" if thing.dtype.kind in "biuf" else _LEFT
    if _is_generator(thing):
        return "generator"
    if isinstance(thing, torch.optim.Optimizer):
        return "optimiser"
    if isinstance(thing, nn.Module):
        return "module"
    for kind, known in _CONTAINERS.items():
        if isinstance(thing, known):
            return kind
    return "object" if _is_walked(thing) else _LEFT


def _identity(thing: Any) -> Any:
    """Return equal values for objects that change together, such as tensors that share memory."""
    if isinstance(thing, Tensor) and thing.numel() and thing.layout == torch.strided:
        place = (thing.untyped_storage().data_ptr(), thing.storage_offset())
        return ("tensor", str(thing.device), *place, tuple(thing.shape), thing.stride())
    return id(thing)


class _Capture:
    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.state, self.paths = dict[str, Any](), dict[Any, str]()
        self.alive: list[Any] = []  # so that no identity is reused
        for name, root in roots.items():
            self.take(name, root)

    def take(self, path: str, thing: Any) -> None:
        kind = _kind(thing)
        if kind not in ("plain", _LEFT):
            identity = _identity(thing)
            if identity in self.paths:
                tracked = isinstance(thing, Tensor) and thing.requires_grad
                self.state[path] = (_REFERENCE, self.paths[identity], tracked)
                return
            self.paths[identity] = path
            self.alive.append(thing)
        self.state[path] = (kind, *self._details(path, thing, kind))

    def _details(self, path: str, thing: Any, kind: str) -> tuple[Any, ...]:
        if kind in ("module", "object"):
            attributes = _attributes(thing)
            for name, value in attributes.items():
                self.take(f"{path}.{name}", value)
            return type(thing).__name__, list(attributes)
        if kind == "dict":
            keys = [key for key in thing if isinstance(key, (str, int, bool))]
            for key in keys:
                self.take(f"{path}[{key!r}]", thing[key])
            return (keys,)
        if kind in ("list", "deque", "tuple"):
            for index, value in enumerate(thing):
                self.take(f"{path}[{index}]", value)
            return (len(thing),)
        if kind == "tensor":
            return thing.detach().to("cpu", copy=True), thing.requires_grad and thing.is_leaf
        return () if kind == _LEFT else (_COPIES[kind](thing),)


_COPIES: dict[str, Callable[[Any], Any]] = {
    "plain": lambda value: value,
    "array": lambda array: torch.from_numpy(array.copy()),
    "generator": _generator_state,
    "optimiser": lambda optimiser: _copied(optimiser.state_dict()),
    "set": lambda items: sorted((item for item in items if isinstance(item, _PLAIN)), key=repr),
}
_MISSING = object()


class _Restore:
    def __init__(self, roots: Mapping[str, Any], state: Mapping[str, Any], dry: bool) -> None:
        self.state, self.dry = state, dry
        self.restored: dict[str, Any] = {}
        self.inplace = {id(tensor) for root in roots.values() for tensor in _fixed_tensors(root, set())}
        modules = (root for root in roots.values() if isinstance(root, nn.Module))
        self.device = next((p.device for module in modules for p in module.parameters()), None)
        for name, root in roots.items():
            self.put(name, root)

    def put(self, path: str, current: Any) -> Any:
        """Return the value for a path: the current object, changed in place, or a new one."""
        if path not in self.state:
            raise StateMismatch(f"{path}: is not in the saved state")
        kind, *details = self.state[path]
        if kind == _REFERENCE:
            return self._refer(path, *details)
        value = getattr(self, f"_{kind}")(path, current, *details)
        self.restored[path] = value
        return value

    def _refer(self, path: str, target: str, tracked: bool) -> Any:
        if target not in self.restored:  # an object that contains itself
            raise StateMismatch(f"{path}: refers to {target}, which is not complete")
        value = self.restored[target]
        return value.detach() if isinstance(value, Tensor) and value.requires_grad and not tracked else value

    def _left(self, path: str, current: Any) -> Any:
        return None if current is _MISSING else current

    def _plain(self, path: str, current: Any, value: Any) -> Any:
        return value

    def _tensor(self, path: str, current: Any, value: Tensor, tracked: bool) -> Tensor:
        if isinstance(current, Tensor) and id(current) in self.inplace:
            if current.shape != value.shape or current.dtype != value.dtype:
                raise StateMismatch(f"{path}: expected {tuple(value.shape)}, found {tuple(current.shape)}")
            if not self.dry:
                with torch.no_grad():
                    current.copy_(value)
            return current
        device = current.device if isinstance(current, Tensor) else self.device
        return value.to(device or "cpu", copy=True).requires_grad_(tracked)

    def _array(self, path: str, current: Any, value: Tensor) -> np.ndarray:
        result: np.ndarray = value.numpy().copy()
        return result

    def _generator(self, path: str, current: Any, value: tuple[Any, ...]) -> Any:
        if not _is_generator(current):
            raise StateMismatch(f"{path}: no random generator is there")
        if not self.dry:
            _set_generator_state(current, value)
        return current

    def _optimiser(self, path: str, current: Any, value: dict[str, Any]) -> Any:
        if not isinstance(current, torch.optim.Optimizer):
            raise StateMismatch(f"{path}: no optimiser is there")
        sizes = [
            [len(group["params"]) for group in groups]
            for groups in (current.param_groups, value["param_groups"])
        ]
        if sizes[0] != sizes[1]:
            raise StateMismatch(f"{path}: expected {sizes[1]} parameters, found {sizes[0]}")
        if not self.dry:
            current.load_state_dict(value)
        return current

    def _object(self, path: str, current: Any, name: str, attributes: list[str]) -> Any:
        if type(current).__name__ != name:
            raise StateMismatch(f"{path}: expected {name}, found {type(current).__name__}")
        self.restored[path] = current
        now = _attributes(current)
        for attribute in attributes:
            before = now.get(attribute, _MISSING)
            value = self.put(f"{path}.{attribute}", before)
            equal = isinstance(value, _PLAIN) and type(value) is type(before) and value == before
            if value is not before and not equal and not self.dry:
                setattr(current, attribute, value)
        return current

    _module = _object

    def _dict(self, path: str, current: Any, keys: list[Any]) -> Any:
        now = current if isinstance(current, dict) else {}
        values = {key: self.put(f"{path}[{key!r}]", now.get(key, _MISSING)) for key in keys}
        return current if _same(now.values(), values.values()) and list(now) == keys else values

    def _sequence(self, path: str, current: Any, count: int, make: Callable[[list[Any]], Any]) -> Any:
        now = list(current) if isinstance(current, (list, tuple, deque)) else []
        before = [*now, *[_MISSING] * count]
        values = [self.put(f"{path}[{i}]", before[i]) for i in range(count)]
        return current if _same(now, values) and type(current) is type(make([])) else make(values)

    _list = partialmethod(_sequence, make=list)
    _deque = partialmethod(_sequence, make=deque)
    _tuple = partialmethod(_sequence, make=tuple)

    def _set(self, path: str, current: Any, values: list[Any]) -> Any:
        return frozenset(values) if isinstance(current, frozenset) else set(values)


def _same(values: Any, others: Any) -> bool:
    first, second = list(values), list(others)
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


def _fixed_tensors(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors that other objects also hold: those of modules and optimisers."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    kind = _kind(thing)
    if kind == "optimiser":
        yield from (parameter for group in thing.param_groups for parameter in group["params"])
    elif kind in ("module", "object"):
        if kind == "module":
            yield from (*thing.parameters(recurse=False), *thing.buffers(recurse=False))
        for value in _attributes(thing).values():
            yield from _fixed_tensors(value, seen)
    elif kind in ("list", "tuple", "deque", "dict"):
        for value in thing.values() if kind == "dict" else thing:
            yield from _fixed_tensors(value, seen)


def _copied(value: Any) -> Any:
    """Copy an optimiser's state to the CPU, in plain containers."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value
