"""Accuracy against ε: FedRDN's and FedFA's statistics with noise, on sites of volumes.

    python benchmarks/privacy_epsilon.py --data DIR --out docs/results/privacy

There are two parts. The first measures the effect of noise on the statistics and on γ: many draws for the
same contributions, compared with exact statistics. The second measures its effect on the trained
model, with one training for each method, ε and seed. Trainings that are already in the output's JSON are not
repeated.

ε is of one site for the whole job, at δ = 1e-5, for the statistics only: model weights, losses and scores are
sent without noise.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import nibabel
import numpy as np
import torch
from measure import hardware, parser
from opacus.accountants.utils import get_noise_multiplier

from medfedaug.config.run import RunConfig
from medfedaug.data.sites import find_sites
from medfedaug.federation import FederationServer, SiteTrainer, run_in_process
from medfedaug.federation.server.output import write_json
from medfedaug.hospital.privacy import PrivacyPolicy
from medfedaug.hospital.privacy.guard import PrivacyGuard, SitePrivacy
from medfedaug.methods import parse_methods
from medfedaug.methods.base import Bounds, Contributions, Payload, SiteExchange
from medfedaug.methods.fedfa import FedFAServer
from medfedaug.metrics.significance import PairedTest, paired_t_test
from medfedaug.simulate import configure

DELTA = 1e-5
# Chosen without the sites' data: 8-bit MRI is mostly dark, and features come after batch norm.
CLIP = {
    "intensity_mean": (0.0, 100.0),
    "intensity_std": (1.0, 100.0),
    "feature_mean": (-0.5, 2.5),
    "feature_std": (0.0, 2.5),
}
EXACT, CLIPPED = "none", "clipped"
METHODS = ("fedrdn", "fedfa")


def halved(data: Path, out: Path, limit: int | None) -> Path:
    """Halve the sites' in-plane resolution; a label remains where at least half of the voxels have it.

    Trainings then take a quarter of the time.
    """
    for site in find_sites(data, limit=limit):
        listing: dict[str, Any] = {"labels": {str(i): name for i, name in enumerate(site.classes)}}
        for split, cases in site.cases.items():
            listing[split] = []
            for case in cases:
                entry = {}
                for kind, source in (("image", case.image), ("label", Path(case.label))):
                    volume = np.asarray(nibabel.load(source).dataobj, dtype=np.float32)
                    x, y = (n - n % 2 for n in volume.shape[:2])
                    blocks = volume[:x, :y].reshape(x // 2, 2, y // 2, 2, -1).mean(axis=(1, 3))
                    small = np.rint(blocks) if kind == "image" else blocks >= 0.5
                    entry[kind] = f"{kind}s/{case.name}.nii"
                    path = out / site.name / entry[kind]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    nibabel.save(nibabel.Nifti1Image(small.astype(np.uint8), np.eye(4)), path)
                listing[split].append(entry)
        (out / site.name / "dataset.json").write_text(json.dumps(listing))
    return out


def policy(level: str, releases: int) -> PrivacyPolicy | None:
    """Make a policy: ``"none"`` as in the paper, ``"clipped"`` with negligible noise, otherwise with ε."""
    if level == EXACT:
        return None
    target = {"target_epsilon": float(level), "target_delta": DELTA} if level != CLIPPED else {}
    noise = get_noise_multiplier(**target, sample_rate=1.0, steps=releases) if target else 1e-9
    return PrivacyPolicy(min_images=1, noise_multiplier=noise, delta=DELTA, epsilon=1e30, clip=dict(CLIP))


class Recorded(SiteExchange):
    """Contributions that are computed once and released many times."""

    def __init__(self, contributions: Contributions) -> None:
        values = list(contributions.values)
        self.contributed = dataclasses.replace(contributions, values=values)

    def collect(self) -> Payload:
        """Return the mean without bounds or noise."""
        values = [v for v in self.contributed.values if not any(t.isnan().any() for t in v.values())]
        return {key: torch.stack([v[key].double() for v in values]).mean(dim=0) for key in values[0]}

    def apply(self, payload: Payload) -> None:
        """Do nothing."""

    def contributions(self, bounds: Bounds) -> Contributions:
        """Return the recorded contributions."""
        return self.contributed

    def clipped_share(self) -> float:
        """Return the share of contributed numbers outside the bounds."""
        outside = total = 0
        for payload in self.contributed.values:
            for key, value in payload.items():
                low, high = CLIP[self.contributed.kinds[key]]
                outside += int(((value < low) | (value > high)).sum())
                total += value.numel()
        return outside / total


def record(
    config: RunConfig, data: Path, server: FederationServer, method: str
) -> Iterator[tuple[str, Recorded]]:
    """Yield each training site's contributions; for FedFA with the last global model."""
    for site in sorted(server.sites):
        trainer = SiteTrainer(config, data)
        trainer.open(site)
        weights = {key: server.state[key] for key in server.shared}
        trainer.receive(weights, once=server.test().once)
        part = trainer.parts[method]
        exchange = part.before_training or part.every_round
        assert exchange is not None
        yield site, Recorded(exchange.contributions(lambda kind: CLIP[kind]))


