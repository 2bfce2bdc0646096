"""Limit a site's scores before they leave it: the only place that decides."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from medfedaug.metrics.base import FINEST_STEP, MEAN, MEAN_OF_CLASSES
from medfedaug.metrics.registry import METRICS
from medfedaug.privacy.policy import SUMMARY, PrivacyPolicy

if TYPE_CHECKING:
    from medfedaug.data.base import SiteFolder
    from medfedaug.metrics.significance import PatientTest

_SERIES = (1, 2, 5)
_MANY = 10**6  # patients, so many that the step is the finest
_MIDDLE = 0.5  # score of a patient without one where noise is added: the number of patients is then public

_system = random.SystemRandom()


def step_of(patients: int, finest: float = FINEST_STEP) -> float:
    """Return the step for a mean over n patients that leaves a site: 1/n, rounded up to 1, 2 or 5 x 10^-k.

    n is one over the largest share of one patient in the mean, and no step is below ``finest``.

    Example:
        >>> [step_of(n) for n in (1, 5, 10, 19, 20, 49, 50, 99, 100, 5000)]
        [1.0, 0.2, 0.1, 0.1, 0.05, 0.05, 0.02, 0.02, 0.01, 0.01]
    """
    steps = (number / 10**power for power in (2, 1) for number in _SERIES)
    return next((step for step in steps if step >= finest and step * patients >= 1 - 1e-9), 1.0)


def dithered(value: float, step: float, generator: random.Random | None = None) -> float:
    r"""Round to a multiple of a step after adding triangular noise of up to one step in both directions.

    The result has the mean ``value`` and the standard deviation ``step / 2`` wherever ``value`` lies between
    two steps (Lipshitz, Wannamaker and Vanderkooy, J. Audio Eng. Soc. 40, 1992): no rounding border can be
    chosen from outside. If ``value`` changes by d steps, d up to 1, the result reveals the change with a
    probability of at most (1 + d)/2. The noise is the operating system's: noise from the seed of a run could
    be subtracted.

    Example:
        >>> values = [dithered(0.337, 0.1, random.Random(seed)) for seed in range(2000)]
        >>> sorted(set(values)), round(fmean(values), 2)
        ([0.2, 0.3, 0.4], 0.34)
    """
    draw = generator or _system
    noise = draw.random() - draw.random()
    return round(math.floor(value / step + noise + 0.5) * step, 9)


def class_labels(folder: SiteFolder, split: str) -> dict[str, str]:
    """Return the class of each case of a split; empty where cases have label maps."""
    if folder.task != "classification":
        return {}
    return {case.name: str(case.label) for case in folder.cases[split]}


def released_scores(
    scores: Mapping[str, Any],
    policy: PrivacyPolicy,
    patients: Mapping[str, int] | None = None,
    labels: Mapping[str, str] | None = None,
    generator: random.Random | None = None,
) -> dict[str, Any]:
    """Return the scores of `medfedaug.tasks.base.Task.evaluate` that leave a site by its policy.

    ``scores="cases"`` releases everything. ``"summary"`` releases, for each metric that may leave
    (`medfedaug.metrics.base.Metric.leaves`), its mean over the cases, if cases of at least ``min_images``
    patients have a score; no distance, no score of a case or of a class, no name, and no number of missed
    structures. `dithered` rounds the mean in the `step_of` the number of patients. With
    ``score_noise_multiplier``, Gaussian noise replaces the dither, and only means over cases are released.

    A case without an entry in ``patients`` (`medfedaug.data.base.SiteFolder.patients`) counts as a patient.
    Means over classes need ``labels``, the class of each case (`class_labels`).

    Returns:
        The released scores. Scores of cases come with ``patients``, the number of the patient of each scored
        case, where the site's list names any. Summaries come with ``scored_cases``, the number of cases, or
        with a note where the patients are too few.
    """
    cases, patients = scores.get("cases", {}), patients or {}
    if policy.scores != SUMMARY:
        known = {case: patients[case] for case in cases if case in patients}
        return {**scores, "patients": known} if known else dict(scores)
    scored = [case for case, score in cases.items() if score is not None]
    names = sorted(METRICS.keys() & scores.keys())
    released: dict[str, Any] = {"cases": {}, **dict.fromkeys(names)}
    released |= {"note": scores["note"]} if "note" in scores else {}
    case_metrics = scores.get("case_metrics", {})
    by_case = {name: case_metrics.get(name, cases) for name in names if METRICS[name].leaves == MEAN}
    noisy = policy.score_noise_multiplier > 0
    # With noise everything but the scores is public, so that the number of scored cases does not matter.
    counted = list(cases) if noisy else scored
    if _people(counted, patients) < policy.min_images:
        if cases or "note" not in released:
            kind = f"{'patients' if patients else 'cases'}{'' if noisy else ' with a score'}"
            released["note"] = (
                f"fewer than {policy.min_images} {kind}, and this site sends means from "
                f"{policy.min_images} on (min_images of its privacy policy)"
            )
        return released
    if noisy:
        return released | _noisy(by_case, list(cases), policy.score_noise_multiplier, patients, generator)
    for name, values in by_case.items():
        # The cases that the first metric scores: they depend on the labels, not on predictions.
        known = {case: values[case] for case in scored if values.get(case) is not None}
        if _people(known, patients) >= policy.min_images:
            step = step_of(_weight(known, patients), METRICS[name].finest_step)
            released[name] = _share(dithered(fmean(known.values()), step, generator))
    smallest = _smallest_weight(scored, policy, patients, labels or {})
    for name in (name for name in names if METRICS[name].leaves == MEAN_OF_CLASSES):
        if smallest is not None and scores[name] is not None:
            step = step_of(smallest, METRICS[name].finest_step)
            released[name] = _share(dithered(scores[name], step, generator))
    return {**released, "scored_cases": len(scored)}


def released_difference(
    test: PatientTest, policy: PrivacyPolicy, unit: str = "cases", generator: random.Random | None = None
) -> dict[str, Any]:
    """Return the comparison of two models on a site's cases that leaves the site.

    ``scores="summary"`` releases difference and interval of at least ``min_images`` patients, rounded by
    `dithered` after the ends of the interval have moved outwards by a step. It releases no p-value, which
    reveals single patients, and nothing with noise on scores. The unit is ``"patients"``, or ``"cases"``
    where no patient is named.

    Returns:
        ``difference``, ``low`` and ``high``, the ends of its 95% interval, ``None`` for fewer than six
        patients, ``p``, and their number by ``unit``; empty where nothing leaves.
    """
    low, high = test.low, test.high
    bounded = math.isfinite(high - low)  # too few cases have no interval
    if policy.scores != SUMMARY:
        ends = {"low": low, "high": high} if bounded else {"low": None, "high": None}
        return {unit: test.patients, "difference": test.difference, **ends, "p": test.p}
    if test.patients < policy.min_images or policy.score_noise_multiplier:
        return {}
    step = step_of(test.patients)
    released: dict[str, Any] = {unit: test.patients, "low": None, "high": None}
    released["difference"] = _signed(dithered(test.difference, step, generator))
    if bounded:
        released["low"] = min(released["difference"], _signed(dithered(low - step, step, generator)))
        released["high"] = max(released["difference"], _signed(dithered(high + step, step, generator)))
    return released


def largest_loss(classes: int) -> float:
    """Return the upper bound of losses that leave a site, which are clipped to it.

    A Dice loss is at most 1, and the cross-entropy of a uniform prediction of K classes is ln K: their sum is
    the bound for every loss, so that it follows from the number of classes alone.

    Example:
        >>> round(largest_loss(2), 3)
        1.693
    """
    return 1.0 + math.log(max(classes, 2))


def released_loss(
    by_case: Mapping[str, float | None],
    policy: PrivacyPolicy,
    classes: int,
    patients: Mapping[str, int] | None = None,
    generator: random.Random | None = None,
) -> float | None:
    """Return the loss of a model over a site's training cases that leaves the site; ``None`` for nothing.

    Nothing leaves without ``losses`` in the policy, or for fewer than ``min_images`` patients. Each patient's
    mean loss is clipped to 0 ... `largest_loss`, and `dithered` rounds their mean in a step of the range over
    the number of patients (`step_of`). With ``score_noise_multiplier``, Gaussian noise replaces the dither.

    The loss of a case must depend on this case and the model alone; ``None`` is for a case without samples,
    which counts as the middle of the range.
    """
    patients, most = patients or {}, largest_loss(classes)
    by_patient: dict[Any, list[float]] = {}
    for case, loss in by_case.items():
        by_patient.setdefault(patients.get(case, case), []).append(most * _MIDDLE if loss is None else loss)
    count = len(by_patient)
    if not policy.losses or count < policy.min_images:
        return None
    means = (sum(losses) / len(losses) / most for losses in by_patient.values())
    share = fmean(1.0 if math.isnan(mean) else _share(mean) for mean in means)
    if policy.score_noise_multiplier:
        released = round(share + (generator or _system).gauss(0.0, policy.score_noise_multiplier / count), 2)
    else:
        released = dithered(share, step_of(count), generator)
    return round(_share(released) * most, 9)


def _noisy(
    by_case: Mapping[str, Mapping[str, float | None]],
    cases: Sequence[str],
    multiplier: float,
    patients: Mapping[str, int],
    generator: random.Random | None,
) -> dict[str, float]:
    """Return means over patients with Gaussian noise.

    Each patient contributes the mean of its cases' scores, or the middle of the range without a score, so
    that replacing one patient moves each of the J means by at most 1/n, and all of them by √J/n in L2.
    """
    draw, released = generator or _system, {}
    owners = {case: patients.get(case, case) for case in cases}
    count = len(set(owners.values()))
    for name, scores in by_case.items():
        known: dict[Any, list[float]] = {}
        for case, score in scores.items():
            if score is not None:
                known.setdefault(owners[case], []).append(_share(score))
        total = sum(map(fmean, known.values())) + _MIDDLE * (count - len(known))
        noise = draw.gauss(0.0, multiplier * math.sqrt(len(by_case)) / count)
        step = step_of(_MANY, METRICS[name].finest_step)
        released[name] = _share(round(round(round(total / count + noise, 2) / step) * step, 9))
    return released


def _smallest_weight(
    scored: Iterable[str], policy: PrivacyPolicy, patients: Mapping[str, int], labels: Mapping[str, str]
) -> int | None:
    """Return `_weight` of the smallest class, where a patient counts most; ``None`` for too few patients."""
    groups: dict[str, list[str]] = {}
    for case in scored:
        groups.setdefault(labels.get(case, ""), []).append(case)
    if "" in groups or not groups:
        return None
    if min(_people(group, patients) for group in groups.values()) < policy.min_images:
        return None
    return min(_weight(group, patients) for group in groups.values())


def _weight(cases: Iterable[str], patients: Mapping[str, int]) -> int:
    """Return one over the largest share of one patient in some cases, rounded down."""
    counts = Counter(patients.get(case, case) for case in cases)
    return counts.total() // max(counts.values())


def _people(cases: Iterable[str], patients: Mapping[str, int]) -> int:
    """Count the patients of these cases."""
    return len({patients.get(case, case) for case in cases})


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def _signed(value: float) -> float:
    return min(max(value, -1.0), 1.0)
