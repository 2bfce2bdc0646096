"""Phantom sites with outlines of different structures: Dice of own and borrowed classes, by method.

    python benchmarks/partial_labels.py --out docs/results/partial_labels --seeds 0 1 2

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

from medfedaug.data.phantom import make_phantom
from medfedaug.data.sites import find_sites
from medfedaug.methods import parse_methods
from medfedaug.metrics.significance import paired_t_test
from medfedaug.research.comparison.crossed import crossed_test, holm
from medfedaug.research.comparison.verdict import Elsewhere, chance, judge
from medfedaug.research.datasets.partial_phantom import TRUTH, annotate_apart
from medfedaug.runs.evaluate import evaluate_model
from medfedaug.simulate import configure, simulate

ALIKE, ODD = (0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 2.0, 0.0)
# By name: shifts of the scanners, and outlined structures (`annotate_apart`).
FEDERATIONS: dict[str, tuple[Sequence[float], dict[str, Any]]] = {
    "alike": (ALIKE, {}),
    "odd": (ODD, {}),
    "one without outlines": (ALIKE, {"apart": False, "unlabelled": ["site_C"]}),
    "odd one without outlines": (ODD, {"apart": False, "unlabelled": ["site_C"]}),
    "a quarter of the slices": (ALIKE, {"apart": False, "sparse": 0.25}),
}
# By name: whether everything is outlined, methods, and the partial loss.
RUNS = {
    "full labels": (True, "fedavg", "marginal"),
    "each site alone": (False, "single", "marginal"),
    "naive": (False, "fedavg", "none"),
    "marginal": (False, "fedavg", "marginal"),
    "exclusion": (False, "fedavg", "exclusion"),
    "class_mean": (False, "class_mean", "marginal"),
    "condist": (False, "condist", "marginal"),
    "teacher": (False, "teacher", "marginal"),
}
REMEDIES = ("", "fedrdn", "fedfa")
REFERENCE = "marginal"
NETWORK = {"channels": [16, 32, 64, 64], "strides": [2, 2, 2], "num_res_units": 1, "norm": "batch"}
KINDS = ("own", "borrowed")


def make_federation(folder: Path, name: str, patients: int, seed: int) -> dict[str, tuple[str, ...]]:
    """Make the training sites, and the test patients of all seeds by kind of structure."""
    shift, annotated = FEDERATIONS[name]
    shape = {"shape": (48, 48, 8), "classes": 5, "shift": shift, "scanner_seed": 1}
    make_phantom(folder / "sites", patients=patients, seed=seed, **shape)
    labelled = annotate_apart(folder / "sites", **annotated)
    make_phantom(folder / "all", patients=30, seed=1000, **shape)
    for kind in KINDS:
        for site in sorted(path.parent for path in (folder / "all").glob("*/dataset.json")):
            keep_structures(site, folder / kind / site.name, labelled[site.name], own=kind == "own")
    return labelled


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
    data = folder / "sites" / TRUTH if full else folder / "sites"
    started = time.perf_counter()
    sites, out = find_sites(data), Path(tempfile.mkdtemp(dir=folder.parent))
    without_outlines = FEDERATIONS[federation][1].get("unlabelled", ())
    config = configure(
        sites,
        methods=tuple(parse_methods(",".join(filter(None, (methods, remedy))))),
        seed=seed,
        rounds=options.rounds,
        local_epochs=1,
        validate_every=5,
        network="unet",
        batch_size=4,
        learning_rate=0.005,
        network_args=NETWORK,
        partial_loss=loss,
        unlabelled_weight=1,
        # Methods that need outlines leave out a site without any.
        holdout=() if full or methods in ("condist", "teacher") else tuple(without_outlines),
    )
    result = simulate(data, out / "run", config, engine=options.engine, sites=sites, report=False)
    seconds = time.perf_counter() - started
    return {
        "seconds": round(seconds, 1),
        "bytes_up": sum(entry["bytes_up"] for entry in result["rounds"]),
        "selected_round": result.get("selected_round"),
        **{kind: scores(out / "run", folder / kind) for kind in KINDS if (folder / kind).exists()},
    }


def scores(run: Path, data: Path) -> dict[str, Any]:
    """Return the Dice of each class and of each test patient, by site."""
    return {
        site: {
            "classes": rounded({label: row["dice"] for label, row in entry.get("classes", {}).items()}),
            "patients": rounded(entry["cases"]),
        }
        for site, entry in evaluate_model(run, data)["sites"].items()
    }


def rounded(dice: dict[str, float | None]) -> dict[str, float | None]:
    """Keep four digits of scores."""
    return {name: None if score is None else round(score, 4) for name, score in dice.items()}


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


def verdicts(methods: dict[str, dict[str, Any]], reference: str, kind: str) -> dict[str, str]:
    """Judge every method against the reference, over seeds and patients, by the rule of the package."""
    tests = {}
    for name, runs in methods.items():
        seeds = sorted(runs.keys() & methods[reference].keys())
        if name == reference or len(seeds) < 2:
            continue
        pairs = [(runs[seed], methods[reference][seed]) for seed in seeds]
        means = [[over_sites(run, kind) for run in some] for some in zip(*pairs, strict=True)]
        cases = sorted(patients(pairs[0][1], kind))
        table = [[patients(a, kind)[c] - patients(b, kind)[c] for c in cases] for a, b in pairs]
        without = {}
        for site in sorted({site for site, _ in cases}):
            rest = [[d for (name, _), d in zip(cases, row, strict=True) if name != site] for row in table]
            if rest[0]:
                without[site] = Elsewhere(statistics.fmean(map(statistics.fmean, rest)), crossed_test(rest))
            else:
                without[site] = None
        tests[name] = (paired_t_test(*means), len(seeds), crossed_test(table), len(cases), without)
    adjusted = holm([chance(seeds, crossed) for seeds, _, crossed, _, _ in tests.values()])
    return {
        name: str(judge(*four, adjusted=p, without=without))
        for (name, (*four, without)), p in zip(tests.items(), adjusted, strict=True)
    }


def table(record: dict[str, Any]) -> str:
    """Tabulate the means over the seeds for each federation, method and remedy."""
    lines = ["| federation | method | own | borrowed | of full labels | site_C: borrowed | seeds | verdict |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|---|")
    for federation, methods in record["runs"].items():
        kind = (
            "borrowed"
            if any("borrowed" in run for runs in methods.values() for run in runs.values())
            else "own"
        )
        judged = verdicts(methods, REFERENCE, kind) if REFERENCE in methods else {}
        for name, runs in methods.items():
            remedy = name.partition("+")[2]
            full = methods.get("+".join(filter(None, ("full labels", remedy))), {})
            common = runs.keys() & full.keys()
            means = [
                statistics.fmean(over_sites(run, *what) for run in runs.values())
                for what in (("own",), ("borrowed",), ("borrowed", "site_C"))
            ]
            share = math.nan
            if common:
                share = sum(over_sites(runs[s], kind) for s in common) / sum(
                    over_sites(full[s], kind) for s in common
                )
            shown = ["–" if math.isnan(v) else f"{v:.3f}" for v in (*means[:2], share, means[2])]
            verdict = "reference" if name == REFERENCE else judged.get(name, "open")
            lines.append(f"| {federation} | {name} | {' | '.join(shown)} | {len(runs)} | {verdict} |")
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
    arguments.add_argument("--rounds", type=int, default=30)
    arguments.add_argument("--patients", type=int, default=12)
    arguments.add_argument("--federations", nargs="+", default=list(FEDERATIONS), choices=list(FEDERATIONS))
    arguments.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    arguments.add_argument("--remedies", nargs="+", default=list(REMEDIES))
    arguments.add_argument("--engine", default="inprocess", help="inprocess or nvflare (default inprocess)")
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
            data = Path(folder) / f"{federation}-{seed}".replace(" ", "_")
            if not data.exists():
                data.mkdir()
                record["labelled"][federation] = make_federation(data, federation, options.patients, seed)
            done[str(seed)] = one(data, run, options)
            file.write_text(json.dumps(record) + "\n")
            (options.out / "table.md").write_text(table(record))
            print(federation, method, seed, done[str(seed)]["seconds"], flush=True)


if __name__ == "__main__":
    main()
