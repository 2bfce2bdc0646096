"""The numbers and scores that leave a site.

Scores are means over enough patients, with noise where the site has an account of ε. `SENT` lists all other
numbers; no number beyond it leaves a site of a real federation.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from medfedaug.federation.job_folder import COUNTS
from medfedaug.hospital.privacy.policy import PrivacyPolicy
from medfedaug.methods.census import Contributors
from medfedaug.metrics.base import MEAN, MEAN_OF_CLASSES
from medfedaug.metrics.registry import METRICS
from medfedaug.metrics.significance import difference

if TYPE_CHECKING:
    from medfedaug.data.base import SiteFolder

_MIDDLE = 0.5  # score of a patient without one where noise is added: the number of patients is then public

_system = random.SystemRandom()


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

    The mean over the cases of each metric that may leave (`medfedaug.metrics.base.Metric.leaves`) leaves if
    enough patients are behind it (`medfedaug.methods.census.Contributors`). No distance, no score of a case
    or class, no name, and no number of missed structures leaves. With ``score_noise_multiplier`` the means
    over cases get Gaussian noise, and nothing else is released.

    A case without an entry in ``patients`` (`medfedaug.data.base.SiteFolder.patients`) counts as a patient.
    Means over classes need ``labels``, the class of each case (`class_labels`), and enough patients in each.
    Where the patients are too few, a note is returned instead of the number of ``scored_cases``.
    """
    cases, patients = scores.get("cases", {}), patients or {}
    scored = [case for case, score in cases.items() if score is not None]
    names = sorted(METRICS.keys() & scores.keys())
    released: dict[str, Any] = {"cases": {}, **dict.fromkeys(names)}
    released |= {"note": scores["note"]} if "note" in scores else {}
    case_metrics = scores.get("case_metrics", {})
    by_case = {name: case_metrics.get(name, cases) for name in names if METRICS[name].leaves == MEAN}
    noisy = policy.score_noise_multiplier > 0
    # With noise everything but the scores is public, so that the number of scored cases does not matter.
    if problem := _problem(list(cases) if noisy else scored, policy, patients):
        if cases or "note" not in released:
            released["note"] = f"{problem} (min_images of the site's privacy policy)"
        return released
    if noisy:
        return released | _noisy(by_case, list(cases), policy.score_noise_multiplier, patients, generator)
    for name, values in by_case.items():
        # The cases that the first metric scores: they depend on the labels, not on predictions.
        known = {case: values[case] for case in scored if values.get(case) is not None}
        if known and not _problem(known, policy, patients):
            released[name] = fmean(known.values())
    groups: dict[str, list[str]] = {}
    for case in scored:
        groups.setdefault((labels or {}).get(case, ""), []).append(case)
    if "" not in groups and not any(_problem(group, policy, patients) for group in groups.values()):
        released |= {name: scores[name] for name in names if METRICS[name].leaves == MEAN_OF_CLASSES}
    return {**released, "scored_cases": len(scored)}


def released_difference(
    differences: Sequence[float], policy: PrivacyPolicy, unit: str = "cases"
) -> dict[str, Any]:
    """Return the comparison of two models on a site's patients that leaves the site.

    It leaves from ``min_images`` patients on, each with the same weight, and not where scores have noise.
    `medfedaug.metrics.significance.difference` describes arguments and result.
    """
    if len(differences) < policy.min_images or policy.score_noise_multiplier:
        return {}
    return difference(differences, unit)


def _problem(cases: Iterable[str], policy: PrivacyPolicy, patients: Mapping[str, int]) -> str:
    """Describe what is wrong with the patients behind a mean over these cases."""
    counts = Counter(patients.get(case, case) for case in cases)
    weights = torch.tensor([[*counts.values()]], dtype=torch.float64)
    return Contributors(weights).problem(policy.min_images) if counts else "no case has a score"


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
        released[name] = round(_share(total / count + noise), 2)  # the last bits would tell more
    return released


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0)


METRIC = "METRIC"  # placeholder for the name of a metric

_OF_SCORES = (METRIC, "cases", "scored_cases", "note", "unit")
_OF_NOISE = ("privacy/epsilon", "privacy/delta", "privacy/weights", "privacy/score_epsilon")

SENT: Mapping[str, tuple[str, ...]] = {
    "fingerprint": _OF_NOISE,
    "prepare": ("cases", "input", "spacing", COUNTS, *_OF_NOISE),
    "train": (f"val_{METRIC}", "val_note", "seconds", *_OF_NOISE),
    "validate": _OF_SCORES,
    "test": _OF_SCORES,
    "score": (*_OF_SCORES, "against", "seconds"),
}
"""The entries of `medfedaug.federation.messages.messages.Reply.metrics` by task.

Methods' summaries of their training are not among them: they are exact numbers about a site's images, and a
job would get as many as it has rounds."""


def listed_name(name: str) -> str:
    """Return the name of an answer's entry in `SENT`.

    Example:
        >>> listed_name("val_dice"), listed_name("auc"), listed_name("seconds")
        ('val_METRIC', 'METRIC', 'seconds')
    """
    prefix = "val_" if name.startswith("val_") else ""
    return f"{prefix}{METRIC}" if name.removeprefix(prefix) in METRICS else name


def sent_numbers(task: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of an answer that may leave, with times in whole seconds."""
    names = SENT.get(task, ())
    sent = {name: value for name, value in metrics.items() if listed_name(name) in names}
    return sent | {"seconds": math.ceil(sent["seconds"])} if "seconds" in sent else sent
