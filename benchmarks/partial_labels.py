"""Sites with outlines of different structures: Dice of own and borrowed classes, by method.

    python benchmarks/partial_labels.py --federations usual lgg --lgg DATA --runs ... --out FOLDER

Runs in the record are not repeated.
"""

import argparse
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from measure import hardware, parser
from scipy.ndimage import binary_fill_holes, binary_opening

from medfedaug.data.phantom import make_phantom
from medfedaug.data.sites import MANIFEST, find_sites
from medfedaug.methods import parse_methods
from medfedaug.research.datasets.partial_phantom import TRUTH, annotate_apart
from medfedaug.runs.evaluate import evaluate_model
from medfedaug.simulate import configure, simulate

ALIKE, ODD, USUAL = (0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 2.0, 0.0), (1.0, 1.0, 1.0, 1.0)
# By name: shifts of the scanners, and outlined structures (`annotate_apart`).
FEDERATIONS: dict[str, tuple[Sequence[float], dict[str, Any]]] = {
    "alike": (ALIKE, {}),
    "odd": (ODD, {}),
    "one without outlines": (ALIKE, {"apart": False, "unlabelled": ["site_C"]}),
    "odd one without outlines": (ODD, {"apart": False, "unlabelled": ["site_C"]}),
    "usual": (USUAL, {}),
    "usual, 48 rounds": (USUAL, {}),
    "lgg": ((), {}),
    "lgg, 4 epochs": ((), {}),
    "lgg, 48 rounds": ((), {}),
}
# By name: whether everything is outlined, methods, and the partial loss; without one, methods are added.
RUNS: dict[str, tuple[bool, str, str | None]] = {
    "full labels": (True, "fedavg", "marginal"),
    "each site alone": (False, "single", "marginal"),
    "default": (False, "fedavg", None),
    "naive": (False, "fedavg", "none"),
    "marginal": (False, "fedavg", "marginal"),
    "exclusion": (False, "fedavg", "exclusion"),
    "class_mean": (False, "class_mean", "marginal"),
    "condist": (False, "condist", "marginal"),
    "teacher": (False, "teacher", "marginal"),
}
REMEDIES = ("", "fedrdn")
NETWORK = {"channels": [16, 32, 64, 64], "strides": [2, 2, 2], "num_res_units": 1, "norm": "batch"}
LONG = {"rounds": 30, "local_epochs": 1, "batch_size": 4, "learning_rate": 0.005, "network_args": NETWORK}
SHORT = {
    **{"rounds": 12, "local_epochs": 4, "batch_size": 16, "learning_rate": 0.003, "augmentation": "none"},
    "network_args": {**NETWORK, "channels": [8, 16, 32, 32]},
}
SETTINGS = {
    "usual": SHORT,
    "usual, 48 rounds": {**SHORT, "rounds": 48, "local_epochs": 1},
    "lgg": {**SHORT, "local_epochs": 1},
    "lgg, 4 epochs": SHORT,
    "lgg, 48 rounds": {**SHORT, "rounds": 48, "local_epochs": 1},
}
KINDS = ("own", "borrowed")


def make_federation(
    folder: Path, name: str, seed: int, options: argparse.Namespace
) -> dict[str, tuple[str, ...]]:
    """Make the training sites of a seed in ``seed``, and the test patients of all by kind of structure."""
    shift, annotated = FEDERATIONS[name]
    sites, tests = folder / str(seed), folder / "all"
    if name.startswith("lgg"):
        make_lgg(sites, options.lgg, options.patients)
    else:
        shape = {"shape": (48, 48, 8), "classes": 5, "shift": shift, "scanner_seed": 1}
        make_phantom(sites, patients=options.patients, seed=seed, **shape)
        if not tests.exists():
            make_phantom(tests, patients=30, seed=1000, **shape)
    labelled = annotate_apart(sites, **annotated)
    if not tests.exists():
        shutil.copytree(sites / TRUTH, tests)
    for kind in KINDS if not (folder / KINDS[0]).exists() else ():
        for site in sorted(path.parent for path in tests.glob("*/dataset.json")):
            keep_structures(site, folder / kind / site.name, labelled[site.name], own=kind == "own")
    return labelled


def make_lgg(out: Path, source: Path, patients: int) -> None:
    """Write the first patients of four institutions at half their resolution, with two structures.

    The abnormality is the readers'; the head around it follows from the intensities.
    """
    for site in ("CS", "DU", "FG", "HT"):
        content = json.loads((source / site / "dataset.json").read_text())
        content["labels"] = {"0": "background", "1": "abnormality", "2": "head"}
        for split, share in (("training", 0.6), ("validation", 0.2), ("test", 0.2)):
            content[split] = content[split][: max(1, round(share * patients))]
            for row in content[split]:
                image, label = (nib.load(source / site / row[kind]) for kind in ("image", "label"))
                volume, lesion = (np.asarray(file.dataobj)[::2, ::2] for file in (image, label))
                head = binary_fill_holes(binary_opening(volume > 25))
                classes = np.where(lesion > 0, 1, 2 * head).astype(np.uint8)
                for kind, values in (("image", volume), ("label", classes)):
                    path = out / site / row[kind]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    nib.save(nib.Nifti1Image(values, np.diag([2.0, 2.0, 1.0, 1.0])), path)
        (out / site / "dataset.json").write_text(json.dumps(content))
    (out / MANIFEST).write_text("{}")  # `annotate_apart` adds to it


