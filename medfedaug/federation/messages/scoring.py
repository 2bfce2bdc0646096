"""Scoring requests of an evaluation's server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from medfedaug.errors import ConfigError, first_line
from medfedaug.utils.validation import check_keys


@dataclass(frozen=True)
class ScoringSpec:
    """The model that a site has to score.

    Args:
        run: the name of the run in the evaluation.
        model: the name of the model: ``global``, ``personal`` or ``local``.
        own: whether the site adds its kept state of the run, as in the test after training.
        against: the names of models that were scored before, for a comparison case by case.
    """

    run: str
    model: str = ""
    own: bool = True
    against: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ScoringSpec:
        """Read a request."""
        check_keys("scoring: unknown keys", values, [entry.name for entry in fields(cls)])
        try:
            return cls(**{**values, "against": tuple(values.get("against", ()))})
        except TypeError as error:
            raise ConfigError(f"scoring: {first_line(error)}") from error
