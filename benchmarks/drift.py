"""False alarms of `medfedaug monitor`, and how soon it finds changes, for phantoms and LGG.

One model predicts the images of one site, changed copies of the last ones, and images of other sites. Their
measures are the record, from which a later call continues; rates come from random orders of the cases::

    OMP_NUM_THREADS=1 nice python benchmarks/drift.py --out docs/results/drift --lgg DATA/lgg_multisite
    python benchmarks/drift.py --out docs/results/drift --table
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from scipy.ndimage import gaussian_filter, zoom
from scipy.stats import binomtest

from medfedaug.data.phantom import make_phantom
from medfedaug.hospital.assurance.monitoring import Course, Monitor, SeenCase, case_p_value
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.runs.prediction.options import PredictionOptions
from medfedaug.runs.prediction.predict import predict_images
from medfedaug.simulate import simulate

Change = Callable[[np.ndarray, np.random.Generator], np.ndarray]
DRIFT_RATE, ORDERS = 1.0, 100
FEATURES = [8, 16, 16, 32, 32, 8]
USUAL = {"local_epochs": 3, "batch_size": 4, "engine": "inprocess", "network_args": {"features": FEATURES}}
SETTINGS: dict[str, dict[str, Any]] = {
    "phantom": {**USUAL, "rounds": 4, "image_size": 32},
    "lgg": {**USUAL, "rounds": 2, "image_size": 64, "holdout": ("DU",), "limit": 5},
}
OTHERS = {
    "phantom": {f"scanner of {site}, voxel size of site_A": site for site in ("site_B", "site_C")},
    "lgg": {f"hospital {site}": site for site in ("CS", "FG", "HT")},
}


@dataclass(frozen=True)
class Data:
    """Cases of one data set: those accepted, changed, and those of each order without a change."""

    site: str
    accepted: int
    changed: int
    later: int
    case_rate: float


DATA = {
    "phantom": Data(site="site_A", accepted=100, changed=40, later=200, case_rate=10.0),
    "lgg": Data(site="DU", accepted=30, changed=15, later=15, case_rate=33.0),
}


def _coarse(voxels: np.ndarray, factor: float) -> np.ndarray:
    small = zoom(voxels, (1 / factor, 1 / factor, 1), order=1)
    return zoom(small, np.array(voxels.shape) / small.shape, order=1)


def _steeper(voxels: np.ndarray, gamma: float) -> np.ndarray:
    low, span = voxels.min(), np.ptp(voxels)
    return low + span * ((voxels - low) / span) ** gamma


def _inverted(voxels: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    return voxels.max() + voxels.min() - voxels if rng.uniform() < share else voxels


CHANGES: dict[str, Change] = {
    **{f"gamma {g:g}": lambda v, _, g=g: _steeper(v, g) for g in (0.97, 0.9, 0.7)},
    **{
        f"noise of {s:.1%} of the range": lambda v, rng, s=s: v + rng.normal(0, s * np.ptp(v), v.shape)
        for s in (0.003, 0.01, 0.03)
    },
    **{f"blur of {b:g} pixels": lambda v, _, b=b: gaussian_filter(v, (b, b, 0)) for b in (0.25, 0.5, 1.0)},
    **{f"pixels {f:g} times as large, resampled": lambda v, _, f=f: _coarse(v, f) for f in (1.1, 1.5, 2.0)},
    "one image in four inverted": lambda v, rng: _inverted(v, 0.25, rng),
    "every image inverted": lambda v, rng: _inverted(v, 1.0, rng),
}


def prepare(name: str, work: Path, lgg: Path) -> tuple[FinishedRun, Path]:
    """Train a model, and return it with the folder of the sites to predict."""
    folder, training = (work / "later", work / "data") if name == "phantom" else (lgg, lgg)
    if name == "phantom":
        make_phantom(training, sites=3, patients=10, shape=(32, 32, 4), seed=11)
        make_phantom(folder, sites=3, patients=300, shape=(32, 32, 4), seed=12, scanner_seed=11)
    simulate(training, methods="fedavg", out=work / f"run_{name}", device="cpu", **SETTINGS[name])
    return FinishedRun.open(work / f"run_{name}"), folder


def measure(run: FinishedRun, folder: Path, name: str, condition: str, work: Path) -> Monitor:
    """Predict the cases of a condition, and return them as the reference of a monitor."""
    data, rng = DATA[name], np.random.default_rng(len(condition))
    files = sorted((folder / OTHERS[name].get(condition, data.site) / "images").glob("*.nii.gz"))
    home = nib.load(next((folder / data.site / "images").glob("*.nii.gz"))).affine
    (work / "images").mkdir()
    for file in files if condition == "same" else files[-data.changed :]:
        image = nib.load(file)
        voxels = CHANGES.get(condition, lambda v, _: v)(image.get_fdata(), rng).astype(np.float32)
        affine = home if name == "phantom" else image.affine
        nib.save(nib.Nifti1Image(voxels, affine), work / "images" / file.name)
    options = PredictionOptions(previews=False, device="cpu")
    predicted = predict_images(run, work / "images", work / "predicted", options)
    monitor = Monitor({}, {"drift": DRIFT_RATE})
    monitor.accept(predicted.cases)
    for made in ("images", "predicted"):
        shutil.rmtree(work / made)
    return monitor


def alarm(accepted: np.ndarray, later: np.ndarray) -> int:
    """Return the number of the later case with the alarm of the rule over time; 0 for none."""
    course = Course(accepted, DRIFT_RATE)
    for number, case in enumerate(later, start=1):
        course.add(case)
        if course.shares.max() >= 1:
            return number
    return 0


def analyse(name: str, record: Mapping[str, Any]) -> list[str]:
    """Return the results of a data set as lines of Markdown."""
    data, monitor = DATA[name], Monitor({}, {}, record["measures"])
    limit = data.case_rate / 1000 + 1e-12
    cases = {
        condition: monitor._comparable([SeenCase("", row) for row in rows])
        for condition, rows in record["conditions"].items()
    }
    same = cases.pop("same")
    alarms, single = 0, []
    for seed in range(ORDERS):
        order = np.random.default_rng(seed).permutation(len(same))
        accepted, later = same[order[: data.accepted]], same[order[data.accepted :]][: data.later]
        alarms += alarm(accepted, later) > 0
        single.append(np.mean([case_p_value(accepted, case) <= limit for case in later]))
    one = [case_p_value(same[: data.accepted], case) <= limit for case in same[data.accepted :]]
    low, high = binomtest(sum(one), len(one)).proportion_ci()
    lines = [
        f"{name}: {sum(one)} of {len(one)} later cases stand out ({low:.3f} to {high:.3f}); mean of orders "
        f"{np.mean(single):.4f}, stated {data.case_rate / 1000:g}. Drift in {alarms} of {ORDERS} orders of "
        f"{data.later} cases, stated at most {data.later * DRIFT_RATE / 1000:g}.",
        "",
        f"| {name} | stand out | drift found within {data.changed} cases | cases until then |",
        "|---|---:|---:|---:|",
    ]
    for condition, changed in cases.items():
        delays, shares = [], []
        for seed in range(ORDERS // 2):
            rng = np.random.default_rng(seed)
            accepted = same[rng.permutation(len(same) - data.changed)[: data.accepted]]
            later = rng.permutation(changed)
            delays.append(alarm(accepted, later))
            shares.append(np.mean([case_p_value(accepted, case) <= limit for case in later[:15]]))
        found = [delay for delay in delays if delay]
        delay = "{1:.0f} ({0:.0f} to {2:.0f})".format(*np.percentile(found, (10, 50, 90))) if found else "–"
        lines.append(f"| {condition} | {np.mean(shares):.0%} | {len(found) / len(delays):.0%} | {delay} |")
    return lines


def main() -> None:
    """Measure the missing conditions, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lgg", type=Path)
    parser.add_argument("--table", action="store_true", help="only from the record")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in DATA:
        file = args.out / f"{name}.json"
        record = json.loads(file.read_text()) if file.exists() else {"measures": [], "conditions": {}}
        missing = [c for c in ("same", *CHANGES, *OTHERS[name]) if c not in record["conditions"]]
        if missing and not args.table and (name == "phantom" or args.lgg):
            with tempfile.TemporaryDirectory() as work:
                run, folder = prepare(name, Path(work), args.lgg)
                for condition in missing:
                    found = measure(run, folder, name, condition, Path(work))
                    record["measures"] = found.measures
                    record["conditions"][condition] = [case.values for case in found.reference]
                    file.write_text(json.dumps(record) + "\n")
                    print(name, condition, flush=True)
        if record["conditions"]:
            print("\n".join(analyse(name, record)), flush=True)


if __name__ == "__main__":
    main()