def keep_structures(site: Path, out: Path, outlined: Sequence[str], *, own: bool) -> None:
    """Copy a site with the structures that it outlined, or with the others, if any."""
    content = json.loads((site / "dataset.json").read_text())
    numbers = {int(number): name for number, name in content["labels"].items() if number != "0"}
    kept = [number for number, name in numbers.items() if (name in outlined) == own]
    if not kept:
        return
    shutil.copytree(site, out)
    content["labels"] = {"0": content["labels"]["0"], **{str(number): numbers[number] for number in kept}}
    content["labelled"] = [numbers[number] for number in kept]
    (out / "dataset.json").write_text(json.dumps(content))
    for path in (out / "labels").iterdir():
        image = nib.load(path)
        labels = np.asarray(image.dataobj)
        nib.save(
            nib.Nifti1Image(np.where(np.isin(labels, kept), labels, 0), image.affine, image.header), path
        )


def one(folder: Path, run: tuple[str, str, str, int], options: argparse.Namespace) -> dict[str, Any]:
    """Train once, and score every class at every site by the truth."""
    federation, name, remedy, seed = run
    full, methods, loss = RUNS[name]
    data = folder / str(seed) / TRUTH if full else folder / str(seed)
    started = time.process_time()
    sites, out = find_sites(data), Path(tempfile.mkdtemp(dir=folder))
    without_outlines = FEDERATIONS[federation][1].get("unlabelled", ())
    config = configure(
        sites,
        methods=tuple(parse_methods(",".join(filter(None, (methods, remedy))))),
        seed=seed,
        validate_every=5,
        network="unet",
        **{**SETTINGS.get(federation, LONG), **({"rounds": options.rounds} if options.rounds else {})},
        partial_loss=loss,
        unlabelled_weight=1,
        # Methods that need outlines leave out a site without any.
        holdout=() if full or methods in ("condist", "teacher") else tuple(without_outlines),
    )
    simulate(data, out / "run", config, engine="inprocess", sites=sites, report=False)
    seconds = time.process_time() - started
    return {
        "seconds": round(seconds, 1),
        **{kind: scores(out / "run", folder / kind) for kind in KINDS if (folder / kind).exists()},
    }


def scores(run: Path, data: Path) -> dict[str, Any]:
    """Return the Dice of each class and of each test patient, by site."""
    return {
        site: {
            "classes": {label: row["dice"] for label, row in entry.get("classes", {}).items()},
            "patients": entry["cases"],
        }
        for site, entry in evaluate_model(run, data)["sites"].items()
    }


def patients(run: dict[str, Any], kind: str) -> dict[tuple[str, str], float]:
    """Return the Dice of the patients with one of the structures."""
    return {
        (site, case): score
        for site, entry in run.get(kind, {}).items()
        for case, score in entry["patients"].items()
        if score is not None
    }


def over_sites(run: dict[str, Any], kind: str, only: str = "") -> float:
    """Return the mean over the sites of their patients' mean Dice."""
    dice = patients(run, kind)
    sites = [only] if only else sorted({site for site, _ in dice})
    values = [[score for (name, _), score in dice.items() if name == site] for site in sites]
    return statistics.fmean(statistics.fmean(some) for some in values if some) if any(values) else math.nan


def seeds_mean(values: Sequence[float]) -> str:
    """Show a mean over seeds, and its range."""
    if any(map(math.isnan, values)):
        return "–"
    ends = f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{ends}"


def table(record: dict[str, Any]) -> str:
    """Tabulate the means over the seeds for each federation, method and remedy."""
    lines = [
        "| federation | method | own | borrowed | site_C: borrowed | seeds |",
        "|---|---|---|---|---|---:|",
    ]
    for federation, methods in record["runs"].items():
        for name, runs in methods.items():
            cells = [
                seeds_mean([over_sites(run, *what) for run in runs.values()])
                for what in (("own",), ("borrowed",), ("borrowed", "site_C"))
                if runs
            ]
            if cells:
                lines.append(f"| {federation} | {name} | {' | '.join(cells)} | {len(runs)} |")
    return "\n".join(lines) + "\n"


def runs(options: argparse.Namespace) -> Iterator[tuple[str, str, str, int]]:
    """Yield every requested federation, run, remedy and seed, seed by seed."""
    yield from (
        (federation, name, remedy, seed)
        for seed in options.seeds
        for federation in options.federations
        for remedy in options.remedies
        for name in options.runs
    )


def main() -> None:
    """Make the missing runs, and write numbers and table after each."""
    arguments = parser(__doc__)
    arguments.add_argument("--out", type=Path, required=True, help="for numbers.json and table.md")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--rounds", type=int, help="instead of those of the federation")
    arguments.add_argument("--patients", type=int, default=12, help="of a site")
    arguments.add_argument("--lgg", type=Path, help="folder of the sites CS, DU, FG and HT, for lgg")
    arguments.add_argument("--federations", nargs="+", default=list(FEDERATIONS), choices=list(FEDERATIONS))
    arguments.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    arguments.add_argument("--remedies", nargs="+", default=list(REMEDIES))
    options = arguments.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "numbers.json"
    record = (
        json.loads(file.read_text())
        if file.exists()
        else {"hardware": hardware(), "labelled": {}, "runs": {}}
    )
    with tempfile.TemporaryDirectory() as folder:
        for run in runs(options):
            federation, name, remedy, seed = run
            method = "+".join(filter(None, (name, remedy)))
            done = record["runs"].setdefault(federation, {}).setdefault(method, {})
            if str(seed) in done:
                continue
            data = Path(folder) / federation.replace(" ", "_")
            if not (data / str(seed)).exists():
                record["labelled"][federation] = make_federation(data, federation, seed, options)
            done[str(seed)] = one(data, run, options)
            file.write_text(json.dumps(record) + "\n")
            (options.out / "table.md").write_text(table(record))
            print(federation, method, seed, done[str(seed)]["seconds"], flush=True)


if __name__ == "__main__":
    main()