def release(recorded: dict[str, Recorded], chosen: PrivacyPolicy | None) -> dict[str, Payload]:
    """Draw the sites' messages once."""
    if chosen is None:
        return {site: exchange.collect() for site, exchange in recorded.items()}
    messages = {}
    for site, exchange in recorded.items():
        values = exchange.contributed.values
        guard = PrivacyGuard(site, chosen, cases=len(list(values)))
        guard.observe("statistics", exchange)
        messages[site] = guard.collect("statistics", exchange)
    return messages


def gammas(messages: dict[str, Payload]) -> dict[str, torch.Tensor]:
    """Compute FedFA's γ of the sites' messages for all layers, for means and deviations."""
    first = next(iter(messages.values()))
    server = FedFAServer({key.rsplit("/", 1)[0]: v.numel() for key, v in first.items()})
    for site, payload in messages.items():
        server.accept(site, payload)
    result = server.result()
    return {
        which: torch.cat([v.double() for key, v in result.items() if key.endswith(which)])
        for which in ("gamma_mean", "gamma_std")
    }


def statistics_error(
    recorded: dict[str, Recorded], method: str, levels: list[str], releases: int, draws: int
) -> dict[str, Any]:
    """Return the root mean square error of the messages by key and site, and FedFA's comparison of γ."""
    exact = release(recorded, None)
    results: dict[str, Any] = {}
    for level in levels:
        chosen = policy(level, releases)
        squares: dict[str, dict[str, list[float]]] = {site: {} for site in recorded}
        agreement: dict[str, list[float]] = {}
        reference = gammas(exact) if method == "fedfa" else {}
        for _ in range(draws if chosen is not None and level != CLIPPED else 1):
            messages = release(recorded, chosen)
            for site, payload in messages.items():
                for key, value in payload.items():
                    kind = key.rsplit("/", 1)[-1]
                    error = float((value - exact[site][key]).square().mean())
                    squares[site].setdefault(kind, []).append(error)
            if reference:
                for which, gamma in gammas(messages).items():
                    pair = torch.stack([gamma, reference[which]])
                    agreement.setdefault(which, []).append(float(torch.corrcoef(pair)[0, 1]))
        results[level] = {
            "noise_multiplier": 0.0 if chosen is None else chosen.noise_multiplier,
            "rms_error": {
                site: {kind: statistics.fmean(v) ** 0.5 for kind, v in kinds.items()}
                for site, kinds in squares.items()
            },
            **(
                {"gamma_correlation": {k: statistics.fmean(v) for k, v in agreement.items()}}
                if agreement
                else {}
            ),
        }
    spread = {
        kind: statistics.fmean(
            float(torch.stack([exact[s][key].double() for s in exact]).std(dim=0, unbiased=False).mean())
            for key in next(iter(exact.values()))
            if key.rsplit("/", 1)[-1] == kind
        )
        for kind in ("mean", "std")
    }
    return {
        "levels": results,
        "between_sites": spread,
        "clipped_share": {site: exchange.clipped_share() for site, exchange in recorded.items()},
        "cases": {site: len(list(e.contributed.values)) for site, e in recorded.items()},
    }


