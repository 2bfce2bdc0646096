"""Accuracy against ε: weights with noise by DP-SGD at every site, on sites of volumes.

    python benchmarks/privacy_weights.py --data DIR --halve --out docs/results/privacy_weights

One training for each noise multiplier and seed: without noise, and with DP-SGD at the sites. Trainings in
the output's JSON are not repeated. ε is of the whole job at δ = 1e-5, for the weights only: scores leave
without noise.
"""

import itertools
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import hardware, parser
from privacy_epsilon import DELTA, halved

from medfedaug.config.run import RunConfig
from medfedaug.data.sites import find_sites
from medfedaug.federation import run_in_process
from medfedaug.federation.server.output import write_json
from medfedaug.hospital.privacy import PrivacyPolicy
from medfedaug.hospital.privacy.guard import SitePrivacy
from medfedaug.methods import parse_methods
from medfedaug.simulate import configure

PLAIN, SITE = "none", "site"
# Negligible noise at a site: DP-SGD only clips, and draws cases.
CLIPPED = "0"


def policy(where: str, noise: str, clip: float) -> PrivacyPolicy:
    """Make a site's policy."""
    if where != SITE:
        return PrivacyPolicy.of_simulation()
    return PrivacyPolicy(
        min_images=1,
        sgd_noise_multiplier=float(noise) or 1e-6,
        sgd_clip=clip,
        delta=DELTA,
        epsilon=1e300,
    )


def train(config: RunConfig, data: Path, sites: list[str], policy: PrivacyPolicy) -> dict[str, Any]:
    """Train one federation."""
    started = time.perf_counter()
    results = run_in_process(config, data, sites, "cpu", privacy=partial(SitePrivacy, policy)).results()
    last = results["rounds"][-1]
    return {
        "seed": config.seed,
        "dice": results["test"]["mean"]["dice"],
        "sites": {site: entry["dice"] for site, entry in results["test"]["sites"].items()},
        "epsilon": {s: e["privacy/epsilon"] for s, e in last["sites"].items() if "privacy/epsilon" in e},
        "selected_round": results["selected_round"],
        "seconds": time.perf_counter() - started,
    }


def table(runs: list[dict[str, Any]]) -> str:
    """Tabulate Dice and ε by noise multiplier, as Markdown."""
    sites = sorted(runs[0]["sites"])
    lines = [f"| noise | multiplier | test Dice by seed | mean | ε | {' | '.join(sites)} |"]
    lines.append(f"|---|---|---|---:|---|{'---:|' * len(sites)}")
    for where, noise in dict.fromkeys((run["where"], run["noise"]) for run in runs):
        group = [run for run in runs if (run["where"], run["noise"]) == (where, noise)]
        dice = [run["dice"] for run in group]
        spent = list(group[0]["epsilon"].values())
        if noise in (PLAIN, CLIPPED) or not spent:
            epsilon = ""
        else:
            epsilon = " to ".join(dict.fromkeys(f"{edge:.3g}" for edge in (min(spent), max(spent))))
        cells = [
            where,
            noise,
            ", ".join(f"{score:.3f}" for score in dice),
            f"{statistics.fmean(dice):.3f}",
            epsilon,
            *(f"{statistics.fmean(run['sites'][site] for run in group):.3f}" for site in sites),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run missing trainings, then print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--data", type=Path, required=True, help="folder of the sites' folders")
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--site", nargs="*", default=[CLIPPED, "0.1", "0.3", "1", "4"], help="multipliers")
    arguments.add_argument("--site-clip", type=float, default=1.0, help="of a case's gradient")
    arguments.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    arguments.add_argument("--rounds", type=int, default=4)
    arguments.add_argument("--steps", type=int, default=75, help="a round and site")
    arguments.add_argument("--channels", nargs="+", type=int, default=[8, 16])
    arguments.add_argument("--batch-size", type=int, default=8)
    arguments.add_argument("--lr", type=float, default=0.005)
    arguments.add_argument("--halve", action="store_true", help="half the resolution in the plane")
    arguments.add_argument("--limit", type=int, default=None, help="cases of each split and site")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    file = options.out / "numbers.json"
    options.out.mkdir(parents=True, exist_ok=True)
    numbers: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"runs": []}
    with tempfile.TemporaryDirectory() as folder:
        data = halved(options.data, Path(folder), options.limit) if options.halve else options.data
        sites = find_sites(data, limit=options.limit)
        done = {(run["where"], run["noise"], run["seed"]) for run in numbers["runs"]}
        levels = [(PLAIN, PLAIN, 0.0)]
        levels += [(SITE, noise, options.site_clip) for noise in options.site]
        for seed, (where, noise, clip) in itertools.product(options.seeds, levels):
            if (where, noise, seed) in done:
                continue
            config = configure(
                sites,
                methods=parse_methods("fedavg"),
                rounds=options.rounds,
                local_steps=options.steps,
                limit=options.limit,
                seed=seed,
                network="unet",
                network_args={
                    "channels": options.channels,
                    "strides": [2] * (len(options.channels) - 1),
                    "norm": "instance",
                },
                batch_size=options.batch_size,
                learning_rate=options.lr,
            )
            run = train(config, data, [site.name for site in sites], policy(where, noise, clip))
            numbers["runs"].append({"where": where, "noise": noise, "clip": clip, **run})
            settings = {**config.to_dict(), "seed": options.seeds, "methods": None}
            numbers.update(delta=DELTA, hardware=hardware(), config=settings)
            write_json(file, numbers)
            print(f"{where} {noise:5s} seed {seed}: {run['dice']:.3f}, {run['seconds']:.0f} s", flush=True)
    print(table(numbers["runs"]))


if __name__ == "__main__":
    main()
