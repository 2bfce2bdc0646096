"""Deprecated names of what an author of methods defines: each warns, and does what its new name does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from medfedaug.errors import MedFedAugDeprecation, warn

__all__ = ["OLD_FLAGS", "TakesOldNames"]

_UNTIL = "the next minor version does not know the old name"

# By flag: the words by attribute. "{}" stands for each of the values that the flag has.
OLD_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "contains": {"provides": ("method:{}",)},
    "covers_round": {"excludes": ("averaged_buffers", "exchange")},
    "keeps_models": {"requires": ("complete_state_dict",)},
    "mixes_labels": {"requires": ("labels",), "excludes": ("labels",)},
    "needs_batch": {"requires": ("several_images",)},
    "needs_global_start": {"requires": ("global_start",)},
    "needs_labels": {"requires": ("labels",)},
    "needs_landmarks": {"requires": ("landmarks",)},
    "needs_norms": {"requires": ("norm_layers",)},
    "normalises_input": {"provides": ("normalised_input",), "excludes": ("normalised_input",)},
    "outside_entries": {"excludes": ("complete_state_dict",)},
    "own_weights": {"excludes": ("given_shares",)},
    "personalises": {"provides": ("personal_model",), "requires": ("separate_sites",)},
    "plans_rounds": {"requires": ("fixed_rounds",)},
    "pools_data": {"excludes": ("separate_sites",)},
    "replaces_norms": {"requires": ("norm_layers",), "excludes": ("norm_layers",)},
    "runs_network_again": {"provides": ("extra_passes",)},
    "softens_labels": {"provides": ("soft_labels",)},
    "starts_elsewhere": {"excludes": ("global_start",)},
}
"""The flags of `Method` before version 0.3, each as words of `medfedaug.methods.base.WORDS`."""


class TakesOldNames:
    """Base of the classes that an author of methods derives from or is given.

    A subclass that defines a deprecated name is treated as if it defined the new one. Reading or setting a
    deprecated name works as well. Each warns with `MedFedAugDeprecation`.

    Attributes:
        _renamed: new names by old name, of hooks and of attributes.
        _flags: words by deprecated flag, as `OLD_FLAGS`.
    """

    _renamed: ClassVar[Mapping[str, str]] = {}
    _flags: ClassVar[Mapping[str, Mapping[str, tuple[str, ...]]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = dict(vars(cls))
        for old, new in cls._renamed.items():
            if old in own and new not in own:
                _warn(cls, old, new)
                setattr(cls, new, own[old])
            if old in own or new in own:
                # On each class that has its own, so that `super()` finds that of the base class.
                setattr(cls, old, _OldName(old, new, cls))
        flags = {name: own[name] for name in cls._flags if name in own}
        for name, value in sorted(flags.items(), key=lambda flag: bool(flag[1])):
            delattr(cls, name)
            _warn(cls, name, _spelled(cls._flags[name]))
            _declare(cls, cls._flags[name], value)
        for name in cls._flags if "_flags" in own else ():
            setattr(cls, name, _OldFlag(name))


class _OldName:
    """A deprecated name of an attribute or a hook.

    Args:
        old: the name.
        new: its new name.
        cls: the class that defines it.
    """

    def __init__(self, old: str, new: str, cls: type) -> None:
        self.old, self.new, self.cls = old, new, cls

    def __get__(self, holder: Any, owner: type) -> Any:
        _warn(owner, self.old, self.new)
        if holder is not None and self.new in getattr(holder, "__dict__", {}):
            return vars(holder)[self.new]
        value = vars(self.cls)[self.new]
        return value.__get__(holder, owner) if hasattr(value, "__get__") else value

    def __set__(self, holder: Any, value: Any) -> None:
        _warn(type(holder), self.old, self.new)
        setattr(holder, self.new, value)


class _OldFlag:
    """A deprecated flag of a method.

    Args:
        name: the name.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, holder: Any, owner: type[TakesOldNames]) -> Any:
        words = owner._flags[self.name]
        _warn(owner, self.name, _spelled(words))
        return _declares(owner if holder is None else holder, words)

    def __set__(self, holder: Any, value: Any) -> None:
        words = holder._flags[self.name]
        _warn(type(holder), self.name, _spelled(words))
        _declare(holder, words, value)


def _declares(holder: Any, words: Mapping[str, tuple[str, ...]]) -> bool | tuple[str, ...]:
    """The value of a flag: whether all its words are declared, or the values for which its word is."""
    ((attribute, (word, *_)), *_) = words.items()
    if "{}" in word:
        start = word.removesuffix("{}")
        return tuple(sorted(w.removeprefix(start) for w in getattr(holder, attribute) if w.startswith(start)))
    return all(set(found) <= getattr(holder, attribute) for attribute, found in words.items())


def _declare(holder: Any, words: Mapping[str, tuple[str, ...]], value: Any) -> None:
    """Add a flag's words to what a class or a method declares; take them back where it is false."""
    if not value and not _declares(holder, words):
        return
    for attribute, found in words.items():
        declared = frozenset(getattr(holder, attribute))
        if any("{}" in word for word in found):
            others = {word for word in declared if not word.startswith(found[0].removesuffix("{}"))}
            changed = frozenset(others | {word.format(one) for word in found for one in value})
        else:
            changed = declared | set(found) if value else declared - set(found)
        setattr(holder, attribute, changed)


def _spelled(words: Mapping[str, tuple[str, ...]]) -> str:
    text = [f"{attribute} = {{{', '.join(map(repr, found))}}}" for attribute, found in words.items()]
    return ", ".join(text).replace("{}", "NAME").replace("'", '"')


def _warn(cls: type, old: str, new: str) -> None:
    warn(f"{cls.__module__}.{cls.__qualname__}: {old} is now {new}; {_UNTIL}", category=MedFedAugDeprecation)