def train(
    config: RunConfig, data: Path, sites: list[str], level: str
) -> tuple[dict[str, Any], FederationServer]:
    """Train one federation; return test Dice by site and patient, and the recorded ε of the sites."""
    releases = config.rounds if config.methods[0]["name"] == "fedfa" else 1
    started = time.perf_counter()
    chosen = policy(level, releases)
    limits = {"privacy": partial(SitePrivacy, chosen)} if chosen else {}
    server = run_in_process(config, data, sites, "cpu", **limits)
    results = server.results()
    last = results["rounds"][-1]["sites"]
    return {
        "method": config.methods[0]["name"],
        "level": level,
        "seed": config.seed,
        "dice": results["test"]["mean"]["dice"],
        "cases": {
            f"{site}/{case}": dice
            for site, entry in results["test"]["sites"].items()
            for case, dice in entry["cases"].items()
        },
        "epsilon": {s: e["privacy/epsilon"] for s, e in last.items() if "privacy/epsilon" in e},
        "selected_round": results["selected_round"],
        "seconds": time.perf_counter() - started,
    }, server


def paired(runs: list[dict[str, Any]], method: str, level: str) -> PairedTest:
    """Compare Dice with the same method without noise, by patient. Dice is averaged over the seeds."""
    by_seed = {(r["method"], r["level"], r["seed"]): r["cases"] for r in runs}
    seeds = [s for m, lv, s in by_seed if (m, lv) == (method, level) and (m, EXACT, s) in by_seed]
    cases = [case for case, dice in by_seed[method, EXACT, seeds[0]].items() if dice is not None]
    with_noise, without = (
        [statistics.fmean(by_seed[method, chosen, s][case] for s in seeds) for case in cases]
        for chosen in (level, EXACT)
    )
    return paired_t_test(with_noise, without)


