"""What of a site's scores leaves it: the one place that decides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from medfedaug.privacy.policy import SUMMARY, PrivacyPolicy
from medfedaug.scores import METRICS
from medfedaug.significance import PatientTest

__all__ = ["released_difference", "released_scores"]

_SHARE_DIGITS, _LENGTH_DIGITS = 2, 1


def released_scores(
    found: Mapping[str, Any], policy: PrivacyPolicy, patients: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """What of a site's scores leaves it, by the site's own policy.

    Args:
        found: as `medfedaug.tasks.base.Task.evaluate` returns them.
        policy: the site's. With ``scores="cases"`` everything; with ``"summary"``, of each metric its mean,
            rounded, if cases of at least ``min_images`` patients have a score; no score of a case or of a
            class, which may be that of a few cases, no name, and no number of missed structures.
        patients: which patient each case is of (`medfedaug.data.base.SiteFolder.patients`); a case without
            one counts as a patient.

    Returns:
        The same mapping, with ``patients`` the number of the patient of each scored case where the site's
        list names any; or what is left of it: with summaries, ``scored_cases`` is the number of cases.
    """
    cases, patients = found.get("cases", {}), patients or {}
    if policy.scores != SUMMARY:
        known = {case: patients[case] for case in cases if case in patients}
        return {**found, "patients": known} if known else dict(found)
    scored = _scored(cases)
    left: dict[str, Any] = {"scored_cases": len(scored), "cases": {}}
    left |= {key: found[key] for key in ("note", "unit") if key in found}
    by_case = dict.fromkeys(found, cases) | dict(found.get("case_metrics", {}))
    for name in METRICS.keys() & found.keys():
        enough = _people(_scored(by_case[name]), patients) >= policy.min_images
        left[name] = rounded(name, found[name]) if enough else None
    if (people := _people(scored, patients)) < policy.min_images:
        what = (
            f"scored cases of {people} patient{'s' * (people != 1)}" if patients else f"{people} scored cases"
        )
        left["note"] = (
            f"{what}, and this site sends means from {policy.min_images} on (min_images of its privacy "
            "policy)"
        )
    return left


def released_difference(
    metric: str, test: PatientTest, policy: PrivacyPolicy, unit: str = "cases"
) -> dict[str, Any]:
    """What leaves a site of the comparison of two models on its cases.

    Args:
        metric: what is compared.
        test: the comparison, over the patients with cases that both models have a score of.
        policy: the site's. With ``scores="summary"``, rounded numbers if there are at least ``min_images``
            such patients, and otherwise their number alone.
        unit: what they are called: ``"patients"``, or ``"cases"`` where none is named.

    Returns:
        ``difference``, ``low`` and ``high``, the ends of its 95% interval, ``None`` of fewer than six
        patients, ``p``, and their number by ``unit``.
    """
    told: dict[str, Any] = {unit: test.patients}
    values = {name: getattr(test, name) for name in ("difference", "low", "high")}
    if not math.isfinite(test.high - test.low):  # of so few cases that no difference could be shown
        values |= {"low": None, "high": None}
    if policy.scores != SUMMARY:
        return {**told, **values, "p": test.p}
    if test.patients < policy.min_images:
        return told
    return {
        **told,
        **{name: rounded(metric, value) for name, value in values.items()},
        "p": round(test.p, 3),
    }


def rounded(metric: str, value: float | None) -> float | None:
    """A mean as a site sends it that allows summaries alone: lengths to 0.1, all else to 0.01.

    >>> rounded("dice", 0.51499), rounded("hd95", 6.2499), rounded("dice", None)
    (0.51, 6.2, None)
    """
    if value is None:
        return None
    return round(value, _LENGTH_DIGITS if METRICS[metric].has_unit else _SHARE_DIGITS)


def _scored(scores: Mapping[str, float | None]) -> list[str]:
    return [case for case, score in scores.items() if score is not None]


def _people(cases: Sequence[str], patients: Mapping[str, int]) -> int:
    """How many patients have these cases."""
    return len({patients.get(case, case) for case in cases})
