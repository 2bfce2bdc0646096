"""Types and limits of a method's arguments, checked by the annotations of its constructor."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Interval
from pydantic import ConfigDict, PydanticUserError, TypeAdapter

from medfedaug.config.options import check_value

NotNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Interval(ge=0, le=1)]
BelowOne = Annotated[float, Interval(ge=0, lt=1)]
Count = Annotated[int, Ge(0)]
AtLeastOne = Annotated[int, Ge(1)]
AtLeastTwo = Annotated[int, Ge(2)]
Over = Literal["image", "foreground"]

_STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


def checked(init: Callable[..., None]) -> Callable[..., None]:
    """Let a constructor check its arguments: without it, the text ``no`` would count as true.

    A constructor with annotations that pydantic does not know checks its arguments itself.

    Example:
        >>> class Mixing:
        ...     name = "mixing"
        ...     @checked
        ...     def __init__(self, prob: Share = 0.5): ...
        >>> Mixing(prob="often")
        Traceback (most recent call last):
        medfedaug.errors.ConfigError: mixing: prob must be a number, got 'often'
    """

    @functools.wraps(init)
    def checking(self: Any, *args: Any, **kwargs: Any) -> None:
        checks = _checks(init)
        for argument, value in inspect.signature(init).bind(self, *args, **kwargs).arguments.items():
            if argument in checks:
                plain = value.item() if isinstance(value, np.generic) else value
                check_value(f"{self.name}: {argument}", plain, checks[argument])
        init(self, *args, **kwargs)

    return checking


@functools.cache
def _checks(init: Callable[..., None]) -> dict[str, TypeAdapter[Any]]:
    try:
        return {
            name: TypeAdapter(parameter.annotation, config=_STRICT)
            for name, parameter in inspect.signature(init, eval_str=True).parameters.items()
            if parameter.annotation is not parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }
    except (NameError, TypeError, ValueError, AttributeError, PydanticUserError):
        return {}  # annotations of another package that mean nothing at run time, or nothing to pydantic
