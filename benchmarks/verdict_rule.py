"""False verdicts of the report's rule in tables without differences, by shape of the differences.

    python benchmarks/verdict_rule.py [--tables 1000]

A table compares eleven methods with one reference, with five seeds each. No method differs from the reference
in the mean over all patients. A patient's difference has the shape of the row; the standard deviation is 0.05
Dice. *rare 5* is a method that misses a structure (0.6 Dice) in 5% of patients and gains as much
elsewhere; *mixture* has a standard deviation of 0.3 in 10% of patients and 0.02 elsewhere. Trainings move all
scores of a method by one amount, whose standard deviation is a multiple of the standard error over patients.
The columns count tables with at least one verdict: by the tests of the observed differences, and by the rule,
which adds `medfedaug.research.comparison.paired_tests.rare_loss_test`.
"""

import argparse

import numpy as np

from medfedaug.metrics.significance import paired_t_test
from medfedaug.research.comparison.paired_tests import crossed_test, holm, rare_loss_test
from medfedaug.research.comparison.verdict import LEVEL, chance

METHODS, SEEDS, SPREAD, LOSS = 11, 5, 0.05, 0.6
SHAPES = ("rare 5", "rare 10", "rare 20", "t2", "mixture", "log-normal", "exponential", "normal")
SITES = ((2, 10), (4, 10), (5, 24))


def differences(shape: str, size: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Draw patients' differences with mean 0."""
    if shape == "normal":
        return random.normal(0, SPREAD, size)
    if shape == "exponential":
        return SPREAD * (random.exponential(1, size) - 1)
    if shape == "log-normal":
        return SPREAD * (random.lognormal(0, 1, size) - np.exp(0.5)) / np.sqrt((np.e - 1) * np.e)
    if shape == "t2":
        return np.clip(SPREAD * random.standard_t(2, size), -LOSS, LOSS)
    if shape == "mixture":
        return random.normal(0, np.where(random.random(size) < 0.1, 0.3, 0.02))
    share = int(shape.split()[1]) / 100
    lost = random.random(size) < share
    return np.where(lost, -LOSS, LOSS * share / (1 - share)) + random.normal(0, 0.01, size)


def false_verdicts(
    shape: str, sites: int, patients: int, training: float, tables: int, random: np.random.Generator
) -> tuple[float, float]:
    """Return the shares of tables with a verdict: by the observed differences only, and by the rule."""
    total = sites * patients
    site, observed, ruled = np.arange(total) % sites, 0, 0
    for _ in range(tables):
        baseline = np.clip(random.normal(0.7, 0.1, total), 0.05, 0.95)
        moved = random.normal(0, training * SPREAD / np.sqrt(2 * total), (METHODS + 1, SEEDS, 1))
        scores = moved + random.normal(0, SPREAD / np.sqrt(8), (METHODS + 1, SEEDS, total))
        without, within = [], []
        for method in scores[1:] - scores[:1] + differences(shape, (METHODS, 1, total), random):
            by_site = np.stack([method[:, site == k].mean(axis=1) for k in range(sites)])
            seeds, crossed = paired_t_test(by_site.mean(axis=0), np.zeros(SEEDS)), crossed_test(method)
            without.append(chance(seeds, crossed))
            within.append(1.0)
            if without[-1] <= LEVEL and crossed is not None:  # the other cannot matter beyond it
                sign = 1 if crossed.difference > 0 else -1
                worst = -baseline.max() if sign > 0 else baseline.min() - 1
                within[-1] = chance(seeds, crossed, rare_loss_test(sign * method.mean(axis=0), worst))
        observed += min(holm(without)) <= LEVEL
        ruled += min(holm(within)) <= LEVEL
    return observed / tables, ruled / tables


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--tables", type=int, default=1000, help="tables of each row")
    tables = options.parse_args().tables
    random = np.random.default_rng(0)
    print("| differences | sites x patients | spread of trainings | observed differences only | the rule |")
    print("|---|---|---:|---:|---:|")
    for shape in SHAPES:
        for sites, patients in SITES:
            for training in (0.0, 1.0):
                shares = false_verdicts(shape, sites, patients, training, tables, random)
                print(
                    f"| {shape} | {sites} x {patients} | {training:g} | {shares[0]:.3f} | {shares[1]:.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
