r"""Promises kept and broken by site: thresholds calibrated locally, on pooled patients, and at another site.

    python benchmarks/promises.py --work DIR --out docs/results/promises
    python benchmarks/promises.py --work DIR --out docs/results/promises/lgg --run RUN --data LGG

Phantom sites with different scanners train one model together. Other patients of the same scanners are never
trained on: their losses at every threshold go to `losses.npz`, and a second call continues from there. A draw
calibrates on some patients of a site and tests on the rest. *Local* calibrates on the site's own patients,
*pooled* on as many of every site, *alike* on patients of all sites in one pot. `numbers.json` has, for each
number of patients, the mean missed share over the draws and the share of draws above the promise.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measure import hardware, parser

from medfedaug.data.phantom import make_phantom
from medfedaug.data.sites import find_sites
from medfedaug.federation.job_folder import RESULTS
from medfedaug.hospital.assurance.calibrate import measure
from medfedaug.hospital.assurance.options import CalibrationOptions
from medfedaug.hospital.assurance.risk_control import controlled_level
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.simulate import simulate
from medfedaug.utils.files import write_json

MISS, CONFIDENCE = 0.1, 0.9
MARGIN = 0.25  # of `medfedaug.hospital.assurance.calibrate`
SIZES = (5, 10, 20, 50, 100, 200)


def trained(work: Path, options: Any) -> Path:
    """Train the model once."""
    data, out = work / "train", work / "run"
    if not data.exists():
        make_phantom(data, options.sites, options.train_patients, options.shape, seed=0)
    if not (out / RESULTS).exists():
        settings = {"rounds": options.rounds, "local_epochs": 2, "batch_size": 8, "learning_rate": 0.003}
        settings |= {"engine": "inprocess", "schedule": "cosine", "report": False}
        simulate(data, out, methods=options.methods, network_args={"features": options.features}, **settings)
    return out


def losses_of(work: Path, options: Any) -> dict[str, Any]:
    """Predict patients who trained no weight; return losses, sizes and moments by site."""
    pool, splits = options.data or work / "pool", ["validation", "test"] if options.data else ["test"]
    if not pool.exists():
        sites = make_phantom(pool, options.sites, options.patients, options.shape, seed=1, scanner_seed=0)
        for site in sites:
            listing = site / "dataset.json"
            content = json.loads(listing.read_text())
            rows = [row for split in ("training", "validation", "test") for row in content[split]]
            listing.write_text(json.dumps({**content, "training": [], "validation": [], "test": rows}))
    run, arrays = FinishedRun.open(options.run or trained(work, options)), {}
    name = run.config.classes[1]
    for site in (site for site in find_sites(pool) if site.trains or not options.data):
        of_splits = [CalibrationOptions(split=split, device="cpu") for split in splits]
        parts = [measure(run, pool, site.name, [name], one) for one in of_splits]
        curves = [curve for part in parts for own in part.curves[name].values() for curve in own]
        arrays[f"loss/{site.name}"] = np.concatenate([p.losses(name) for p in parts]).astype(np.float32)
        arrays[f"extra/{site.name}"] = np.stack(
            [(curve.size - curve.plain_size) * curve.unit for curve in curves]
        ).astype(np.float32)
        arrays[f"plain/{site.name}"] = np.array([[c.plain_loss, c.plain_size * c.unit] for c in curves])
        arrays[f"moments/{site.name}"] = np.concatenate([part.moments for part in parts])
        print(f"{site.name}: {len(curves)} patients", flush=True)
    return arrays


def drawn(
    own: np.ndarray, others: Sequence[np.ndarray], size: int, draws: int, confidence: float | None = None
) -> dict[str, float] | None:
    """Calibrate on `size` patients of `own`, and as many of each of `others`; test on the rest of `own`."""
    random, missed = np.random.default_rng(size), []
    for _ in range(draws):
        order = random.permutation(len(own))
        rows = [own[order[:size]]]
        rows += [o[random.choice(len(o), min(size, len(o)), replace=False)] for o in others]
        level = controlled_level(np.concatenate(rows), MISS, confidence)
        if level is None:
            return None
        missed.append(float(own[order[size:], level].mean()))
    spread = float(np.std(missed) / np.sqrt(draws))
    above = float(np.mean(np.array(missed) > MISS))
    return {"missed": float(np.mean(missed)), "standard_error": spread, "draws_above": above}


def unpromised(own: np.ndarray, other: np.ndarray, size: int, draws: int) -> float:
    """Return the share of images outside the ranges of `size` calibrated ones, by the rule of `predict`."""
    random, shares = np.random.default_rng(size), []
    for _ in range(draws):
        order = random.permutation(len(own))
        low, high = own[order[:size]].min(axis=0), own[order[:size]].max(axis=0)
        low, high = low - MARGIN * (high - low), high + MARGIN * (high - low)
        tested = own[order[size:]] if other is own else other
        shares.append(((tested < low) | (tested > high)).any(axis=1).mean())
    return float(np.mean(shares))


def numbers(arrays: Mapping[str, np.ndarray], draws: int) -> dict[str, Any]:
    """Return the tables of the record."""
    sites = sorted(name.partition("/")[2] for name in arrays if name.startswith("loss/"))
    loss = {site: arrays[f"loss/{site}"].astype(np.float64) for site in sites}
    moments = {site: arrays[f"moments/{site}"].reshape(len(loss[site]), -1) for site in sites}
    pot = np.concatenate([*loss.values()])
    found = {site: controlled_level(rows, MISS) for site, rows in loss.items()}
    levels = {site: level for site, level in found.items() if level is not None}
    calibrated: dict[str, Any] = {}
    for size in SIZES:
        by_site: dict[str, Any] = {}
        for site, own in loss.items():
            if size >= len(own):
                continue
            others = [rows for name, rows in loss.items() if name != site]
            by_site[site] = {
                "local": drawn(own, (), size, draws),
                "local, 90% confidence": drawn(own, (), size, draws, CONFIDENCE),
                "pooled": drawn(own, others, size, draws),
            }
        if by_site:
            calibrated[str(size)] = {"sites": by_site, "alike": drawn(pot, (), size, draws)}
    return {
        "miss": MISS,
        "draws": draws,
        "patients": {site: len(rows) for site, rows in loss.items()},
        "plain": {site: float(arrays[f"plain/{site}"][:, 0].mean()) for site in sites},
        "plain_ml": {site: float(np.median(arrays[f"plain/{site}"][:, 1])) for site in sites},
        "extra_ml": {
            site: np.quantile(arrays[f"extra/{site}"][:, level], [0.5, 0, 1]).tolist()
            for site, level in levels.items()
        },
        "calibrated": calibrated,
        "of_another_site": {
            site: {name: float(rows[:, level].mean()) for name, rows in loss.items()}
            for site, level in levels.items()
        },
        "without_promise": {
            site: {name: unpromised(moments[site], other, 50, draws) for name, other in moments.items()}
            for site in sites
            if len(moments[site]) > 50
        },
    }


def show(record: Mapping[str, Any]) -> None:
    """Print the tables."""
    for kind in ("local", "local, 90% confidence", "pooled"):
        print(f"\n{kind}: missed in the mean (draws above {record['miss']:.0%})\n")
        print(f"| patients | {' | '.join(record['patients'])} |")
        print(f"|---:|{'---:|' * len(record['patients'])}")
        for size, entry in record["calibrated"].items():
            cells = [entry["sites"].get(site, {kind: None})[kind] for site in record["patients"]]
            texts = [f"{c['missed']:.3f} ({c['draws_above']:.0%})" if c else "nothing" for c in cells]
            print(f"| {size} | {' | '.join(texts)} |")
    for kind in ("of_another_site", "without_promise"):
        print(f"\n{kind}\n\n| calibrated at | {' | '.join(record['patients'])} |")
        print(f"|---|{'---:|' * len(record['patients'])}")
        for site, row in record[kind].items():
            print(f"| {site} | {' | '.join(f'{value:.3f}' for value in row.values())} |")


def main() -> None:
    """Measure once, then draw and write the numbers."""
    arguments = parser(__doc__)
    arguments.add_argument("--work", type=Path, required=True, help="folder for images and the run")
    arguments.add_argument("--out", type=Path, required=True, help="folder of the record")
    arguments.add_argument("--run", type=Path, help="a finished run, instead of phantoms; with --data")
    arguments.add_argument("--data", type=Path, help="its sites: validation and test cases are measured")
    arguments.add_argument("--sites", type=int, default=4)
    arguments.add_argument("--patients", type=int, default=260, help="patients of each site, not trained on")
    arguments.add_argument("--train-patients", type=int, default=30)
    arguments.add_argument("--shape", type=int, nargs=3, default=(40, 40, 6))
    arguments.add_argument("--features", type=int, nargs=6, default=[8, 16, 32, 64, 64, 8])
    arguments.add_argument("--rounds", type=int, default=20)
    arguments.add_argument("--methods", default="fedavg")
    arguments.add_argument("--draws", type=int, default=200)
    options = arguments.parse_args()
    record = options.out / "losses.npz"
    options.out.mkdir(parents=True, exist_ok=True)
    if not record.exists():
        options.work.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(record, **losses_of(options.work, options))
    with np.load(record) as arrays:
        content = {"hardware": hardware(), **numbers(arrays, options.draws)}
    write_json(options.out / "numbers.json", content)
    show(content)


if __name__ == "__main__":
    main()
