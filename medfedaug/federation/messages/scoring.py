"""Scoring requests of an evaluation's server, and scores in the form of a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from medfedaug.errors import ConfigError, first_line
from medfedaug.metrics.significance import paired_t_test
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


def all_scores(scores: Mapping[str, Any], patients: Mapping[str, int]) -> dict[str, Any]:
    """Return all scores of a simulation, with the number of the patient of each scored case."""
    known = {case: patients[case] for case in scores.get("cases", {}) if case in patients}
    return {**scores, "patients": known} if known else dict(scores)


def difference(differences: Sequence[float], unit: str = "cases") -> dict[str, Any]:
    """Return the comparison of two models on a site's patients, in the form of a message.

    The interval is Student's: the ends of a randomisation test are means over a few patients each.

    Args:
        differences: of each patient's scores, or of each case's where no patient is named.
        unit: ``"patients"`` or ``"cases"``.

    Returns:
        ``difference``, ``low`` and ``high``, the ends of its 95% interval, ``p``, and the number of patients
        by ``unit``; empty for fewer than two.
    """
    if len(differences) < 2:
        return {}
    test = paired_t_test(differences, [0.0] * len(differences))
    ends = {"low": test.low, "high": test.high, "p": test.p}
    return {unit: test.pairs, "difference": test.difference, **ends}
