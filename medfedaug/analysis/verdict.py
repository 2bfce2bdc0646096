"""`judge`: the verdict of a comparison, by one rule for tables, page and terminal."""

from __future__ import annotations

from dataclasses import dataclass

from medfedaug.metrics.base import Metric
from medfedaug.metrics.significance import PairedTest, PatientTest

__all__ = ["ENOUGH_PATIENTS", "ENOUGH_SEEDS", "Verdict", "judge", "rule", "side_of_zero"]

_ANY_SCORE = Metric("score", "Score", cases="patients")

ENOUGH_SEEDS = 5
ENOUGH_PATIENTS = 20


@dataclass(frozen=True)
class Verdict:
    """The verdict of a comparison.

    Attributes:
        word: ``"better"``, ``"worse"``, ``"no difference shown"`` or ``"open"``.
        lacking: what there is too little of, if the verdict is open.
    """

    word: str
    lacking: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.word}: {', '.join(self.lacking)}" if self.lacking else self.word


def judge(
    seeds: PairedTest | None,
    num_seeds: int,
    patients: PatientTest | None,
    num_patients: int,
    metric: Metric = _ANY_SCORE,
) -> Verdict:
    """The verdict of the comparison of a method with its baseline.

    A difference can be due to chance in two ways: another training would have given another model, and other
    patients would have given other scores. A difference is claimed only if it exceeds both:

    - *open* with fewer than five common seeds or fewer than twenty common patients, whatever the scores are.
      Two trainings of the same method can differ as much as two methods do, and with few patients the
      interval depends on the shape of their distribution, which so few cannot show;
    - *better* (*worse*) if the 95% interval over the seeds (Student's t) and that over the patients
      (`medfedaug.metrics.significance.sign_flip_test`) are both above (below) 0, or both below (above) 0 for
      a metric whose lower values are better;
    - *no difference shown* otherwise.

    The p-value of each comparison is at most 0.05 if and only if its interval excludes 0. P-values are not
    corrected for the number of methods.

    Args:
        seeds: the comparison over seeds; ``None`` if there are too few, or all differences are equal.
        num_seeds: the number of common seeds.
        patients: the comparison by patient; ``None`` if there are too few, or all differences are equal.
        num_patients: the number of common patients; a case whose patient is not known counts as one.
        metric: the metric, which has a direction.

    Example:
        >>> str(judge(None, 1, None, 8))
        'open: 1 of 5 seeds, 8 of 20 patients'
    """
    lacking = []
    for test, number, enough, what in (
        (seeds, num_seeds, ENOUGH_SEEDS, "seeds"),
        (patients, num_patients, ENOUGH_PATIENTS, metric.cases),
    ):
        if number < enough:
            lacking.append(f"{number} of {enough} {what}")
        elif test is None:
            lacking.append(f"no variation between {what}")
    if lacking or seeds is None or patients is None:
        return Verdict("open", tuple(lacking))
    intervals = (seeds.low, seeds.high), (patients.low, patients.high)
    return Verdict(side_of_zero(*intervals, higher_is_better=metric.higher_is_better))


def side_of_zero(*intervals: tuple[float, float], higher_is_better: bool = True) -> str:
    """``"better"`` or ``"worse"`` where all intervals (low, high) are on one side of 0.

    >>> side_of_zero((0.01, 0.03), (0.002, 0.05)), side_of_zero((0.01, 0.03), (-0.002, 0.05))
    ('better', 'no difference shown')
    """
    above, below = ("better", "worse") if higher_is_better else ("worse", "better")
    if all(low > 0 for low, _ in intervals):
        return above
    return below if all(high < 0 for _, high in intervals) else "no difference shown"


def rule(baseline: str, cases: str) -> str:
    """The rule of `judge` in one or two sentences, for readers of a table."""
    return (
        f"Verdict: better or worse than {baseline} if both have at least {ENOUGH_SEEDS} seeds and "
        f"{ENOUGH_PATIENTS} {cases} in common, and the 95% intervals over the seeds and over the "
        f"{cases} are on the same side of 0; no difference shown if they are not; "
        "open with fewer seeds or "
        f"{cases}, whatever the scores are."
    )
