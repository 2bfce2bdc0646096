"""Choice of the best round when sites round their validation scores.

    python benchmarks/score_selection.py

Federations of phantoms train with exact scores. The script repeats the choice with the rounded scores that
sites send, for each number of patients, and prints the distance of the chosen model's exact mean score from
the best one.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from statistics import fmean, quantiles

from measure import begin, parser

from medfedaug.config.run import RunConfig
from medfedaug.data.datasets.phantom import make_phantom
from medfedaug.federation import run_in_process
from medfedaug.federation.server.model_selection import Selection
from medfedaug.privacy import PrivacyPolicy, released_scores
from medfedaug.privacy.score_release import step_of


def curves(seed: int, rounds: int, sites: int, patients: int) -> list[dict[str, float]]:
    """Return the exact validation scores of each round, by site."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        make_phantom(data, sites=sites, patients=patients, seed=seed, shape=(32, 32, 4))
        names = sorted(path.name for path in data.glob("site_*"))
        config = RunConfig(
            rounds=rounds,
            local_steps=5,
            batch_size=4,
            network_args={"features": [8, 8, 16, 16, 32, 8]},
            seed=seed,
            intensity="scale",
        )
        results = run_in_process(config, data, names, "cpu").results()
    return [{site: entry["sites"][site]["val_dice"] for site in names} for entry in results["rounds"]]


def chosen(run: list[dict[str, float]], patients: int, generator: random.Random) -> int:
    """Return the round that a server chooses, for a number of patients at each site."""
    selection, policy = Selection(), PrivacyPolicy()
    for number, exact in enumerate(run, start=1):
        released = {}
        for site, score in exact.items():
            exact_scores = {"dice": score, "cases": {str(case): score for case in range(patients)}}
            released[site] = released_scores(exact_scores, policy, generator=generator)["dice"]
        selection.offer(number, released, {}, {})
    return selection.round


def main() -> None:
    arguments = parser(__doc__, repeats=300)
    arguments.add_argument("--federations", type=int, default=3)
    arguments.add_argument("--rounds", type=int, default=30)
    arguments.add_argument("--sites", type=int, default=4)
    arguments.add_argument("--patients", type=int, default=50, help="of a site, in all")
    options, _ = begin(arguments)
    size = (options.rounds, options.sites, options.patients)
    runs = [curves(seed, *size) for seed in range(options.federations)]
    means = [[fmean(scores.values()) for scores in run] for run in runs]
    last = fmean(max(mean) - mean[-1] for mean in means)
    print(f"the last model lies {last:.4f} below the best one\n")
    print("| patients | step | below the best: mean | 95% of choices | worst |\n|---|---|---|---|---|")
    generator = random.Random(0)
    for patients in (10, 20, 50, 100):
        lost = [
            max(mean) - mean[chosen(run, patients, generator) - 1]
            for run, mean in zip(runs, means, strict=True)
            for _ in range(options.repeats)
        ]
        high = quantiles(lost, n=20)[-1] if len(lost) > 1 else lost[0]
        print(f"| {patients} | {step_of(patients):g} | {fmean(lost):.4f} | {high:.4f} | {max(lost):.4f} |")


if __name__ == "__main__":
    main()
