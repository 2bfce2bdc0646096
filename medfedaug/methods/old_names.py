"""Refusal of hooks from before 0.3: a method whose hook is ignored would send more than it means to."""

from __future__ import annotations

from typing import Any, ClassVar

from medfedaug.errors import ConfigError


class RefusesOldNames:
    """Base class of the classes that authors of methods extend; ``_old`` lists names without effect."""

    _old: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if old := sorted(cls._old & vars(cls).keys()):
            raise ConfigError(f"{cls.__name__}: {old[0]} has another name since 0.3 (docs/methods.md)")
