"""`judge` gives the verdict of a comparison, by one rule for tables, page and terminal."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from medfedaug.metrics.base import Metric
from medfedaug.metrics.significance import PairedTest
from medfedaug.research.comparison.paired_tests import CrossedTest

_ANY_SCORE = Metric("score", "Score", cases="patients")
ENOUGH_SEEDS = 5
ENOUGH_PATIENTS = 20
LEVEL = 0.05  # largest adjusted p-value of a claim


class Elsewhere(NamedTuple):
    """The patients of all sites but one."""

    difference: float  # their mean difference
    test: CrossedTest | None  # the comparison over seeds and these patients; `None` without variation


@dataclass(frozen=True)
class Verdict:
    """The verdict of a comparison."""

    word: str  # "better", "worse", "no difference shown" or "open"
    lacking: tuple[str, ...] = ()  # missing evidence, if the verdict is open
    # Sites without which the difference is not shown, each with the mean difference of the patients
    # elsewhere; `None` if all patients are of that site.
    carried: Mapping[str, float | None] = field(default_factory=dict)
    unconfirmed: str = ""  # the reason, if only rare losses or gains could undo the difference

    def __str__(self) -> str:
        if self.unconfirmed:
            return f"not confirmed ({self.unconfirmed})"
        if self.lacking:
            return f"{self.word}: {', '.join(self.lacking)}"
        if not self.carried:
            return self.word
        elsewhere = {site: "" if gain is None else f"{gain:+.3f}" for site, gain in self.carried.items()}
        if len(elsewhere) > 1:
            lacking = " or without ".join(f"{site} ({gain})" for site, gain in elsewhere.items())
            return f"{self.word}, not shown without {lacking}"
        ((site, gain),) = elsewhere.items()
        return f"{self.word} at {site}" + (f" (elsewhere {gain})" if gain else "")


def lacks(num_seeds: int, num_patients: int, metric: Metric = _ANY_SCORE) -> tuple[str, ...]:
    """Return the seeds and patients that a verdict lacks; empty with enough of both.

    >>> lacks(1, 8)
    ('1 of 5 seeds', '8 of 20 patients')
    """
    counts = ((num_seeds, ENOUGH_SEEDS, "seeds"), (num_patients, ENOUGH_PATIENTS, metric.cases))
    return tuple(f"{number} of {enough} {noun}" for number, enough, noun in counts if number < enough)


def chance(seeds: PairedTest | None, crossed: CrossedTest | None, rare: float = 0.0) -> float:
    """Return the p-value of a verdict: the largest of the tests' p-values, 1 if the first two disagree.

    Args:
        seeds: the test of the means over the sites, each with the same weight.
        crossed: the test of seeds and patients together.
        rare: the p-value of `medfedaug.research.comparison.paired_tests.rare_loss_test`.
    """
    if seeds is None or crossed is None or seeds.difference * crossed.difference <= 0:
        return 1.0
    return max(seeds.p, crossed.p, rare)


def judge(
    seeds: PairedTest | None,
    num_seeds: int,
    crossed: CrossedTest | None,
    num_patients: int,
    metric: Metric = _ANY_SCORE,
    *,
    rare: float = 0.0,
    adjusted: float | None = None,
    without: Mapping[str, Elsewhere | None] | None = None,
) -> Verdict:
    """Judge the comparison of a method with its reference.

    A difference can be due to chance in three ways: another training gives another model, other patients give
    other scores, and of many methods one differs by chance. A real difference can also be due to a single
    site. A difference is claimed for all sites only if it exceeds all four:

    - *open* with fewer than five common seeds or fewer than twenty common patients, whatever the scores are.
      Two trainings of the same method can differ as much as two methods do, and with few patients the
      interval depends on the shape of their distribution, which so few cannot show;
    - *no difference shown* unless the p-value (`chance`), adjusted for all methods of the table
      (`medfedaug.research.comparison.paired_tests.holm`), is at most `LEVEL`; *not confirmed* if the two
      tests of the observed differences suffice, and rare losses, which so few patients need not contain,
      could undo them;
    - *better at SITE* (*worse at SITE*) if the patients of the other sites do not show it: their 95% interval
      (`medfedaug.research.comparison.paired_tests.crossed_test`) contains 0 or lies on the other side, or
      their scores do not vary. *Better, not shown without A or without B* if several sites are such;
    - *better* (*worse*) otherwise.

    Args:
        seeds: the comparison over seeds; ``None`` if there are too few, or all differences are equal.
        crossed: the comparison over seeds and patients together; ``None`` if all differences are equal.
        rare: the p-value of `medfedaug.research.comparison.paired_tests.rare_loss_test`.
        adjusted: the p-value, adjusted for all methods of the table; by default `chance`.
        without: for each site the patients of all other sites; ``None`` for a site that has all patients.

    Example:
        >>> str(judge(None, 1, None, 8))
        'open: 1 of 5 seeds, 8 of 20 patients'
    """
    lacking = list(lacks(num_seeds, num_patients, metric))
    if not lacking:
        lacking += ["no variation between seeds"] * (seeds is None)
        lacking += [f"no variation between {metric.cases}"] * (crossed is None)
    if lacking or seeds is None or crossed is None:
        return Verdict("open", tuple(lacking))
    p = chance(seeds, crossed, rare)
    sign = 1 if crossed.difference > 0 else -1
    better = (sign > 0) == metric.higher_is_better
    factor = adjusted / p if adjusted and p else 1.0  # for the number of methods
    if p * factor > LEVEL:
        undone = "rare losses could undo the gain" if better else "rare gains could undo the loss"
        return Verdict("no difference shown", unconfirmed=undone * (chance(seeds, crossed) * factor <= LEVEL))
    carried = {
        site: other.difference if other else None
        for site, other in (without or {}).items()
        if other is None or other.test is None or min(sign * other.test.low, sign * other.test.high) <= 0
    }
    return Verdict("better" if better else "worse", carried=carried)


def rule(reference: str, cases: str) -> str:
    """Return the rule of `judge` in a few sentences, for readers of a table."""
    return (
        f"Verdict: open unless both have at least {ENOUGH_SEEDS} seeds and {ENOUGH_PATIENTS} {cases} in "
        f"common, whatever the scores are. Better or worse than {reference} if the difference exceeds the "
        f"chance of other seeds, and of other seeds and {cases} together, and if rare losses, which so few "
        f"{cases} need not contain, cannot undo it (p at most {LEVEL:g} for each of the three, adjusted for "
        f"all methods of the table by Holm's procedure). Better at a site if the {cases} of the other sites "
        f"do not show it (95% interval). No difference shown otherwise. A verdict holds for these sites: "
        f"results at other sites are a chance of their own."
    )
