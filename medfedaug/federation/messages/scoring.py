"""The models that the server of an evaluation asks a site to score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from medfedaug.errors import ConfigError, first_line
from medfedaug.utils.validation import check_keys


@dataclass(frozen=True)
class Asked:
    """Models that a site is asked to score.

    Args:
        run: the name of the run in the evaluation.
        model: the name of the model: ``global``, ``personal``, ``local``, or ``local of A`` for the model of
            the site A at another one.
        own: whether the site scores with what it keeps of the run, as in the test after training; otherwise
            with the model as it is sent.
        against: the names of models that were scored before, with which it is compared case by case.
    """

    run: str
    model: str = ""
    own: bool = True
    against: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Asked:
        """Read a request.

        Raises:
            ConfigError: for anything else.
        """
        check_keys("scoring: unknown keys", values, [entry.name for entry in fields(cls)])
        try:
            return cls(**{**values, "against": tuple(values.get("against", ()))})
        except TypeError as error:
            raise ConfigError(f"scoring: {first_line(error)}") from error