def table(numbers: dict[str, Any]) -> str:
    """Tabulate Dice and the error of the statistics for each ε, as Markdown."""
    runs, lines = numbers["runs"], []
    order = list(dict.fromkeys((r["method"], r["level"]) for r in runs))
    lines.append(
        "| method | ε | z | test Dice by seed | mean | to ε = none, by patient | error / spread | γ agrees |"
    )
    lines.append("|---|---:|---:|---|---:|---|---:|---:|")
    for method, level in sorted(order, key=lambda pair: pair[0]):
        dice = [r["dice"] for r in runs if (r["method"], r["level"]) == (method, level)]
        cells = [method, level, "", ", ".join(f"{d:.3f}" for d in dice), f"{statistics.fmean(dice):.3f}"]
        if level == EXACT:
            cells += ["", "", ""]
        else:
            test = paired(runs, method, level)
            entry = numbers["statistics"][method]["levels"][level]
            gamma = entry.get("gamma_correlation", {})
            cells[2] = f"{entry['noise_multiplier']:.2f}"
            cells.append(f"{test.difference:+.3f} ({test.low:+.3f} to {test.high:+.3f})")
            cells.append(f"{relative_error(numbers, method, level):.2g}")
            cells.append(" and ".join(f"{value:.2f}" for value in gamma.values()))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def relative_error(numbers: dict[str, Any], method: str, level: str) -> float:
    """Return the root mean square error of the messages, relative to the spread of the exact values."""
    entry = numbers["statistics"][method]
    errors = entry["levels"][level]["rms_error"].values()
    ratios = [
        statistics.fmean(e[kind] ** 2 for e in errors) ** 0.5 / spread
        for kind, spread in entry["between_sites"].items()
    ]
    return statistics.fmean(ratios)


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Plot test Dice and the error of the statistics over ε."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = numbers["runs"]
    levels = list(dict.fromkeys(r["level"] for r in runs))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    for offset, method in zip((-0.12, 0.12), METHODS, strict=True):
        colour = {"fedrdn": "tab:blue", "fedfa": "tab:orange"}[method]
        for index, level in enumerate(levels):
            dice = [r["dice"] for r in runs if (r["method"], r["level"]) == (method, level)]
            left.scatter([index + offset] * len(dice), dice, s=14, color=colour, alpha=0.6)
            left.hlines(statistics.fmean(dice), index + offset - 0.1, index + offset + 0.1, color=colour)
        budgets = [level for level in levels if level not in (EXACT, CLIPPED)]
        errors = [relative_error(numbers, method, level) for level in budgets]
        right.plot([float(level) for level in budgets], errors, marker="o", color=colour, label=method)
    reference = [r["dice"] for r in runs if r["method"] == "fedavg"]
    left.axhspan(min(reference), max(reference), color="0.85", zorder=0)
    left.text(len(levels) - 0.55, max(reference), "fedavg", ha="right", va="bottom", fontsize=8, color="0.4")
    left.set_xticks(range(len(levels)), levels)
    left.set(xlabel="ε of a site (δ = 1e-5)", ylabel="test Dice, mean of sites", title="one dot a seed")
    right.axhline(1.0, color="0.6", linewidth=1)
    right.set(xscale="log", yscale="log", xlabel="ε of a site (δ = 1e-5)")
    right.set(ylabel="RMS error / spread between sites", title="error of the messages")
    right.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    """Run missing trainings, then write the numbers, the table and the plot."""
    arguments = parser(__doc__)
    arguments.add_argument("--data", type=Path, required=True, help="folder of the sites' folders")
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--epsilon", nargs="+", default=["32", "8", "2", "0.5"])
    arguments.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    arguments.add_argument("--rounds", type=int, default=6)
    arguments.add_argument("--features", nargs=6, type=int, default=[8, 16, 32, 32, 32, 8])
    arguments.add_argument("--batch-size", type=int, default=8)
    arguments.add_argument("--lr", type=float, default=0.002)
    arguments.add_argument("--halve", action="store_true", help="half the resolution in the plane")
    arguments.add_argument("--limit", type=int, default=None, help="cases of each split and site")
    arguments.add_argument("--draws", type=int, default=100, help="of noise, for the statistics' error")
    arguments.add_argument("--threads", type=int, default=1)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.halve:
            options.data = halved(options.data, Path(folder), options.limit)
        run_all(options)
    numbers = json.loads((options.out / "numbers.json").read_text())
    print(table(numbers))
    plot(numbers, options.out / "epsilon.png")


def run_all(options: argparse.Namespace) -> None:
    """Run every missing training."""
    torch.set_num_threads(options.threads)
    machine = hardware()
    print(machine)
    sites = find_sites(options.data, limit=options.limit)
    names = [site.name for site in sites]
    file = options.out / "numbers.json"
    options.out.mkdir(parents=True, exist_ok=True)
    numbers: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"runs": []}
    numbers.update(delta=DELTA, clip=CLIP, hardware=machine)
    levels = [EXACT, CLIPPED, *options.epsilon]
    done = {(run["method"], run["level"], run["seed"]) for run in numbers["runs"]}
    for seed in options.seeds:
        for method, level in [("fedavg", EXACT), *((m, level) for level in levels for m in METHODS)]:
            if (method, level, seed) in done:
                continue
            config = configure(
                sites,
                methods=parse_methods(method),
                rounds=options.rounds,
                limit=options.limit,
                seed=seed,
                network_args={"features": options.features},
                batch_size=options.batch_size,
                learning_rate=options.lr,
                intensity="by_method",  # the bounds of FedRDN's statistics are in grey levels
            )
            run, server = train(config, options.data, names, level)
            numbers["config"] = {**config.to_dict(), "methods": [], "seed": list(options.seeds)}
            numbers["runs"].append(run)
            if level == EXACT and seed == options.seeds[0] and method in METHODS:
                recorded = dict(record(config, options.data, server, method))
                releases = options.rounds if method == "fedfa" else 1
                numbers.setdefault("statistics", {})[method] = statistics_error(
                    recorded, method, levels, releases, options.draws
                )
            write_json(file, numbers)
            print(
                f"{method:8s} ε {level:8s} seed {seed}: Dice {run['dice']:.3f}, {run['seconds']:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
