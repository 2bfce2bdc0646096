"""`RefusesOldNames`: refuses names of before 0.3, without which a method would send more than it means to."""

from __future__ import annotations

from typing import Any, ClassVar

from medfedaug.errors import ConfigError


class RefusesOldNames:
    """Base of the classes that an author of methods derives from.

    Attributes:
        _old: names of hooks and flags that mean nothing any more.
    """

    _old: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if old := sorted(cls._old & vars(cls).keys()):
            raise ConfigError(f"{cls.__name__}: {old[0]} has another name since 0.3 (docs/methods.md)")
