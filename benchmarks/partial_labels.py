"""Sites of the phantom that have outlined different structures: Dice of own and borrowed classes, by method.

    python benchmarks/partial_labels.py --out docs/results/partial_labels --seeds 0 1 2

A run that the record has is not made again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import hardware

from medfedaug.data.datasets.partial_phantom import TRUTH, annotate_apart
from medfedaug.data.datasets.phantom import make_phantom
from medfedaug.data.sites import find_sites
from medfedaug.experiments.simulate import configure, simulate
from medfedaug.methods import parse_methods
from medfedaug.runs.evaluate import evaluate_model

SCANNERS = {"alike": [0.0, 0.0, 0.0, 0.0], "odd": [0.0, 0.0, 2.0, 0.0]}
# By name: whether everything is outlined, methods, and the loss of what is not annotated.
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
REMEDIES = ("", "fedrdn")
NETWORK = {"channels": [16, 32, 64, 64], "strides": [2, 2, 2], "num_res_units": 1, "norm": "batch"}


def one(folder: Path, name: str, remedy: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train once, and score every class at every site by the truth."""
    full, methods, loss = RUNS[name]
    data = folder / TRUTH if full else folder
    started = time.perf_counter()
    sites, out = find_sites(data), Path(tempfile.mkdtemp(dir=folder.parent))
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
        without_metrics=("hd95", "nsd"),
        network_args=NETWORK,
        partial_loss=loss,
    )
    result = simulate(data, out / "run", config, engine=options.engine, sites=sites, report=False)
    seconds = time.perf_counter() - started
    scores = evaluate_model(out / "run", folder / TRUTH)["sites"]
    rounds = result["rounds"]
    return {
        "seconds": round(seconds, 1),
        "bytes_up": sum(entry["bytes_up"] for entry in rounds),
        "selected_round": result["selected_round"],
        "dice": {
            site: {label: found["dice"] for label, found in entry["classes"].items()}
            for site, entry in scores.items()
        },
    }


def mean(scores: dict[str, dict[str, float | None]], cells: list[tuple[str, str]]) -> float:
    """The mean Dice of some cells of sites and classes; a structure that is nowhere there has none."""
    known = [scores[site][label] for site, label in cells if scores[site][label] is not None]
    return sum(known) / len(known)


def table(record: dict[str, Any]) -> str:
    """One line for each scanner, method and remedy: means over the seeds."""
    lines = ["| scanners | method | own | borrowed | of full labels | odd site: borrowed | seeds |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    own, sites = record["labelled"], list(record["labelled"])
    structures = sorted({label for labels in own.values() for label in labels})
    cells = {
        kind: [(s, c) for s in sites for c in structures if (c in own[s]) == (kind == "own")]
        for kind in ("own", "borrowed")
    }
    odd = [(s, c) for s, c in cells["borrowed"] if s == sites[2]]
    for scanners, methods in record["runs"].items():
        full = {}  # of each remedy, before what is compared with it
        for name, seeds in sorted(methods.items(), key=lambda one: not one[0].startswith("full labels")):
            found = [one["dice"] for one in seeds.values()]
            values = [
                sum(mean(dice, some) for dice in found) / len(found)
                for some in (cells["own"], cells["borrowed"], odd)
            ]
            remedy = name.partition("+")[2]
            if name.startswith("full labels"):
                full[remedy] = values[1]
            share = f"{values[1] / full[remedy]:.3f}" if remedy in full else "–"
            shown = [f"{values[0]:.3f}", f"{values[1]:.3f}", share, f"{values[2]:.3f}"]
            lines.append(f"| {scanners} | {name} | {' | '.join(shown)} | {len(found)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing, and write numbers and table after each run."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--out", type=Path, required=True, help="for numbers.json and table.md")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments.add_argument("--rounds", type=int, default=30)
    arguments.add_argument("--patients", type=int, default=12)
    arguments.add_argument("--scanners", nargs="+", default=list(SCANNERS), choices=list(SCANNERS))
    arguments.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    arguments.add_argument("--remedies", nargs="+", default=list(REMEDIES))
    arguments.add_argument("--engine", default="inprocess", help="inprocess or nvflare (default inprocess)")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "numbers.json"
    record = json.loads(file.read_text()) if file.exists() else {"hardware": hardware(), "runs": {}}
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            for scanners in options.scanners:
                data = Path(folder) / f"{scanners}-{seed}"
                for remedy in options.remedies:
                    for name in options.runs:
                        done = (
                            record["runs"]
                            .setdefault(scanners, {})
                            .setdefault("+".join(filter(None, (name, remedy))), {})
                        )
                        if str(seed) in done:
                            continue
                        if not data.exists():
                            make_phantom(
                                data,
                                patients=options.patients,
                                shape=(48, 48, 8),
                                seed=seed,
                                classes=5,
                                shift=SCANNERS[scanners],
                                scanner_seed=1,
                            )
                            record["labelled"] = annotate_apart(data)
                        done[str(seed)] = one(data, name, remedy, seed, options)
                        file.write_text(json.dumps(record, indent=1) + "\n")
                        (options.out / "table.md").write_text(table(record))
                        print(scanners, name, remedy, seed, done[str(seed)], flush=True)


if __name__ == "__main__":
    main()
