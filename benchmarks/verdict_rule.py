"""How often a difference is claimed where there is none, and how often an interval holds the true difference.

    python benchmarks/verdict_rule.py

Two methods that differ by nothing are compared on simulated patients. A training moves all scores of a
method by one amount (its deviation as a multiple of the standard error over patients; the retina
experiment has 0.5 to 3), and a patient's difference has a deviation of its own. Counted are experiments
whose interval over patients excludes 0, by the number of trainings, and those that the rule of the
report calls better or worse. The second table has the coverage of the 95% interval over patients where
the differences are skewed.
"""

from __future__ import annotations

import numpy as np

from medfedaug.analysis.verdict import ENOUGH_SEEDS, side_of_zero
from medfedaug.metrics.significance import paired_t_test, sign_flip_test

EXPERIMENTS, PATIENTS = 1000, 40
NOTHING = side_of_zero((-1.0, 1.0))


def false_alarms(training: float, seeds: int, random: np.random.Generator) -> tuple[float, float]:
    """The shares of experiments with an interval over patients without 0, and with a verdict."""
    alarms = verdicts = 0
    for _ in range(EXPERIMENTS):
        patients = random.normal(0, 1, PATIENTS)
        moved = random.normal(0, training / np.sqrt(PATIENTS), seeds)
        noise = random.normal(0, 0.5, (seeds, PATIENTS))
        scores = moved[:, None] + patients[None] + noise
        _, *by_patient = sign_flip_test(scores.mean(axis=0))
        alarms += side_of_zero(by_patient) != NOTHING
        if seeds >= ENOUGH_SEEDS:
            over_seeds = paired_t_test(scores.mean(axis=1), np.zeros(seeds))
            verdicts += side_of_zero((over_seeds.low, over_seeds.high), by_patient) != NOTHING
    return alarms / EXPERIMENTS, verdicts / EXPERIMENTS


def coverage(draw: str, patients: int, random: np.random.Generator) -> float:
    """The share of intervals over patients that hold the true mean difference, 0."""
    held = 0
    for _ in range(EXPERIMENTS):
        if draw == "normal":
            differences = random.normal(0, 1, patients)
        elif draw == "exponential":
            differences = random.exponential(1, patients) - 1
        else:
            differences = random.lognormal(0, 1, patients) - np.exp(0.5)
        _, low, high = sign_flip_test(differences)
        held += low <= 0 <= high
    return held / EXPERIMENTS


def main() -> None:
    """Print both tables."""
    random = np.random.default_rng(0)
    print("| deviation of trainings | trainings | interval over patients without 0 | verdict |")
    print("|---:|---:|---:|---:|")
    for training in (0.5, 1.0, 2.0, 3.0):
        for seeds in (1, 2, 3, 5):
            alarms, verdicts = false_alarms(training, seeds, random)
            print(f"| {training:g} | {seeds} | {alarms:.2f} | {verdicts:.2f} |", flush=True)
    print("\n| differences | patients | coverage of the 95% interval |\n|---|---:|---:|")
    for draw in ("normal", "exponential", "lognormal"):
        for patients in (20, 40, 110):
            print(f"| {draw} | {patients} | {coverage(draw, patients, random):.3f} |", flush=True)


if __name__ == "__main__":
    main()
