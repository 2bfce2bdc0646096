"""False claims of the report's rule in tables without differences, and the coverage of its intervals.

    python benchmarks/verdict_rule.py

A table compares eleven methods with one reference, all trained with five seeds and tested on forty patients
of four sites. No method differs from the reference in the mean. A training moves all scores of a method by
one amount; its deviation is a multiple of the standard error over patients (the retina experiment has 0.5 to
3). A patient's difference has a deviation of 1 and the shape of the row, and each score has further noise.
The first table counts tables with at least one verdict of the rule, before and after each of its parts, also
for verdicts that one site carries. The second has the coverage of the 95% intervals over trainings and
patients together, and over patients only. In the third each method's gains at some hospitals equal its losses
at others; it counts tables with a verdict that no single site carries.
"""

from __future__ import annotations

import numpy as np

from medfedaug.analysis.verdict import LEVEL, Elsewhere, Verdict, chance, judge
from medfedaug.metrics.crossed import CrossedTest, crossed_test, holm
from medfedaug.metrics.significance import PairedTest, paired_t_test, sign_flip_test

TABLES, METHODS, SEEDS, PATIENTS, SITES = 1000, 11, 5, 40, 4
SHAPES = ("normal", "exponential", "log-normal")
SITE = np.arange(PATIENTS) % SITES


def differences(shape: str, size: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Draw patients' differences with mean 0 and deviation 1."""
    if shape == "normal":
        return random.normal(0, 1, size)
    if shape == "exponential":
        return random.exponential(1, size) - 1
    return (random.lognormal(0, 1, size) - np.exp(0.5)) / np.sqrt((np.e - 1) * np.e)


def scores(shape: str, training: float, random: np.random.Generator) -> np.ndarray:
    """Draw the differences of all methods from one reference: methods x seeds x patients."""
    moved = random.normal(0, training / np.sqrt(2 * PATIENTS), (METHODS + 1, SEEDS, 1))
    each = random.normal(0, 0.5 / np.sqrt(2), (METHODS + 1, SEEDS, PATIENTS))
    drawn = moved + each
    return drawn[1:] - drawn[:1] + differences(shape, (METHODS, 1, PATIENTS), random)


def tested(table: np.ndarray) -> list[tuple[PairedTest, CrossedTest | None]]:
    """Compare each method with its reference, over the seeds and over seeds and patients."""
    tests = []
    for method in table:
        by_site = np.stack([method[:, site == SITE].mean(axis=1) for site in range(SITES)])
        tests.append((paired_t_test(by_site.mean(axis=0), np.zeros(SEEDS)), crossed_test(method)))
    return tests


def claims(table: np.ndarray) -> list[Verdict]:
    """Return the verdicts of a table that claim a difference."""
    tests = tested(table)
    adjusted = holm([chance(*both) for both in tests])
    verdicts = []
    for method, (over_seeds, crossed), p in zip(table, tests, adjusted, strict=True):
        if p <= LEVEL:
            others = {str(site): method[:, site != SITE] for site in range(SITES)}
            without = {
                site: Elsewhere(float(rows.mean()), crossed_test(rows)) for site, rows in others.items()
            }
            verdicts.append(judge(over_seeds, SEEDS, crossed, PATIENTS, adjusted=p, without=without))
    return [verdict for verdict in verdicts if verdict.word in ("better", "worse")]


def false_tables(shape: str, training: float, random: np.random.Generator) -> dict[str, float]:
    """Return the shares of tables with a verdict."""
    counted = {"uncorrected": 0, "Holm": 0, "rule": 0}
    for _ in range(TABLES):
        table = scores(shape, training, random)
        p_values = [chance(*both) for both in tested(table)]
        counted["uncorrected"] += min(p_values) <= 0.05
        counted["Holm"] += min(holm(p_values)) <= 0.05
        counted["rule"] += bool(claims(table))
    return {name: number / TABLES for name, number in counted.items()}


def of_these_sites(effect: float, random: np.random.Generator) -> float:
    """Return the share of tables with a verdict that no site carries, if gains differ between sites."""
    number = 0
    for _ in range(TABLES):
        gains = random.normal(0, effect, (METHODS, 1, SITES))[..., SITE]
        number += any(not verdict.carried for verdict in claims(scores("normal", 1.0, random) + gains))
    return number / TABLES


def coverage(shape: str, training: float, random: np.random.Generator) -> tuple[float, float]:
    """Return the shares of intervals that hold the true mean difference, 0."""
    held = []
    for _ in range(TABLES // METHODS):
        for method in scores(shape, training, random):
            test = crossed_test(method)
            assert test is not None
            _, low, high = sign_flip_test(method.mean(axis=0))
            held.append((test.low <= 0 <= test.high, low <= 0 <= high))
    both, patients = np.mean(held, axis=0)
    return both, patients


def main() -> None:
    """Print the tables."""
    random = np.random.default_rng(0)
    print("| differences | deviation of trainings | p at most 0.05 | the same, Holm | the rule |")
    print("|---|---:|---:|---:|---:|")
    for shape in SHAPES:
        for training in (0.0, 0.5, 1.0, 2.0, 3.0):
            shares = false_tables(shape, training, random).values()
            print(
                f"| {shape} | {training:g} | {' | '.join(f'{share:.3f}' for share in shares)} |", flush=True
            )
    print("\n| differences | deviation of trainings | seeds and patients | patients only |")
    print("|---|---:|---:|---:|")
    for shape in SHAPES:
        for training in (0.5, 1.0, 2.0):
            shares = coverage(shape, training, random)
            print(
                f"| {shape} | {training:g} | {' | '.join(f'{share:.3f}' for share in shares)} |", flush=True
            )
    print("\n| deviation of a method's gain between sites | the rule |")
    print("|---:|---:|")
    random = np.random.default_rng(0)
    for effect in (0.0, 0.25, 0.5, 1.0):
        print(f"| {effect:g} | {of_these_sites(effect, random):.3f} |", flush=True)


if __name__ == "__main__":
    main()
